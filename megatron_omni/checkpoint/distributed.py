"""Checkpoints of a run in training: Megatron's distributed ones, which load at every layout.

A folder holds `iter_0000010/`, … and `latest_checkpointed_iteration.txt`, as with Megatron-LM. A checkpoint
appears whole or not at all.
"""

import io
import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_omni.checkpoint.collective import on_rank_0
from megatron_omni.checkpoint.replace import begin, commit, discard, partial_path, replace_text
from megatron_omni.checkpoint.resume import check_config
from megatron_omni.config.io import from_yaml, to_yaml
from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError
from megatron_omni.platforms import current_platform

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "config.yaml"
RECORD = "record.json"

# How the optimizer's state is cut: so that it loads at every layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Record:
    """What `record.json` holds beside the tensors."""

    iteration: int
    """Iterations done."""
    state: dict[str, Any]
    """The loop's own state, as plain JSON values: position in the data and the like."""
    layout: dict[str, int]
    files: dict[str, int]
    """Size of every other file of the checkpoint, in bytes."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    iteration: int
    """Iterations done."""
    state: dict[str, Any]
    """What `Checkpointer.save` was given."""
    same_layout: bool
    """Whether the random generators go on as well; with another number of ranks they start from the seed."""


class Checkpointer:
    """Saves and loads model, optimizer, schedule and random generators. All methods are collective."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        config: Config,
    ):
        self.model = unwrap_model(model)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.config = config

    def save(self, folder: Path, iteration: int, state: dict[str, Any]) -> None:
        """Write `folder/iter_…` and make it the latest. `state` holds plain JSON values, equal on every rank.

        Raises `UserError` on every rank if the disk is full or the folder cannot be written; the checkpoints
        that were there stay as they were, and nothing of the new one is left.
        """
        target = folder / iteration_folder(iteration)
        tensors, common = save_preprocess(self._state_dict() | _random_states())
        needed = _total_bytes(tensors)
        try:
            with _explained(target, needed):
                on_rank_0(lambda: _begin(target, needed))
                _write_tensors(tensors, partial_path(target))
                on_rank_0(lambda: self._finish(target, common, iteration, state))
        except BaseException:
            if dist.get_rank() == 0:
                discard(target)
            raise

    def load(self, folder: Path) -> Resumed | None:
        """Fill model, optimizer, schedule and random generators from the latest checkpoint, if there is one.

        Raises `UserError` on every rank for a checkpoint that is missing or damaged, or belongs to a run with
        other settings.
        """
        record = on_rank_0(lambda: self._read_record(folder))
        if record is None:
            return None
        source = folder / iteration_folder(record.iteration)
        same_layout = record.layout == _layout()
        wanted = self._state_dict(is_loading=True) | (_random_states() if same_layout else {})
        try:
            loaded = dist_checkpointing.load(wanted, str(source))
        except (CheckpointException, CheckpointingException, pickle.UnpicklingError) as error:
            raise UserError(f"checkpoint {source} is damaged: {error}. {_how_to_choose(folder)}") from error
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.scheduler.num_steps = 0  # loading adds the checkpoint's steps to those taken
        self.scheduler.load_state_dict(loaded["scheduler"])
        if same_layout:
            _restore_random_states(loaded)
        return Resumed(record.iteration, record.state, same_layout)

    def _state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        model = self.model.sharded_state_dict(metadata=METADATA)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def _finish(self, target: Path, common: dict[str, Any], iteration: int, state: dict[str, Any]) -> None:
        """The small files, then the name, then the tracker."""
        partial = partial_path(target)
        buffer = io.BytesIO()
        torch.save(common, buffer)  # to a file it would hide the operating system's errors
        (partial / "common.pt").write_bytes(buffer.getvalue())
        save_config(CheckpointingConfig("torch_dist", 1), str(partial))
        (partial / CONFIG).write_text(to_yaml(self.config))
        record = Record(iteration, state, _layout(), _sizes(partial))
        (partial / RECORD).write_text(json.dumps(record.__dict__, indent=1))
        commit(target)
        replace_text(target.parent / TRACKER, str(iteration))

    def _read_record(self, folder: Path) -> Record | None:
        iteration = latest_iteration(folder)
        if iteration is None:
            return None
        source = folder / iteration_folder(iteration)
        try:
            record = Record(**json.loads((source / RECORD).read_text()))
            config = (source / CONFIG).read_text()
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"checkpoint {source} is damaged: {error}. {_how_to_choose(folder)}") from error
        sizes = _sizes(source)
        damaged = [
            f"{name} ({sizes.get(name, 'missing')}, should be {size} bytes)"
            for name, size in record.files.items()
            if sizes.get(name) != size
        ]
        if damaged:
            raise UserError(f"checkpoint {source} is damaged: {', '.join(damaged)}. {_how_to_choose(folder)}")
        check_config(from_yaml(config, str(source / CONFIG)), self.config)
        return record


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def latest_iteration(folder: Path) -> int | None:
    """The iteration that the tracker file names; none if there is no checkpoint yet.

    Raises `UserError` if the tracker cannot be read, or if it and the folders that are there disagree.
    """
    tracker, there = folder / TRACKER, _checkpoints(folder)
    if not tracker.exists():
        if there:
            raise UserError(f"{folder} holds checkpoints, but no {TRACKER}. {_how_to_choose(folder)}")
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise UserError(f"{tracker} holds {text[:40]!r} instead of an iteration. {_how_to_choose(folder)}")
    if iteration_folder(int(text)) not in there:
        raise UserError(
            f"checkpoint {folder / iteration_folder(int(text))}, named in {TRACKER}, is missing. "
            + _how_to_choose(folder)
        )
    return int(text)


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("iter_*"))


def _how_to_choose(folder: Path) -> str:
    there = ", ".join(_checkpoints(folder)) or "none"
    return (
        f"Checkpoints there: {there}. To resume from another one, write its number into {folder / TRACKER}."
    )


def _begin(target: Path, needed: int) -> None:
    """An empty folder to write to, if the disk has room. Leftovers of killed processes are removed first."""
    for leftover in target.parent.glob(".iter_*.partial"):
        shutil.rmtree(leftover)
    begin(target)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(f"{_gib(free)} are free on the disk")


def _write_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Megatron's torch_dist format, through PyTorch's own writer.

    Megatron's writer forks processes, and where rank 0 alone fails the other ranks wait for it for ever;
    PyTorch's raises on every rank.
    """
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(by_key),
        storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


@contextmanager
def _explained(target: Path, needed: int) -> Iterator[None]:
    """Turn a failure to write into a `UserError`."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if "inline_container" in str(cause):  # PyTorch's writer hides the operating system's error
            cause = "a file could be written in part only; the disk is full, or a limit on size is reached"
        elif not isinstance(cause, OSError):
            raise
        raise _cannot_write(target, needed, cause) from error
    except OSError as error:
        raise _cannot_write(target, needed, error) from error


def _cannot_write(target: Path, needed: int, cause: OSError | str) -> UserError:
    return UserError(
        f"cannot write checkpoint {target}: {cause}. It needs {_gib(needed)}: make room, or set "
        "checkpoint.save to another folder. Earlier checkpoints are untouched."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"


def _total_bytes(tensors: dict[str, Any]) -> int:
    """Space that the tensors of all ranks need on the disk, with some for the headers of each."""
    own = [
        tensor.data.nbytes + 4096
        for tensor in nested_values(tensors)
        if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id)
    ]
    totals = [0] * dist.get_world_size()
    dist.all_gather_object(totals, sum(own))
    return sum(totals)


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != RECORD}


def _layout() -> dict[str, int]:
    return {
        "world_size": dist.get_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }


def _device_generator() -> Any:
    """The module whose get_rng_state and set_rng_state act on this process's device."""
    name = current_platform().name
    return torch if name == "cpu" else torch.get_device_module(name)


def _random_states() -> dict[str, Any]:
    """Each rank's random generators."""
    states = {
        "cpu": torch.get_rng_state(),
        "device": _device_generator().get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    rank, size = dist.get_rank(), dist.get_world_size()
    return {"random": ShardedObject("random", states, (size,), (rank,))}


def _restore_random_states(loaded: dict[str, Any]) -> None:
    states = loaded["random"]
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    torch.set_rng_state(states["cpu"])
    _device_generator().set_rng_state(states["device"])
