"""Rewards that fail."""

import numpy as np


def nan(images: np.ndarray, metadata: list[dict]) -> list[float]:
    return [float("nan")] * len(images)


def sometimes_nan(images: np.ndarray, metadata: list[dict]) -> list[float]:
    """NaN for about half of the pictures, by their content."""
    means = images.mean(axis=(1, 2, 3))
    return [float("nan") if int(mean * 1000) % 2 else mean / 255 for mean in means]
