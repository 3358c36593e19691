"""Folders and files that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def partial_path(path: Path) -> Path:
    """Where a folder or file is written before it takes the name `path`: on the same file system."""
    return path.with_name(f".{path.name}.partial")


def begin(folder: Path) -> Path:
    """An empty folder to fill in place of `folder`. What a killed process left there is removed."""
    partial, old = partial_path(folder), _old_path(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)  # killed between the two renames of `commit`
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path) -> None:
    """Flush the filled folder to the disk and give it the name `folder`, in place of an older one."""
    partial, old = partial_path(folder), _old_path(folder)
    for directory, _, names in os.walk(partial):
        for path in [*(Path(directory, name) for name in names), Path(directory)]:
            _flush(path)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove what was written so far; an older `folder` stays."""
    shutil.rmtree(partial_path(folder), ignore_errors=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the name `folder` when the block ends without an error."""
    try:
        yield begin(folder)
        commit(folder)
    except BaseException:
        discard(folder)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a small file whole."""
    partial = partial_path(path)
    try:
        partial.write_text(text)
        _flush(partial)
        partial.rename(path)
        _flush(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _old_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
