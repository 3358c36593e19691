"""Adaptive layer norm: shift, scale and gate from the time embedding (AdaLN-Zero, arXiv:2212.09748)."""

import copy

import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn

from megatron_omni.models.layers.linear import ColumnParallelLinear


class Modulation(MegatronModule):
    """SiLU(time embedding) [B, hidden] → [B, chunks * hidden]; zero at initialisation.

    These layers hold a third of a large model's weights, so they are split over tensor-parallel ranks.
    Where a rank's gradient is a partial sum (`partial_grad`: it sees its share of the sequence only), the
    shares are summed on the way back.
    """

    def __init__(self, config: TransformerConfig, chunks: int, partial_grad: bool):
        super().__init__(config)
        self.gather = (
            all_gather_last_dim_from_tensor_parallel_region
            if partial_grad
            else gather_from_tensor_model_parallel_region
        )
        # The input has no sequence dimension to split.
        linear_config = copy.copy(config)
        linear_config.sequence_parallel = False
        self.linear = ColumnParallelLinear(
            config.hidden_size, chunks * config.hidden_size, config=linear_config, init_method=nn.init.zeros_
        )
        self.is_split = self.linear.output_size_per_partition < self.linear.output_size

    def forward(self, silu_time: Tensor) -> Tensor:
        output, _ = self.linear(silu_time)
        return self.gather(output) if self.is_split else output


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm without weights of x [tokens, B, hidden], times 1 + scale [B, hidden], plus shift."""
    return (F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale)).add_(shift)


def add_gated(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """x + gate · branch, for x and branch [tokens, B, hidden], gate [B, hidden]."""
    return (gate * branch).add_(x)
