"""A complete Hugging Face folder: the weights of the model in training, and the frozen parts beside them."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from torch import Tensor

from megatron_omni.checkpoint.mapping import Entry
from megatron_omni.checkpoint.replace import replacing
from megatron_omni.checkpoint.safetensors_folder import (
    SafetensorsFolder,
    SafetensorsWriter,
    WeightFiles,
    is_weights,
)
from megatron_omni.checkpoint.safetensors_header import DTYPES
from megatron_omni.errors import UserError

Shape = tuple[int, ...]

Progress = Callable[[int], None]
"""Told of every piece of work done, in bytes."""


def _silent(nbytes: int) -> None:
    pass


def hf_shapes(entries: Iterable[Entry], local_shapes: Mapping[str, Shape], size: int) -> dict[str, Shape]:
    """A model's Hugging Face tensors with their shapes, from its parameters on one of `size` ranks."""
    return {
        name: shape
        for entry in entries
        for name, shape in zip(entry.hf, entry.hf_shapes(local_shapes[entry.megatron], size), strict=True)
    }


def check_weights(weights: SafetensorsFolder, wanted: Mapping[str, Shape]) -> None:
    """All faults of a folder's weights for a model with the tensors `wanted`, in one `UserError`."""
    found = set(weights.names)
    faults = [f"{name}: missing in the folder" for name in wanted.keys() - found]
    faults += [f"{name}: not in the model" for name in found - wanted.keys()]
    for name in wanted.keys() & found:
        if weights.shape(name) != wanted[name]:
            faults.append(
                f"{name}: {list(weights.shape(name))} in the folder, {list(wanted[name])} in the model"
            )
        if weights.dtype(name) not in DTYPES:
            faults.append(f"{name}: dtype {weights.dtype(name)}, known are {', '.join(DTYPES)}")
    if faults:
        lines = "\n".join(f"  {fault}" for fault in sorted(faults))
        raise UserError(
            f"the weights in {weights.folder} do not fit the model; does its config.json belong to them?\n"
            + lines
        )


def check_target(source: Path, folder: Path, transformer_folder: str) -> None:
    """Raise `UserError` if `folder` is neither free nor an older export."""
    check_apart(source, folder)
    if (folder / transformer_folder / "config.json").exists() or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(
            f"cannot write {folder}: it holds something other than an older export; empty it first."
        )


def check_apart(source: Path, folder: Path) -> None:
    """Raise `UserError` if one is, or is within, the other."""
    old, new = source.resolve(), folder.resolve()
    if old.is_relative_to(new) or new.is_relative_to(old):
        raise UserError(f"cannot write {folder}: it overlaps with the source folder {source}.")


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    files: WeightFiles,
    source: Path,
    folder: Path,
    transformer_folder: str,
    progress: Progress = _silent,
) -> None:
    """Write `tensors` as `files` lays them out, beside all that `source` holds but its weights.

    `progress` is told of the copied files. An older export in `folder` is replaced when the new one is
    complete. Raises `UserError`, and leaves
    `folder` as it was, if it cannot be written.
    """
    with explaining(folder), replacing(folder) as partial:
        copy_frozen_parts(source, partial, transformer_folder, progress)
        with closing(SafetensorsWriter(files, partial / transformer_folder)) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)


def frozen_parts(source: Path, transformer_folder: str) -> list[Path]:
    """Files of a folder, relative to it, without the weights in `transformer_folder`.

    All of these: in another precision or format they are copies of the old weights.
    """
    return [
        (Path(directory) / name).relative_to(source)
        for directory, _, names in os.walk(source, followlinks=True)
        for name in names
        if not (Path(directory) == source / transformer_folder and is_weights(name))
    ]


def copy_frozen_parts(
    source: Path, folder: Path, transformer_folder: str, progress: Progress = _silent
) -> None:
    """Copy `frozen_parts` to `folder`."""
    (folder / transformer_folder).mkdir(parents=True, exist_ok=True)
    for path in frozen_parts(source, transformer_folder):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, folder / path)
        progress((folder / path).stat().st_size)


@contextmanager
def explaining(folder: Path) -> Iterator[None]:
    """Turn a failure to write `folder` into a `UserError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # PyTorch's writer of tensors hides the operating system's error.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        parent = next(path for path in folder.absolute().parents if path.exists())
        free = shutil.disk_usage(parent).free / 2**30
        raise UserError(
            f"cannot write {folder}: {error}. {free:.2f} GiB are free there; nothing was changed."
        ) from error
