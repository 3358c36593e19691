"""What every reward owes the loop."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch of images. B images."""

    values: Tensor
    """[B] float32; meaningless where `valid` is false."""
    valid: Tensor
    """[B] bool: false where the scorer failed. Such a sample carries no weight and is counted."""


class Reward(Protocol):
    """Scores decoded images. Higher is better. Built and called in a worker process."""

    def check_prompt(self, metadata: dict[str, Any]) -> None:
        """Raise `UserError` if this prompt can never be scored (for OCR: no quoted target)."""
        ...

    def score(self, images: Tensor, metadata: list[dict[str, Any]]) -> list[float]:
        """One number an image; NaN or an exception means failure, never a number standing for it.

        images: [B, 3, H, W] uint8. metadata: one dictionary an image, the prompt set's row with "prompt".
        """
        ...
