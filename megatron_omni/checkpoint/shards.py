"""Tensors of which each rank holds a part, written to and read from PyTorch's distributed checkpoints.

A part is a set of boxes. So whole tensors, slices of tensor parallelism and the distributed optimizer's flat
ranges are written under one name and read back at every layout, straight into the tensors that need them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor."""

    offset: Shape
    tensor: Tensor


@dataclass(frozen=True)
class Shards:
    """What this rank holds of a global tensor."""

    shape: Shape
    """Of the global tensor."""
    boxes: tuple[Box, ...]
    writes: bool = True
    """Of the ranks that hold the same boxes, one writes them."""

    def to_host(self) -> "Shards":
        """A copy in host memory of what this rank writes."""
        boxes = tuple(Box(box.offset, box.tensor.detach().to("cpu", copy=True)) for box in self._written())
        return Shards(self.shape, boxes)

    def written_bytes(self) -> int:
        return sum(box.tensor.nbytes for box in self._written())

    def write_items(self, name: str) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(box.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(box), TensorProperties.create_from_tensor(box.tensor), torch.Size(self.shape)
                ),
            )
            for box in self._written()
        ]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def at(self, offset: Shape) -> Tensor:
        return next(box.tensor for box in self.boxes if box.offset == tuple(offset))

    def _written(self) -> tuple[Box, ...]:
        return self.boxes if self.writes else ()


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of boxes that hold elements `start` to `stop` - 1, in row-major order.

    Each box is a run of consecutive elements, and the boxes follow one another.
    """
    if start == stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # within one row
        yield from _in_row(shape, last_whole, start, stop)
        return
    yield from _in_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < last_whole:
        rest = (0,) * len(shape[1:])
        yield (first_whole, *rest), (last_whole - first_whole, *shape[1:])
    yield from _in_row(shape, last_whole, last_whole * row, stop)


def _in_row(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    before = index * prod(shape[1:])
    for offset, size in flat_boxes(shape[1:], start - before, stop - before):
        yield (index, *offset), (1, *size)


def write_shards(shards: dict[str, Shards], folder: Path, group: ProcessGroup | None = None) -> None:
    """Write the tensors of all ranks to `folder`. Collective over `group`.

    The format is Megatron's `torch_dist`; its writer is not used: that one forks processes, and where rank 0
    alone fails the other ranks wait for it for ever. PyTorch's raises on every rank.
    """
    torch_checkpoint.save(
        shards,
        storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=True),
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


def read_shards(shards: dict[str, Shards], folder: Path) -> None:
    """Fill the shards' tensors in place, whatever the layout they were written at. Collective."""
    torch_checkpoint.load(
        shards,
        storage_reader=torch_checkpoint.FileSystemReader(folder),
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )


def stored_shapes(folder: Path) -> dict[str, Shape]:
    """Names and global shapes of the tensors in a checkpoint."""
    metadata = torch_checkpoint.FileSystemReader(folder).read_metadata()
    return {name: tuple(stored.size) for name, stored in metadata.state_dict_metadata.items()}


class _SavePlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        items = [item for name, shards in self.state_dict.items() for item in shards.write_items(name)]
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index.offset)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        stored = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, shards in self.state_dict.items()
                for item in create_read_items_for_chunk_list(name, stored[name], shards.chunks())
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index.offset)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), box.tensor.shape)
