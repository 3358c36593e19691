"""Feed-forward network."""

import torch.nn.functional as F
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from megatron_omni.models.layers.linear import Backend, column_parallel, row_parallel


class MLP(MegatronModule):
    """Linear, GELU (tanh approximation), linear."""

    def __init__(self, config: TransformerConfig, backend: Backend):
        super().__init__(config)
        self.linear_fc1 = column_parallel(backend, config, config.hidden_size, config.ffn_hidden_size)
        self.linear_fc2 = row_parallel(backend, config, config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        intermediate, _ = self.linear_fc1(x)
        output, _ = self.linear_fc2(F.gelu(intermediate, approximate="tanh"))
        return output
