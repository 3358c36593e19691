"""What every reward owes the loop. Free of torch: scoring processes import it and start quickly."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megatron_omni.rewards.options import RewardOptions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch of images. B images."""

    values: "Tensor"
    """[B] float32; 0 and meaningless where `valid` is false."""
    valid: "Tensor"
    """[B] bool: false where the scorer failed. Such a sample carries no weight and is counted."""
    error: str = ""
    """What the last failure was; empty if all samples are valid."""


class Unscored(Exception):
    """Some images have no score, for a reason that asking again would not mend: they are masked at once."""

    def __init__(self, reason: str, values: list[float] | None = None):
        """values: one an image, NaN for those without a score; None if none has one."""
        super().__init__(reason)
        self.values = values


class Reward(ABC):
    """Scores decoded images. Higher is better. Built once in each scoring process and called there.

    A user's reward is a subclass, or a plain function with the signature of `score`.
    """

    concurrency: int = 1
    """Calls of `score` in a scoring process at once, each in a thread. More than 1 is for rewards that wait
    for others to compute."""
    batch_size: int | None = None
    """Images in one call of `score` at most; None for no limit."""
    time_limit: float | None = None
    """Seconds that one call of `score` may take; None for the run's `reward_timeout`."""

    @classmethod
    def from_options(cls, options: RewardOptions) -> Self:
        """The reward with a run's settings. Most have none."""
        return cls()

    def check_prompt(self, metadata: dict[str, Any]) -> None:  # noqa: B027 (most take every prompt)
        """Raise `UserError` if this prompt can never be scored (for OCR: no quoted target)."""

    def check_prompts(self, metadata: list[dict[str, Any]]) -> None:
        """Raise `UserError` if scoring cannot begin. Called once, before training, with all prompts."""
        for row in metadata:
            self.check_prompt(row)

    @abstractmethod
    def score(self, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
        """One finite number an image, which depends on that image and its metadata alone.

        images: [B, H, W, 3] uint8, RGB. metadata: one dictionary an image, the prompt set's row with
        "prompt". NaN, infinity and exceptions mean failure, never a number standing for it; after an
        exception other than `Unscored` the batch is scored once more, image by image.
        """
