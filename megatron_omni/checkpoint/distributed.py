"""Checkpoints of a run in training: PyTorch's distributed ones, which load at every layout.

A checkpoint holds tensors under global names (`megatron_omni.checkpoint.training_state`), in Megatron's
`torch_dist` format, beside `record.json` and the run's settings. It appears whole or not at all.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_omni.checkpoint.collective import on_rank_0, together
from megatron_omni.checkpoint.folder import (
    RECORD,
    RELEASE,
    TRACKER,
    how_to_choose,
    iteration_folder,
    keep_last,
    latest_checkpoint,
    link_best,
    remove_leftovers,
)
from megatron_omni.checkpoint.offline import write_common
from megatron_omni.checkpoint.replace import begin, commit, discard, partial_path, replace_text
from megatron_omni.checkpoint.resume import check_config
from megatron_omni.checkpoint.shards import Shards, read_shards, stored_shapes, write_shards
from megatron_omni.checkpoint.training_state import (
    OPTIMIZER,
    RANDOM,
    master_shards,
    model_shards,
    optimizer_shards,
    random_shards,
    random_states,
    set_random_states,
    set_steps,
)
from megatron_omni.config.io import from_yaml, to_yaml
from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError

CONFIG = "config.yaml"
HF = "hf"
SHOWN_FAULTS = 12
DAMAGE = (ValueError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError)
"""What reading a damaged file can raise, beside the operating system's errors."""
OPTIMIZER_FLAG = "use_distributed_optimizer"
"""In the layout, of no concern to the random generators."""


@dataclass(frozen=True)
class Record:
    """What `record.json` holds beside the tensors."""

    iteration: int
    """Iterations done."""
    steps: int
    """Optimizer steps done."""
    reward: float | None
    """Of the evaluation of these weights, if there was one."""
    state: dict[str, Any]
    """The loop's own state, as plain JSON values: position in the data and the like."""
    layout: dict[str, int | bool]
    files: dict[str, int]
    """Size of every other file of the checkpoint, in bytes."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    name: str
    """The checkpoint's folder, such as `iter_0000010`."""
    iteration: int
    """Iterations done; 0 for weights alone."""
    state: dict[str, Any]
    """What `Checkpointer.save` was given; empty for weights alone."""
    same_layout: bool
    """Whether the random generators go on as well; at another layout they start from the seed."""


class Checkpointer:
    """Saves and loads model, optimizer, schedule and random generators. All methods are collective."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        config: Config,
    ):
        self.chunks = chunks
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.config = config
        # Messages of the thread that writes must not mix with those of training.
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if config.checkpoint.async_save else None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None

    def save(
        self,
        folder: Path,
        iteration: int,
        state: dict[str, Any],
        reward: float | None = None,
        export: Callable[[Path], None] | None = None,
    ) -> None:
        """Write `folder/iter_…` and make it the latest, in the background if `checkpoint.async_save` is set.

        `state` holds plain JSON values, equal on every rank. `reward` is that of an evaluation of these very
        weights: the checkpoint with the highest is linked as `best`. `export(hf)`, collective, writes the
        model for other programs; it is done before this returns. Older checkpoints go as
        `checkpoint.keep_last_checkpoints` says, once this one is complete.

        Raises `UserError` on every rank if the disk is full or the folder cannot be written; the checkpoints
        that were there stay as they were, and nothing of the new one is left. What happens in the background
        is raised by `poll`, `finish` or the next `save`.
        """
        self.finish()
        target = folder / iteration_folder(iteration)
        shards = self._shards() | random_shards(random_states())
        needed = _total_bytes(shards)
        record = Record(iteration, self.scheduler.num_steps, reward, state, _layout(self.config), {})
        with _discarding(target), _explained(target, needed):
            on_rank_0(lambda: _begin(target, needed))
            if export:
                export(partial_path(target) / HF)
        if self.config.checkpoint.async_save:
            shards = {name: part.to_host() for name, part in shards.items()}
            self.pending = self.thread.submit(self._write, target, shards, needed, record)
        else:
            self._write(target, shards, needed, record)

    def poll(self) -> None:
        """Raise the error of a background save that has ended, on every rank at once."""
        if self.pending:
            ended = [False] * dist.get_world_size()
            dist.all_gather_object(ended, self.pending.done())
            if all(ended):
                self.finish()

    def finish(self) -> None:
        """Wait for the background save, if there is one, and raise its error."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def close(self) -> None:
        """Wait for the background save, without a word about how it ends. On each rank by itself."""
        self.thread.shutdown()

    def load(self, folder: Path) -> Resumed | None:
        """Fill model, optimizer, schedule and random generators from the latest checkpoint, if there is one.

        A `release` checkpoint fills the model and its master weights only; training starts at iteration 0.

        Raises `UserError` on every rank, before anything is changed, for a checkpoint that is missing or
        damaged, or belongs to another model or to a run with other settings.
        """
        name = on_rank_0(lambda: latest_checkpoint(folder))
        if name is None:
            return None
        source = folder / name
        if name == RELEASE:
            on_rank_0(lambda: self._check_start(source))
            self._load_weights(source)
            return Resumed(name, 0, {}, same_layout=False)
        record = on_rank_0(lambda: self._read_record(source))
        here, there = _layout(self.config), record.layout
        same_layout = {**here, OPTIMIZER_FLAG: None} == {**there, OPTIMIZER_FLAG: None}
        self._load_tensors(source, record.steps, random_states() if same_layout else {})
        self.scheduler.num_steps = 0
        self.scheduler.step(increment=record.steps)
        return Resumed(name, record.iteration, record.state, same_layout)

    def _load_tensors(self, source: Path, steps: int, random: dict[str, torch.Tensor]) -> None:
        shards, generators = self._shards(), random_shards(random)
        with _explaining_damage(source):
            _check_model(shards, source)
            read_shards(self._weights() | generators, source)
            self.optimizer.reload_model_params()  # float32 masters that are copies of float32 weights
            read_shards({name: part for name, part in shards.items() if name.startswith(OPTIMIZER)}, source)
        set_steps(self.optimizer, steps)
        if random:
            set_random_states(random)

    def _check_start(self, source: Path) -> None:
        """Whether a run with these settings can start from a `release` checkpoint."""
        if self.config.lora.lora_rank:
            raise UserError(
                f"{source} holds the weights of a whole model, and this run trains adapters (lora_rank is "
                f"{self.config.lora.lora_rank}): convert it to a Hugging Face folder for model_path."
            )
        if self.config.algorithm.kl_coefficient and not self.config.algorithm.ref_load:
            raise UserError(
                f"the run starts from {source}, but its KL penalty (kl_coefficient is "
                f"{self.config.algorithm.kl_coefficient:g}) would compare with the weights in model_path: "
                f"add --ref-load {source.parent}"
            )
        _check_release(source, self.config.model.model)

    def _load_weights(self, source: Path) -> None:
        _read_model(self._weights(), source)
        with _explaining_damage(source):
            self.optimizer.reload_model_params()
            # Once more into the masters: the stored weights may be more exact than the model's.
            read_shards(master_shards(self.chunks, self.optimizer), source)

    def _weights(self) -> dict[str, Shards]:
        """With adapters, the frozen model is not stored: it is that of `model_path`."""
        return model_shards(self.chunks, trainable_only=self.config.lora.lora_rank > 0)

    def _shards(self) -> dict[str, Shards]:
        return self._weights() | optimizer_shards(self.chunks, self.optimizer)

    def _write(self, target: Path, shards: dict[str, Shards], needed: int, record: Record) -> None:
        with _discarding(target), _explained(target, needed):
            write_shards(shards, partial_path(target), self.group)
            on_rank_0(lambda: self._complete(target, record), self.group)

    def _complete(self, target: Path, record: Record) -> None:
        """The small files, then the name, then the tracker, then what follows from a new checkpoint."""
        partial = partial_path(target)
        write_common(partial, record.iteration)
        (partial / CONFIG).write_text(to_yaml(self.config))
        files = asdict(record) | {"files": _sizes(partial)}
        (partial / RECORD).write_text(json.dumps(files, indent=1))
        commit(target)
        replace_text(target.parent / TRACKER, str(record.iteration))
        link_best(target.parent)
        if self.config.checkpoint.keep_last_checkpoints:
            keep_last(target.parent, record.iteration, self.config.checkpoint.keep_last_checkpoints)

    def _read_record(self, source: Path) -> Record:
        with _explaining_damage(source):
            record = Record(**json.loads((source / RECORD).read_text()))
            config = (source / CONFIG).read_text()
        _check_files(source, record.files)
        check_config(from_yaml(config, str(source / CONFIG)), self.config)
        return record


def load_release(chunks: Sequence[nn.Module], folder: Path, model: str) -> None:
    """Fill the chunks of a model of family `model` from the `release` checkpoint in `folder`. Collective.

    Raises `UserError` on every rank if there is none, or it is damaged or of another model.
    """
    source = folder / RELEASE
    with together():
        if not source.is_dir():
            raise UserError(
                f"{folder} holds no {RELEASE}/: make it with tools/checkpoint/convert.py hf-to-megatron"
            )
    on_rank_0(lambda: _check_release(source, model))
    _read_model(model_shards(chunks), source)


def _check_release(source: Path, model: str) -> None:
    with _explaining_damage(source):
        record = json.loads((source / RECORD).read_text())
        stored, files = record["model"], record["files"]
    _check_files(source, files)
    if stored != model:
        raise UserError(f"checkpoint {source} is of model {stored!r}, and this run's is {model!r}")


def _read_model(weights: dict[str, Shards], source: Path) -> None:
    with _explaining_damage(source):
        _check_model(weights, source)
        read_shards(weights, source)


def _layout(config: Config) -> dict[str, int | bool]:
    parallel = config.parallel
    return {
        "world_size": dist.get_world_size(),
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "num_virtual_stages_per_pipeline_rank": parallel.num_virtual_stages_per_pipeline_rank,
        "context_parallel_size": parallel.context_parallel_size,
        "ulysses_degree_in_cp": parallel.ulysses_degree_in_cp or parallel.context_parallel_size,
        OPTIMIZER_FLAG: config.optimizer.use_distributed_optimizer,
    }


def _check_model(wanted: dict[str, Shards], source: Path) -> None:
    """Raise `UserError` if the checkpoint's tensors are not those of this model. Collective."""
    with together():
        stored = stored_shapes(source)
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, [name for name, part in wanted.items() if part.writes])
    here = {name for each in names for name in each}
    faults = [f"{name}: not in the checkpoint" for name in sorted(here - stored.keys())]
    faults += [
        f"{name}: not in the model"
        for name in sorted(stored.keys() - here)
        if not name.startswith((RANDOM, OPTIMIZER))
    ]
    faults += [
        f"{name}: {list(stored[name])} in the checkpoint, {list(part.shape)} in the model"
        for name, part in wanted.items()
        if name in stored and stored[name] != tuple(part.shape)
    ]
    with together():
        if faults:
            shown = "\n".join(f"  {fault}" for fault in faults[:SHOWN_FAULTS])
            more = f"\n  … and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
            raise UserError(
                f"checkpoint {source} is of another model than the one this run trains:\n{shown}{more}"
            )


@contextmanager
def _explaining_damage(source: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, *DAMAGE) as error:
        raise _damaged(source, error) from error


def _check_files(source: Path, files: dict[str, int]) -> None:
    sizes = _sizes(source)
    damaged = [
        f"{name} ({sizes.get(name, 'missing')}, should be {size} bytes)"
        for name, size in files.items()
        if sizes.get(name) != size
    ]
    if damaged:
        raise _damaged(source, ", ".join(damaged))


def _damaged(source: Path, reason: object) -> UserError:
    return UserError(f"checkpoint {source} is damaged: {reason}. {how_to_choose(source.parent)}")


def _begin(target: Path, needed: int) -> None:
    """An empty folder to write to, if the disk has room. Leftovers of killed processes are removed first."""
    remove_leftovers(target.parent)
    begin(target)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(f"{_gib(free)} are free on the disk")


@contextmanager
def _discarding(target: Path) -> Iterator[None]:
    """Leave nothing half-written after a failure."""
    try:
        yield
    except BaseException:
        if dist.get_rank() == 0:
            discard(target)
        raise


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


def _total_bytes(shards: dict[str, Shards]) -> int:
    """Space that the tensors of all ranks need on the disk, with some for the headers of each."""
    own = sum(part.written_bytes() + 4096 * len(part.boxes) for part in shards.values())
    totals = [0] * dist.get_world_size()
    dist.all_gather_object(totals, own)
    return sum(totals)


def _sizes(folder: Path) -> dict[str, int]:
    """Of the checkpoint's own files, not of what was exported beside them."""
    return {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != RECORD
    }
