"""Embedding of the noise level."""

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from megatron_omni.models.layers.linear import replicated

FREQUENCIES = 256


def sinusoid(sigma: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines, then sines, of 1000 sigma [B] at geometric frequencies → [B, 256] in `dtype`.

    Angles are float32. Sigma is first rounded to `dtype`, as diffusers does, so that a bfloat16 model sees
    in training what it sees in inference.
    """
    half = FREQUENCIES // 2
    exponent = -math.log(10000) / half * torch.arange(half, dtype=torch.float32, device=sigma.device)
    angle = 1000 * (sigma.to(dtype).float()[:, None] * torch.exp(exponent))
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)


class TimeEmbedding(MegatronModule):
    """Noise level [B] in [0, 1] → [B, hidden], as diffusers' `Timesteps` and `TimestepEmbedding`."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.linear_1 = replicated(config, FREQUENCIES, config.hidden_size)
        self.linear_2 = replicated(config, config.hidden_size, config.hidden_size)

    def forward(self, sigma: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(sinusoid(sigma, self.config.params_dtype))))
