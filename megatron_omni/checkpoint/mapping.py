"""The table that ties Hugging Face tensors to Megatron parameters."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a Hugging Face tensor and a Megatron parameter correspond under tensor parallelism."""

    REPLICATED = "replicated"
    """Whole on every rank."""
    COLUMN = "column"
    """Split along the output (dimension 0), weight and bias."""
    ROW = "row"
    """Weight split along the input (dimension 1); the bias, if any, is whole on every rank."""
    QKV = "qkv"
    """Three tensors (query, key, value) fused head by head, [q0 k0 v0 q1 k1 v1 …], split along dimension 0."""


@dataclass(frozen=True)
class Row:
    """One line of a model's table.

    Patterns end before `.weight` / `.bias`: a row carries both where the tensor has both. `*` stands for
    a layer's number. `hf` has one pattern, or three (query, key, value) for `Kind.QKV`.
    """

    hf: tuple[str, ...]
    megatron: str
    kind: Kind
