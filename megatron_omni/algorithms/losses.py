"""Losses that several algorithms share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClippedLoss:
    """B samples."""

    values: Tensor
    """[B]."""
    clipped: Tensor
    """[B] bool, where the ratio lies outside the clip range."""


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, clip_range: float) -> ClippedLoss:
    """max(−A·ρ, −A·clip(ρ, 1−ε, 1+ε)), PPO's clipped objective (arXiv 1707.06347, eq. 7). [B] each."""
    bounded = ratio.clamp(1 - clip_range, 1 + clip_range)
    return ClippedLoss(
        torch.maximum(-advantages * ratio, -advantages * bounded), (ratio - 1).abs() > clip_range
    )


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """[B], KL between two steps of equal std (the step's own, with √−dt), as a mean over dimensions."""
    return ((mean - reference_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)
