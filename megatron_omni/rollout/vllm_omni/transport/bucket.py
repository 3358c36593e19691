"""Where tensors lie in a run of bytes: what the trainer tells the engine of each bucket."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Of every tensor's first byte: no dtype asks for more."""


def aligned(nbytes: int, unit: int = ALIGNMENT) -> int:
    """`nbytes`, or the next multiple of `unit`."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class TensorSpec:
    """A contiguous tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Of its first byte from the bucket's."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in a bucket's bytes, [nbytes or more] uint8."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "offset": self.offset,
        }

    @staticmethod
    def from_json(values: Any) -> "TensorSpec":
        """The inverse of `to_json`. Raises `ValueError` for anything else."""
        _require(isinstance(values, dict) and values.keys() == {"name", "shape", "dtype", "offset"}, values)
        name, shape, offset = values["name"], values["shape"], values["offset"]
        dtype = getattr(torch, values["dtype"], None) if isinstance(values["dtype"], str) else None
        _require(isinstance(name, str) and isinstance(dtype, torch.dtype), values)
        _require(isinstance(shape, list) and all(_is_size(length) for length in shape), values)
        _require(_is_size(offset) and offset % dtype.itemsize == 0, values)
        return TensorSpec(name, tuple(shape), dtype, offset)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are handed over together."""

    slot: int
    """Half of the sender's memory they lie in, 0 or 1; a tensor too large for a half begins in 0."""
    nbytes: int
    tensors: tuple[TensorSpec, ...]
    location: dict[str, Any] = field(default_factory=dict)
    """Where a receiver finds the bytes, JSON values; each transport has its own."""

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in the bucket's bytes."""
        return ((spec.name, spec.view(memory)) for spec in self.tensors)

    def to_json(self) -> dict[str, Any]:
        tensors = [spec.to_json() for spec in self.tensors]
        return {"slot": self.slot, "nbytes": self.nbytes, "tensors": tensors, "location": self.location}

    @staticmethod
    def from_json(values: Any) -> "Bucket":
        """The inverse of `to_json`. Raises `ValueError` for anything else, or tensors that lie outside."""
        _require(
            isinstance(values, dict) and values.keys() == {"slot", "nbytes", "tensors", "location"}, values
        )
        slot, nbytes, location = values["slot"], values["nbytes"], values["location"]
        _require(slot in (0, 1) and _is_size(slot) and _is_size(nbytes), values)
        _require(isinstance(values["tensors"], list) and isinstance(location, dict), values)
        tensors = tuple(TensorSpec.from_json(spec) for spec in values["tensors"])
        for spec in tensors:
            _require(spec.offset + spec.nbytes <= nbytes, spec)
        return Bucket(slot, nbytes, tensors, location)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _require(condition: bool, values: Any) -> None:
    if not condition:
        raise ValueError(f"not a bucket of weights: {str(values)[:200]}")
