"""The safetensors files of a Hugging Face folder: one file, or shards with an index."""

import ctypes
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_omni.checkpoint.safetensors_header import DTYPES, Header, StoredTensor
from megatron_omni.errors import UserError

STEMS = ("diffusion_pytorch_model", "model")
"""Names of weight files: diffusers' and transformers'."""

HEADER_SUFFIX = ".header"


@dataclass(frozen=True)
class WeightFiles:
    """How weights are laid out in files: everything about these files but the values."""

    headers: dict[str, Header]
    """By file name."""
    index: tuple[str, str] | None
    """Name and text of the index, if there is one."""

    @property
    def file_of(self) -> dict[str, str]:
        """File of each tensor."""
        return {name: file for file, header in self.headers.items() for name in header.tensors}

    @property
    def total_bytes(self) -> int:
        return sum(header.file_bytes for header in self.headers.values())

    def with_dtype(self, dtype: torch.dtype) -> "WeightFiles":
        """The same tensors in the same files, in another dtype."""
        headers = {file: header.with_dtype(dtype) for file, header in self.headers.items()}
        index = self.index and (self.index[0], _index_text(headers))
        return WeightFiles(headers, index)

    def resharded(self, max_shard_size: str) -> "WeightFiles":
        """The same tensors in files of `max_shard_size`, such as "5GB", named and cut as by diffusers.

        Raises `UserError` for a size that is none.
        """
        tensors = {name: t for header in self.headers.values() for name, t in header.tensors.items()}
        stem = next(stem for stem in STEMS if next(iter(self.headers)).startswith(stem))
        try:
            split = split_state_dict_into_shards_factory(
                tensors,
                get_storage_size=lambda tensor: tensor.nbytes,
                filename_pattern=f"{stem}{{suffix}}.safetensors",
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise UserError(f"a file of size {max_shard_size!r} is not understood: {error}") from error
        metadata = next(iter(self.headers.values())).metadata
        headers = {
            file: Header.of(((name, tensors[name].dtype, tensors[name].shape) for name in names), metadata)
            for file, names in split.filename_to_tensors.items()
        }
        index = (f"{stem}.safetensors.index.json", _index_text(headers)) if split.is_sharded else None
        return WeightFiles(headers, index)

    def save_headers(self, folder: Path) -> None:
        """Keep the layout in `folder`, without the weights."""
        for file, header in self.headers.items():
            (folder / (file + HEADER_SUFFIX)).write_bytes(header.raw)
        self.save_index(folder)

    def save_index(self, folder: Path) -> None:
        if self.index:
            name, text = self.index
            (folder / name).write_text(text)

    @staticmethod
    def from_headers(folder: Path) -> "WeightFiles":
        """What `save_headers` kept. Raises `UserError` if there is nothing, or it is damaged."""
        try:
            headers = {
                path.name.removesuffix(HEADER_SUFFIX): Header(path.read_bytes())
                for path in sorted(folder.glob(f"*.safetensors{HEADER_SUFFIX}"))
            }
            index = next(folder.glob("*.safetensors.index.json"), None)
            files = WeightFiles(headers, index and (index.name, index.read_text()))
            if not files.file_of:
                raise UserError(f"{folder} holds no *.safetensors{HEADER_SUFFIX}: convert the model anew.")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the headers in {folder} are damaged ({error!r}): convert the model anew."
            ) from error
        return files


class SafetensorsFolder:
    """Read access to the weights of a folder, tensor by tensor.

    Opening it reads the headers only. Raises `UserError` for a missing folder, file or shard, for a damaged
    or truncated file and for an index that does not fit the files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index, paths = _weight_files(folder)
        for path in paths:
            _check_file(path)
        headers = {path.name: Header.read(path) for path in paths}
        self.files = WeightFiles(headers, index and (index.name, index.read_text()))
        self._file_of = self.files.file_of
        if index:
            _check_index(index, self._file_of)

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """In the words of the format: "F32", "BF16", …"""
        return self._stored(name).dtype

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor. Of the first dimension nothing else is read.

        With plain reads: pages of a mapped file would count as this process's memory, in the end all of them.
        """
        stored, file = self._stored(name), self._file_of[name]
        dtype = DTYPES[stored.dtype]
        shape, start = stored.shape, len(self.files.headers[file].raw) + stored.start
        if shape:
            first, last, _ = part[0].indices(shape[0])
            row = stored.nbytes // max(shape[0], 1)
            shape, start = (last - first, *shape[1:]), start + first * row
        data = torch.empty(shape, dtype=dtype)
        # Not by way of NumPy, which would make the memory impossible to take back.
        memory = (ctypes.c_byte * data.nbytes).from_address(data.data_ptr())
        with (self.folder / file).open("rb") as source:
            source.seek(start)
            if source.readinto(memory) < data.nbytes:
                raise UserError(f"{self.folder / file} has been cut off meanwhile: fetch the folder anew.")
        return data[(slice(None), *part[1:])] if shape else data

    def _stored(self, name: str) -> StoredTensor:
        return self.files.headers[self._file_of[name]].tensors[name]


class SafetensorsWriter:
    """Writes the weight files of a layout, tensor by tensor, in any order.

    (The library itself writes a file in one go, from all its tensors, and in an order of its own.)
    """

    def __init__(self, files: WeightFiles, folder: Path):
        self._files = files
        self._file_of = files.file_of
        self._targets: dict[str, BinaryIO] = {}
        files.save_index(folder)
        for file, header in files.headers.items():
            self._targets[file] = (folder / file).open("wb")
            self._targets[file].write(header.raw)

    def write(self, name: str, tensor: Tensor) -> None:
        """Store the tensor in the layout's dtype."""
        file = self._file_of[name]
        header, target = self._files.headers[file], self._targets[file]
        stored = header.tensors[name]
        data = tensor.to("cpu", DTYPES[stored.dtype]).contiguous().flatten().view(torch.uint8).numpy()
        target.seek(len(header.raw) + stored.start)
        target.write(data)

    def close(self) -> None:
        for target in self._targets.values():
            target.close()


def is_weights(file: str) -> bool:
    """Whether a file of this name holds weights, in whatever format, or tells of such files."""
    return file.endswith((".safetensors", ".bin", ".index.json", HEADER_SUFFIX))


def _index_text(headers: dict[str, Header]) -> str:
    tensors = {name: (file, t) for file, header in headers.items() for name, t in header.tensors.items()}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for _, tensor in tensors.values())},
        "weight_map": {name: file for name, (file, _) in tensors.items()},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


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


def _check_file(path: Path) -> None:
    """The library's own examination: the header is sound and the file as long as it says."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        missing = "" if path.exists() else " is missing or"
        raise UserError(f"{path}{missing} cannot be read ({error}): fetch the folder anew.") from error


def _check_index(index: Path, file_of: dict[str, str]) -> None:
    listed = _weight_map(index)
    wrong = [name for name, file in file_of.items() if listed.get(name) != file]
    wrong += [name for name in listed if name not in file_of]
    if wrong:
        raise UserError(f"{index} does not fit its files; tensors in question: {', '.join(sorted(wrong))}.")
