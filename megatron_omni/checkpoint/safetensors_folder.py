"""The safetensors files of a Hugging Face folder: one file, or shards with an index."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_omni.errors import UserError

STEMS = ("diffusion_pytorch_model", "model")
"""Names of weight files: diffusers' and transformers'."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """Read access to the weights of a folder, tensor by tensor.

    Opening it reads the headers only. Raises `UserError` for a missing folder, file or shard, for a damaged
    or truncated file and for an index that does not fit the files.
    """

    def __init__(self, folder: Path):
        self.index, self.paths = _weight_files(folder)
        self._files = {path: _open(path) for path in self.paths}
        self._file_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        if self.index:
            _check_index(self.index, self._file_of)

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def path(self, name: str) -> Path:
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """In the words of the format: "F32", "BF16", …"""
        return self._slice(name).get_dtype()

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor; nothing else of it is read from the disk."""
        return self._slice(name)[part]

    def _slice(self, name: str):
        return self._files[self._file_of[name]].get_slice(name)


class SafetensorsWriter:
    """Fills copies of safetensors files with new values, tensor by tensor, in any order.

    The copies have the originals' headers to the byte: the same tensors, dtypes, order and metadata. (The
    library itself writes a file in one go, from all its tensors, and in an order of its own.)
    """

    def __init__(self, original: SafetensorsFolder, folder: Path):
        self._original = original
        self._targets: dict[Path, BinaryIO] = {}
        self._starts: dict[str, int] = {}
        for path in original.paths:
            header, tensors = _read_header(path)
            target = (folder / path.name).open("wb")
            self._targets[path] = target
            target.write(header)
            for name, entry in tensors.items():
                self._starts[name] = len(header) + entry["data_offsets"][0]

    def write(self, name: str, tensor: Tensor) -> None:
        """Store the tensor in the original's dtype."""
        dtype = DTYPES[self._original.dtype(name)]
        data = tensor.to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy()
        target = self._targets[self._original.path(name)]
        target.seek(self._starts[name])
        target.write(data)

    def close(self) -> None:
        for target in self._targets.values():
            target.close()


def _weight_files(folder: Path) -> tuple[Path | None, list[Path]]:
    """The index, if there is one, and the weight files."""
    for stem in STEMS:
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        if index.is_file():
            return index, [folder / name for name in sorted(set(_weight_map(index).values()))]
        if single.is_file():
            return None, [single]
    problem = "holds no weights" if folder.is_dir() else "does not exist"
    wanted = " or ".join(f"{stem}.safetensors[.index.json]" for stem in STEMS)
    raise UserError(f"{folder} {problem}: give a Hugging Face folder with {wanted}.")


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor."""
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is damaged ({error!r}): fetch the folder anew.") from error


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        missing = "" if path.exists() else " is missing or"
        raise UserError(f"{path}{missing} cannot be read ({error}): fetch the folder anew.") from error


def _check_index(index: Path, file_of: dict[str, Path]) -> None:
    listed = _weight_map(index)
    wrong = [name for name, path in file_of.items() if listed.get(name) != path.name]
    wrong += [name for name in listed if name not in file_of]
    if wrong:
        raise UserError(f"{index} does not fit its files; tensors in question: {', '.join(sorted(wrong))}.")


def _read_header(path: Path) -> tuple[bytes, dict[str, dict]]:
    """The bytes before the data, and the entry of each tensor."""
    with path.open("rb") as file:
        size = file.read(8)
        text = file.read(int.from_bytes(size, "little"))
    tensors = json.loads(text)
    tensors.pop("__metadata__", None)
    return size + text, tensors
