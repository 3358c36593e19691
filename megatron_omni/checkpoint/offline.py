"""Distributed checkpoints read and written by one process, without process groups, tensor by tensor.

The format is PyTorch's and Megatron's `torch_dist`, as in `megatron_omni.checkpoint.shards`; here one process
plays all ranks, and holds two tensors at a time: one is read while the other is written.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_omni.checkpoint.shards import Shape, Shards
from megatron_omni.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


class OfflineReader:
    """Any part of any tensor of a checkpoint's folder.

    Opening it reads the list of tensors. Raises `UserError` for what is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise _damaged(folder, error) from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the global tensors."""
        return {name: tuple(stored.size) for name, stored in self._stored.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name].properties.dtype

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A rectangular part of a global tensor."""
        stored = self._stored[name]
        ranges = [piece.indices(size) for piece, size in zip(part, stored.size, strict=True)]
        offset = torch.Size(start for start, _, _ in ranges)
        tensor = torch.empty([stop - start for start, stop, _ in ranges], dtype=self.dtype(name))
        wanted = [ChunkStorageMetadata(offset, tensor.shape)]
        plan = LoadPlan(create_read_items_for_chunk_list(name, stored, wanted))
        try:
            self._reader.read_data(plan, _IntoTensor(tensor))
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise _damaged(self.folder, f"{name}: {error}") from error
        return tensor


def write_offline(
    ranks: Sequence[dict[str, Shards]],
    resolve: Callable[[int, str], Tensor],
    folder: Path,
) -> None:
    """Write a checkpoint with a file for each of several ranks.

    `ranks` says what each would write, of tensors on the meta device; `resolve(rank, name)` gives the values,
    asked for when they are written.
    """
    # Without PyTorch's own copying ahead, which is for devices. The caller flushes the files.
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [
        writer.prepare_local_plan(
            SavePlan([item for name, part in rank.items() for item in part.write_items(name)])
        )
        for rank in ranks
    ]
    plans, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    with _without_checksums():
        results = [
            writer.write_data(plan, _Resolving(plan, partial(resolve, rank))).wait()
            for rank, plan in enumerate(writer.prepare_global_plan(plans))
        ]
    writer.finish(metadata, results)


def write_common(folder: Path, iteration: int) -> None:
    """The small files that Megatron's reader wants beside the tensors."""
    buffer = io.BytesIO()
    torch.save({"iteration": iteration}, buffer)  # to a file it would hide the system's errors
    (folder / "common.pt").write_bytes(buffer.getvalue())
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def one_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map`, where the next result is being made while one is used."""
    with ThreadPoolExecutor(1) as thread:
        pending: Future[Result] | None = None
        for item in items:
            following = thread.submit(function, item)
            if pending:
                yield pending.result()
            pending = following
        if pending:
            yield pending.result()


class _Resolving(DefaultSavePlanner):
    """Gets each tensor when it is written, and takes back the memory of the one before."""

    def __init__(self, plan: SavePlan, resolve: Callable[[str], Tensor]):
        super().__init__()
        self.tensors = one_ahead(resolve, [item.index.fqn for item in plan.items])
        self.before: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self.before is not None:
            self.before.untyped_storage().resize_(0)  # the writer keeps all tensors of a file until its end
        tensor = next(self.tensors)
        has_own_storage = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        self.before = tensor if has_own_storage else tensor.clone(memory_format=torch.contiguous_format)
        return self.before


class _IntoTensor(DefaultLoadPlanner):
    def __init__(self, tensor: Tensor):
        super().__init__()
        self.tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensor


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Of the tensors' data: PyTorch's reader looks at none, and they take half of the time."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _damaged(folder: Path, reason: object) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: {reason}. Convert or fetch it anew.")
