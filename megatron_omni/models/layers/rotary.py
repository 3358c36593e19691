"""Rotary position embedding from integer positions on several axes."""

import torch
from torch import Tensor


def rotations(positions: Tensor, axes: tuple[int, ...], theta: float = 10000.0) -> Tensor:
    """exp(i · angle) of tokens at integer `positions` [tokens, axes] → [tokens, head_dim / 2] complex64.

    Axis i turns `axes[i]` channels of a head. Matches diffusers' `QwenEmbedRope`.
    """
    angles = [
        position[:, None]
        * (1.0 / torch.pow(theta, torch.arange(0, width, 2, device=position.device) / width))
        for position, width in zip(positions.unbind(-1), axes, strict=True)
    ]
    angle = torch.cat(angles, dim=-1)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the channel pairs (0, 1), (2, 3), … of float32 x [..., head_dim] by rotation [..., head_dim / 2].

    One complex product is the cheapest way to do so without a fused kernel.
    """
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(-2)
