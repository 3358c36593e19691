"""The table that ties Hugging Face tensors to Megatron parameters, and what one line of it does."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from megatron_omni.errors import UserError

ADAPTER_SUFFIX = "_lora"
"""An adapter's module is named after the layer it adapts (`megatron_omni.models.layers.lora`), with this."""


class Kind(Enum):
    """How a Hugging Face tensor and a Megatron parameter correspond under tensor parallelism."""

    REPLICATED = "replicated"
    """Whole on every rank."""
    COLUMN = "column"
    """Split along the output (dimension 0), weight and bias."""
    ROW = "row"
    """Weight split along the input (dimension 1); the bias, if any, is whole on every rank."""
    QKV = "qkv"
    """Three tensors (query, key, value) fused head by head, [q0 k0 v0 q1 k1 v1 …], split along dimension 0.
    With grouped queries a key's head follows all query heads of its group."""


@dataclass(frozen=True)
class Row:
    """One line of a model's table.

    Patterns end before `.weight` / `.bias`: a row carries both where the tensor has both. `*` stands for
    a layer's number. `hf` has one pattern, or three (query, key, value) for `Kind.QKV`.
    """

    hf: tuple[str, ...]
    megatron: str
    kind: Kind


@dataclass(frozen=True)
class Heads:
    """Attention heads of the whole model, over all tensor-parallel ranks."""

    queries: int
    groups: int
    """Key and value heads; each serves `queries / groups` query heads."""


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter, the Hugging Face tensors it holds, and the way between them."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    heads: Heads

    @property
    def dim(self) -> int | None:
        """Dimension that is split over tensor-parallel ranks."""
        if self.kind is Kind.ROW:
            return 1 if self.megatron.endswith(".weight") else None
        return None if self.kind is Kind.REPLICATED else 0

    def hf_shapes(self, local_shape: Sequence[int], size: int) -> list[tuple[int, ...]]:
        """Shapes of the whole Hugging Face tensors, from a rank's parameter; `size` ranks share it."""
        shape = list(local_shape)
        if self.dim is not None:
            shape[self.dim] *= size
        if self.kind is not Kind.QKV:
            return [tuple(shape)]
        return [(self.heads.groups * rows, *shape[1:]) for rows in self._group_rows(shape[0])]

    def hf_slice(self, hf_shape: Sequence[int], rank: int, size: int) -> tuple[slice, ...]:
        """The part of a whole Hugging Face tensor that belongs to tensor-parallel `rank` of `size`."""
        part = [slice(None)] * len(hf_shape)
        if self.dim is not None:
            share = hf_shape[self.dim] // size
            part[self.dim] = slice(rank * share, (rank + 1) * share)
        return tuple(part)

    def to_megatron(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """A rank's parameter from its slices of the Hugging Face tensors; `size` ranks share it."""
        if self.kind is not Kind.QKV:
            return parts[0]
        groups = self.heads.groups // size
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole Hugging Face tensors from the parameter's shards, in the order of the ranks."""
        whole = shards[0] if self.dim is None else torch.cat(list(shards), dim=self.dim)
        if self.kind is not Kind.QKV:
            return [whole]
        by_group = whole.unflatten(0, (self.heads.groups, -1))
        return [part.flatten(0, 1) for part in by_group.split(self._group_rows(whole.shape[0]), dim=1)]

    def _group_rows(self, rows: int) -> list[int]:
        """How many of a fused tensor's rows are query, key and value in each group."""
        queries = self.heads.queries // self.heads.groups
        head = rows // (self.heads.groups * (queries + 2))
        return [queries * head, head, head]


def model_heads(chunks: Sequence[nn.Module]) -> Heads:
    config = chunks[0].config
    return Heads(config.num_attention_heads, config.num_query_groups)


def match(mapping: Iterable[Row], names: Iterable[str], heads: Heads) -> list[Entry]:
    """Each Megatron parameter of `names` with its line of the table, in the order of `names`.

    Raises `UserError` that lists the names without a line.
    """
    lines = [(_regex(row.megatron), row) for row in mapping]
    entries, unmatched = [], []
    for name in names:
        hit = next(((match, row) for regex, row in lines if (match := regex.fullmatch(name))), None)
        if hit is None:
            unmatched.append(name)
            continue
        (*numbers, suffix), row = hit[0].groups(), hit[1]
        hf = tuple(_fill(pattern, numbers) + suffix for pattern in row.hf)
        entries.append(Entry(name, hf, row.kind, heads))
    if unmatched:
        raise UserError(
            f"the model's table has no line for the parameters {', '.join(unmatched)}: add them to it."
        )
    return entries


def _regex(pattern: str) -> re.Pattern:
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)") + r"(\.weight|\.bias)")


def _fill(pattern: str, numbers: Sequence[str]) -> str:
    parts = pattern.split("*")
    return parts[0] + "".join(number + part for number, part in zip(numbers, parts[1:], strict=True))
