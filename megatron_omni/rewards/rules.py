"""Rewards that are a rule on the pixels: quick to learn, good for tests and as examples of own rewards."""

import re
from typing import Any

import numpy as np

from megatron_omni.errors import UserError
from megatron_omni.rewards.base import Reward


def brightness(images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
    """Mean pixel value, from 0 (black) to 1 (white). A reward may be a plain function like this one."""
    return (images.mean(axis=(1, 2, 3)) / 255).tolist()


class ColourMatchReward(Reward):
    """How close the mean colour is to the first colour named in the prompt: 1 − mean |difference| / 255."""

    COLOURS = {  # noqa: RUF012
        "black": (0, 0, 0),
        "white": (255, 255, 255),
        "red": (255, 0, 0),
        "green": (0, 255, 0),
        "blue": (0, 0, 255),
        "yellow": (255, 255, 0),
        "cyan": (0, 255, 255),
        "magenta": (255, 0, 255),
    }

    def check_prompt(self, metadata: dict[str, Any]) -> None:
        if self._colour(metadata["prompt"]) is None:
            raise UserError(
                f"reward colour_match: no colour is named in the prompt {metadata['prompt']!r}; "
                f"name one of {', '.join(self.COLOURS)}"
            )

    def score(self, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
        wanted = np.array([self._colour(row["prompt"]) for row in metadata])
        return (1 - np.abs(images.mean(axis=(1, 2)) - wanted).mean(axis=1) / 255).tolist()

    def _colour(self, prompt: str) -> tuple[int, int, int] | None:
        words = re.findall(r"\w+", prompt.lower())
        return next((self.COLOURS[word] for word in words if word in self.COLOURS), None)
