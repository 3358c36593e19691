"""Comparing folders."""

import hashlib
from pathlib import Path


def hashes(folder: Path) -> dict[str, str]:
    """Of every file in `folder`, by its path there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
