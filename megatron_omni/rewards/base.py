"""What every reward owes the loop. Free of torch: scoring processes import it and start quickly."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

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


@runtime_checkable
class Reward(Protocol):
    """Scores decoded images. Higher is better. Built without arguments and called in a scoring process.

    A user's reward is a subclass, or a plain function with the signature of `score`.
    """

    def check_prompt(self, metadata: dict[str, Any]) -> None:
        """Raise `UserError` if this prompt can never be scored (for OCR: no quoted target)."""

    def score(self, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
        """One finite number an image, which depends on that image and its metadata alone.

        images: [B, H, W, 3] uint8, RGB. metadata: one dictionary an image, the prompt set's row with
        "prompt". NaN, infinity and exceptions mean failure, never a number standing for it; after an
        exception the batch is scored once more, image by image.
        """
        ...
