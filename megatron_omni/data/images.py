"""Supervised sets: images with their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megatron_omni.data.prompts import PromptRow, PromptSet
from megatron_omni.errors import UserError


@dataclass(frozen=True)
class ImageSet:
    """Prompts with an image each, all of one size. Images are decoded when they are asked for."""

    prompts: PromptSet
    folder: Path
    """Where the rows' "image" paths start."""
    height: int
    width: int

    @classmethod
    def from_file(cls, path: str | Path, height: int, width: int) -> "ImageSet":
        """Read .jsonl rows {"prompt", "image"}, the image's path relative to the file.

        Raises `UserError` that names the file for an image that is missing, unreadable or not of `height` ×
        `width` pixels: all headers are read here, so that a long run does not meet one late.
        """
        images = cls(PromptSet.from_file(path), Path(path).parent, height, width)
        for row in images.prompts.rows:
            if not isinstance(row.metadata.get("image"), str):
                raise UserError(f'{path}: the row with prompt {row.prompt!r} has no "image" path')
            images._open(row).close()
        return images

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, iteration: int, size: int, seed: int) -> list[PromptRow]:
        """The rows of `iteration`, over all data-parallel ranks; `load` those that are wanted."""
        return self.prompts.batch(iteration, size, seed)

    def load(self, rows: Sequence[PromptRow]) -> Tensor:
        """Decode the rows' images. Returns [len(rows), 3, height, width] uint8, RGB."""
        pixels = np.stack([self._decode(row) for row in rows])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def _decode(self, row: PromptRow) -> np.ndarray:
        with self._open(row) as image:
            try:
                return np.asarray(image.convert("RGB"))
            except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
                raise UserError(f"image {image.filename!r} is damaged: {error}") from error

    def _open(self, row: PromptRow) -> Image.Image:
        path = self.folder / row.metadata["image"]
        try:
            image = Image.open(path)
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(f"image {str(path)!r} cannot be read: {error}") from error
        if image.size != (self.width, self.height):
            raise UserError(
                f"image {str(path)!r} is {image.width}×{image.height} pixels, but the run is set to width "
                f"{self.width} and height {self.height}; resize it or set --width and --height"
            )
        return image
