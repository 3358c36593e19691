"""The beginning of a safetensors file: which tensors it holds, and where."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    """In the words of the format: "F32", "BF16", …"""
    shape: tuple[int, ...]
    start: int
    """Of its data, in bytes from the end of the header."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A header, kept to the byte: the library's, or a foreign writer's."""

    raw: bytes
    """With its length in front; the tensors' data follow."""

    @staticmethod
    def read(path: Path) -> "Header":
        with path.open("rb") as file:
            size = file.read(8)
            return Header(size + file.read(int.from_bytes(size, "little")))

    @staticmethod
    def of(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> "Header":
        """A new header for tensors (name, dtype, shape), whose data follow one another."""
        entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        start = 0
        for name, dtype, shape in tensors:
            stop = start + prod(shape) * DTYPES[dtype].itemsize
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return Header(len(text).to_bytes(8, "little") + text)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        entries = {name: entry for name, entry in self._entries.items() if name != "__metadata__"}
        return {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"]), start, stop - start)
            for name, entry in entries.items()
            for start, stop in [entry["data_offsets"]]
        }

    @property
    def metadata(self) -> dict[str, str]:
        return self._entries.get("__metadata__", {})

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.raw) + sum(tensor.nbytes for tensor in self.tensors.values())

    def with_dtype(self, dtype: torch.dtype) -> "Header":
        """The same tensors in the same order, in another dtype."""
        in_order = sorted(self.tensors.items(), key=lambda item: item[1].start)
        return Header.of(((name, NAMES[dtype], tensor.shape) for name, tensor in in_order), self.metadata)

    @cached_property
    def _entries(self) -> dict[str, Any]:
        return json.loads(self.raw[8:])
