"""Group-relative advantages."""

from typing import Literal

import torch
from torch import Tensor

from megatron_omni.algorithms.base import Advantages
from megatron_omni.rewards.combination import GlobalRewards

EPSILON = 1e-4


def group_advantages(
    rewards: GlobalRewards, combination: Literal["sum", "separate"], *, global_std: bool, clip_max: float
) -> Advantages:
    """A = (r − mean of the group) / (std + 1e-4), clamped to ±clip_max; Flow-GRPO, arXiv 2505.05470.

    One value a sample. The std is unbiased, of the group or, with `global_std`, of the whole batch.
    Failed samples enter no statistic and weigh 0; a group with one valid sample gets 0.

    Of several rewards, r is the weighted sum (`sum`); or each has its own A and these are added with the
    weights, so that a reward's scale does not matter (`separate`; MixGRPO, arXiv 2507.21802).
    """
    valid = rewards.valid
    if combination == "sum":
        values = _normalise(rewards.values, valid, rewards.prompt_id, global_std)
    else:
        parts = zip(rewards.weights.values(), rewards.parts, strict=True)
        values = sum(
            weight * _normalise(part, valid, rewards.prompt_id, global_std) for weight, part in parts
        )
    values = values.clamp(-clip_max, clip_max)
    kept = valid.float()
    weights = kept * len(kept) / kept.sum().clamp(min=1)
    return Advantages(values, weights, float((values == 0).float().mean()))


def _normalise(rewards: Tensor, valid: Tensor, prompt_id: Tensor, global_std: bool) -> Tensor:
    """[B], each value's distance from the mean of its group in standard deviations; 0 for failed samples.

    Args:
        rewards: [B] float; valid: [B] bool; prompt_id: [B] int, equal for the members of a group.
    """
    rewards = torch.where(valid, rewards.float(), 0.0)
    _, group = prompt_id.unique(return_inverse=True)
    groups = int(group.max()) + 1

    def group_sum(values: Tensor) -> Tensor:
        return values.new_zeros(groups).index_add(0, group, values)

    kept = valid.float()
    count = group_sum(kept)
    centred = (rewards - (group_sum(rewards) / count.clamp(min=1))[group]) * kept
    if global_std:
        std = rewards[valid].std() if int(valid.sum()) > 1 else rewards.new_zeros(())
    else:
        std = (group_sum(centred**2) / (count - 1).clamp(min=1)).sqrt()[group]
    return centred / (std + EPSILON)
