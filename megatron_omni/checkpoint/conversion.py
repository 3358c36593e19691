"""The way between a Hugging Face (diffusers) folder and Megatron checkpoints: one process, tensor by tensor.

Written checkpoints are Megatron's `release` ones: weights alone, a file for each rank of a layout, loadable
at every layout. Beside them, `hf/` holds what a Hugging Face folder needs besides the weights.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_omni.checkpoint.folder import RECORD, RELEASE, TRACKER
from megatron_omni.checkpoint.hf_folder import (
    Progress,
    check_apart,
    check_target,
    copy_frozen_parts,
    explaining,
    write_folder,
)
from megatron_omni.checkpoint.mapping import Entry
from megatron_omni.checkpoint.offline import one_ahead, write_common, write_offline
from megatron_omni.checkpoint.replace import replacing
from megatron_omni.checkpoint.safetensors_folder import WeightFiles
from megatron_omni.checkpoint.shards import Box, Shape, Shards
from megatron_omni.checkpoint.stored_model import HF, Blueprint, StoredModel
from megatron_omni.config.schema import ParallelConfig
from megatron_omni.errors import UserError
from megatron_omni.parallel.stages import Stage


@dataclass(frozen=True)
class ReleasePlan:
    """A `release` checkpoint to write: who holds what."""

    source: StoredModel
    folder: Path
    layout: ParallelConfig
    dtype: torch.dtype | None
    """Of the weights; none keeps each as it is."""
    ranks: list[dict[str, Shards]]
    """What the file of each rank holds, without values."""

    @property
    def nbytes(self) -> int:
        return sum(part.written_bytes() for rank in self.ranks for part in rank.values())


def plan_release(
    source: StoredModel, folder: Path, layout: ParallelConfig, dtype: torch.dtype | None
) -> ReleasePlan:
    """Raises `UserError` if the layout does not fit the model, or `folder` holds something else."""
    source.family.check_layout(source.hf, layout)
    _check_release_target(source, folder)
    size, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    ranks = []
    for index in range(stages):
        stage = Blueprint.of(source.family, source.hf, Stage(index, stages))
        for rank in range(size):
            shares = {}
            for entry in stage.entries:
                values = dtype or source.weights.dtype(entry)
                shares[entry.megatron] = _share(entry, stage.shapes, rank, size, values)
            ranks.append(shares)
    return ReleasePlan(source, folder, layout, dtype, ranks)


def write_release(plan: ReleasePlan, progress: Progress) -> None:
    """Raises `UserError` for a full disk or a damaged source, and leaves the folder as it was."""
    source, size = plan.source, plan.layout.tensor_model_parallel_size
    entries = {entry.megatron: entry for entry in source.blueprint.entries}
    files = source.files.with_dtype(plan.dtype) if plan.dtype else source.files

    def resolve(rank: int, name: str) -> Tensor:
        tensor = source.weights.share(entries[name], rank % size, size)
        progress(tensor.nbytes)
        return tensor.to(plan.dtype or tensor.dtype)

    _check_room(plan.folder, plan.nbytes + source.frozen_bytes())
    with explaining(plan.folder), replacing(plan.folder) as partial:
        release, hf = partial / RELEASE, partial / HF
        copy_frozen_parts(source.hf, hf, source.family.transformer_folder, progress)
        files.save_headers(hf / source.family.transformer_folder)
        write_offline(plan.ranks, resolve, release)
        write_common(release, iteration=0)
        (release / RECORD).write_text(json.dumps(_record(plan, release), indent=1))
        (partial / TRACKER).write_text(RELEASE)


@dataclass(frozen=True)
class HfPlan:
    """A Hugging Face folder to write."""

    source: StoredModel
    folder: Path
    files: WeightFiles

    @property
    def nbytes(self) -> int:
        return self.files.total_bytes


def plan_hf(
    source: StoredModel, folder: Path, dtype: torch.dtype | None, max_shard_size: str | None
) -> HfPlan:
    """By default the weight files are those of the folder that the model came from.

    Raises `UserError` if `folder` holds something else.
    """
    check_apart(source.path, folder)
    check_target(source.hf, folder, source.family.transformer_folder)
    files = source.files.with_dtype(dtype) if dtype else source.files
    return HfPlan(source, folder, files.resharded(max_shard_size) if max_shard_size else files)


def write_hf(plan: HfPlan, progress: Progress) -> None:
    """Raises `UserError` for a full disk or a damaged source, and leaves the folder as it was."""
    source = plan.source

    def tensors() -> Iterator[tuple[str, Tensor]]:
        entries = source.blueprint.entries
        for entry, whole in zip(entries, one_ahead(source.weights.share, entries), strict=True):
            yield from zip(entry.hf, entry.to_hf([whole]), strict=True)
            progress(whole.nbytes)

    _check_room(plan.folder, plan.nbytes + source.frozen_bytes())
    transformer = source.family.transformer_folder
    write_folder(tensors(), plan.files, source.hf, plan.folder, transformer, progress)


def differences(one: StoredModel, other: StoredModel, progress: Progress) -> list[str]:
    """Names of the parameters and of the frozen parts' files whose hashes differ.

    Where dtypes differ, values are compared as the conversion to `other`'s gives them.
    """
    shapes, other_shapes = one.blueprint.shapes, other.blueprint.shapes
    unequal = [name for name in shapes | other_shapes if shapes.get(name) != other_shapes.get(name)]
    for entry in one.blueprint.entries:
        if entry.megatron in unequal:
            continue
        tensor = one.weights.share(entry)
        if _hash(tensor.to(other.weights.dtype(entry))) != _hash(other.weights.share(entry)):
            unequal.append(entry.megatron)
        progress(tensor.nbytes)
    mine, others = set(one.frozen_parts()), set(other.frozen_parts())
    unequal += [str(path) for path in sorted(mine ^ others)]
    for path in sorted(mine & others):
        if _hash_file(one.hf / path) != _hash_file(other.hf / path):
            unequal.append(str(path))
        progress((one.hf / path).stat().st_size)
    return unequal


def _share(entry: Entry, shapes: dict[str, Shape], rank: int, size: int, dtype: torch.dtype) -> Shards:
    """Of a parameter that is whole on each tensor-parallel rank, the first one writes it."""
    shape = shapes[entry.megatron]
    part = entry.hf_slice(shape, rank, size)
    values = torch.empty(shape, dtype=dtype, device="meta")[part]
    offset = tuple(piece.start or 0 for piece in part)
    return Shards(shape, (Box(offset, values),), writes=rank == 0 or entry.dim is not None)


def _record(plan: ReleasePlan, release: Path) -> dict[str, Any]:
    return {
        "model": plan.source.model,
        "layout": {
            "tensor_model_parallel_size": plan.layout.tensor_model_parallel_size,
            "pipeline_model_parallel_size": plan.layout.pipeline_model_parallel_size,
        },
        "files": {path.name: path.stat().st_size for path in sorted(release.iterdir())},
    }


def _check_release_target(source: StoredModel, folder: Path) -> None:
    check_apart(source.path, folder)
    check_apart(source.hf, folder)
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    if names and not (RELEASE in names and names <= {RELEASE, HF, TRACKER}):
        raise UserError(
            f"cannot write {folder}: it holds something other than an older conversion; empty it first."
        )


def _check_room(folder: Path, needed: int) -> None:
    parent = next(path for path in folder.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"cannot write {folder}: it needs {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free."
        )


def _hash(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy()).digest()


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
