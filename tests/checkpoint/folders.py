"""Hugging Face folders of Qwen-Image, and comparing folders."""

import hashlib
from pathlib import Path

import torch

from tests.models import builders
from tests.models.pipeline_builder import tiny_pipeline_folder


def qwen_image_folder(path: Path, dtype: torch.dtype, **options) -> Path:
    """A tiny pipeline with a transformer of 4 layers and 4 heads; `options` are those of saving it."""
    tiny_pipeline_folder(path)
    for file in (path / "transformer").iterdir():
        file.unlink()
    builders.qwen_image(num_layers=4).to(dtype).save_pretrained(path / "transformer", **options)
    return path


def hashes(folder: Path) -> dict[str, str]:
    """Of every file in `folder`, by its path there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
