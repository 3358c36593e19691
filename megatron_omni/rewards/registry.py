"""The rewards that have names, and how one is built from its name or path."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_omni.errors import UserError
from megatron_omni.registry import Registry
from megatron_omni.rewards.base import Reward
from megatron_omni.rewards.options import RewardOptions

REWARDS = Registry(
    "reward",
    {
        "ocr": "megatron_omni.rewards.ocr:OcrReward",
        "ocr_heldout": "megatron_omni.rewards.ocr:HeldOutOcrReward",
        "judge_ocr": "megatron_omni.rewards.judges:OcrJudge",
        "judge_score": "megatron_omni.rewards.judges:ScoreJudge",
        "http": "megatron_omni.rewards.http_scorer:HttpReward",
        "brightness": "megatron_omni.rewards.rules:brightness",
        "colour_match": "megatron_omni.rewards.rules:ColourMatchReward",
    },
)


class FunctionReward(Reward):
    """A plain scoring function as a reward; it takes every prompt."""

    def __init__(self, function: Callable[[np.ndarray, list[dict[str, Any]]], list[float]]):
        self.function = function

    def score(self, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
        return self.function(images, metadata)


def build_reward(name: str, options: RewardOptions | None = None) -> Reward:
    """The reward of a registered name or 'package.module:attribute' path: a class or a scoring function."""
    found = REWARDS.get(name)
    if not inspect.isclass(found):
        return FunctionReward(found)
    if not issubclass(found, Reward):
        raise UserError(
            f"reward {name!r} is a class without score(images, metadata) and check_prompt(metadata): "
            "derive it from megatron_omni.rewards.base.Reward"
        )
    return found.from_options(options or RewardOptions())
