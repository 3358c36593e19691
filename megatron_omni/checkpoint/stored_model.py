"""A model on the disk, as a Hugging Face (diffusers) folder or a Megatron checkpoint.

It is opened, checked, and read in parts. One process is enough, and no weight is read before it is asked for.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_omni.checkpoint.folder import RECORD, TRACKER, latest_checkpoint
from megatron_omni.checkpoint.hf_folder import check_weights, frozen_parts, hf_shapes
from megatron_omni.checkpoint.mapping import ADAPTER_SUFFIX, Entry, Heads, match
from megatron_omni.checkpoint.offline import OfflineReader
from megatron_omni.checkpoint.safetensors_folder import SafetensorsFolder, WeightFiles
from megatron_omni.checkpoint.safetensors_header import DTYPES
from megatron_omni.checkpoint.shards import Shape
from megatron_omni.checkpoint.training_state import OPTIMIZER, RANDOM
from megatron_omni.config.io import from_yaml
from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.errors import UserError
from megatron_omni.models.base import ModelFamily
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.stages import Stage
from megatron_omni.parallel.state import destroy

HF = "hf"
"""Beside a `release` checkpoint: what else the Hugging Face folder has, and its weight files' headers."""


@dataclass(frozen=True)
class Blueprint:
    """A model without its values: its parameters' names and shapes."""

    shapes: dict[str, Shape]
    """Of whole parameters, by their Megatron names."""
    entries: list[Entry]

    @staticmethod
    def of(family: ModelFamily, folder: Path, stage: Stage) -> "Blueprint":
        """Of a pipeline stage of the model in a Hugging Face folder.

        Raises `UserError` if its config.json is not of this family.
        """
        with _world_of_one(), torch.device("meta"):
            model = family.build_model(folder, ModelConfig(transformer_impl="local"), ParallelConfig(), stage)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        heads = Heads(model.config.num_attention_heads, model.config.num_query_groups)
        return Blueprint(shapes, match(family.mapping, shapes, heads))


class Weights(Protocol):
    """The parameters of a model, wherever they are stored."""

    def dtype(self, entry: Entry) -> torch.dtype: ...

    def share(self, entry: Entry, rank: int = 0, size: int = 1) -> Tensor:
        """What tensor-parallel `rank` of `size` holds of a parameter; by default the whole."""
        ...


class HfWeights:
    """Of a Hugging Face folder. Raises `UserError` unless they are the blueprint's."""

    def __init__(self, folder: Path, blueprint: Blueprint):
        self._weights = SafetensorsFolder(folder)
        check_weights(self._weights, hf_shapes(blueprint.entries, blueprint.shapes, size=1))
        self.files = self._weights.files

    def dtype(self, entry: Entry) -> torch.dtype:
        first, *others = (DTYPES[self._weights.dtype(name)] for name in entry.hf)
        for other in others:
            first = torch.promote_types(first, other)
        return first

    def share(self, entry: Entry, rank: int = 0, size: int = 1) -> Tensor:
        slices = [entry.hf_slice(self._weights.shape(name), rank, size) for name in entry.hf]
        parts = [self._weights.read(name, part) for name, part in zip(entry.hf, slices, strict=True)]
        return entry.to_megatron(parts, size)


class CheckpointWeights:
    """Of a Megatron checkpoint's folder. Raises `UserError` unless they are the blueprint's."""

    def __init__(self, folder: Path, blueprint: Blueprint):
        self._reader = OfflineReader(folder)
        self._shapes = stored = self._reader.shapes
        if any(f"{ADAPTER_SUFFIX}." in name for name in stored):
            raise UserError(
                f"{folder} holds adapters (LoRA) and not the model: --export-hf lets the run write them for "
                "other programs."
            )
        wanted = blueprint.shapes
        faults = [f"{name}: missing in the checkpoint" for name in wanted.keys() - stored.keys()]
        faults += [
            f"{name}: not in the model"
            for name in stored.keys() - wanted.keys()
            if not name.startswith((OPTIMIZER, RANDOM))
        ]
        faults += [
            f"{name}: {list(stored[name])} in the checkpoint, {list(wanted[name])} in the model"
            for name in wanted.keys() & stored.keys()
            if stored[name] != wanted[name]
        ]
        if faults:
            raise UserError(
                f"the checkpoint {folder} does not fit the model:\n"
                + "\n".join(f"  {fault}" for fault in sorted(faults))
            )

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._reader.dtype(entry.megatron)

    def share(self, entry: Entry, rank: int = 0, size: int = 1) -> Tensor:
        part = entry.hf_slice(self._shapes[entry.megatron], rank, size)
        return self._reader.read(entry.megatron, part)


@dataclass(frozen=True)
class StoredModel:
    """A model on the disk, opened and found sound."""

    path: Path
    """Of its weights: the Hugging Face folder, or the checkpoint's."""
    model: str
    """Name of its family."""
    hf: Path
    """Folder of the frozen parts and of the sizes."""
    blueprint: Blueprint
    weights: Weights
    files: WeightFiles
    """Layout of its Hugging Face weight files."""

    @property
    def family(self) -> ModelFamily:
        return MODELS.get(self.model)

    @cached_property
    def nbytes(self) -> int:
        return sum(
            torch.Size(self.blueprint.shapes[entry.megatron]).numel() * self.weights.dtype(entry).itemsize
            for entry in self.blueprint.entries
        )

    def frozen_parts(self) -> list[Path]:
        return frozen_parts(self.hf, self.family.transformer_folder)

    def frozen_bytes(self) -> int:
        return sum((self.hf / path).stat().st_size for path in self.frozen_parts())


def open_hf(folder: Path, model: str) -> StoredModel:
    """The model of family `model` in a Hugging Face folder. Raises `UserError` if it is not sound."""
    family = MODELS.get(model)
    _check_is_folder(folder)
    blueprint = Blueprint.of(family, folder, Stage())
    weights = HfWeights(folder / family.transformer_folder, blueprint)
    return StoredModel(folder, model, folder, blueprint, weights, weights.files)


def open_megatron(folder: Path, source: Path | None = None) -> StoredModel:
    """The model in a folder of checkpoints (its latest one), or in the folder of one checkpoint.

    `source` is the Hugging Face folder that completes it; by default, what lies beside a `release`
    checkpoint, and the `model_path` of a training run. Raises `UserError` for every fault but damaged values.
    """
    _check_is_folder(folder)
    if not (folder / RECORD).exists():
        name = latest_checkpoint(folder)
        if name is None:
            raise UserError(f"{folder} holds no Megatron checkpoint: {TRACKER} is missing.")
        folder = folder / name
    model, hf = _origin(folder, source)
    family = MODELS.get(model)
    blueprint = Blueprint.of(family, hf, Stage())
    files = _weight_files(hf / family.transformer_folder)
    return StoredModel(folder, model, hf, blueprint, CheckpointWeights(folder, blueprint), files)


def open_either(folder: Path, model: str) -> StoredModel:
    """As `open_hf` or `open_megatron`, by what is there."""
    is_megatron = (folder / TRACKER).exists() or (folder / RECORD).exists()
    return open_megatron(folder) if is_megatron else open_hf(folder, model)


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Megatron's modules ask for groups even where they share nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        destroy()


def _origin(checkpoint: Path, source: Path | None) -> tuple[str, Path]:
    """Family of a checkpoint's model, and the Hugging Face folder that completes it."""
    try:
        record = json.loads((checkpoint / RECORD).read_text())
        _check_sizes(checkpoint, record["files"])
        if "model" in record:
            return record["model"], source or checkpoint.parent / HF
        path = checkpoint / "config.yaml"
        settings = from_yaml(path.read_text(), str(path)).model
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint {checkpoint} is damaged: {error!r}. Convert or fetch it anew."
        ) from error
    hf = source or Path(settings.model_path)
    if not hf.is_dir():
        raise UserError(
            f"{checkpoint} belongs to the Hugging Face folder {hf}, which is missing: name with --source the "
            "one that completes it."
        )
    return settings.model, hf


def _weight_files(folder: Path) -> WeightFiles:
    if any(folder.glob("*.header")):
        return WeightFiles.from_headers(folder)
    return SafetensorsFolder(folder).files


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} {'is no folder' if folder.exists() else 'does not exist'}.")


def _check_sizes(checkpoint: Path, files: dict[str, int]) -> None:
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    damaged = [
        f"{name} ({sizes.get(name, 'missing')}, should be {size} bytes)"
        for name, size in files.items()
        if sizes.get(name) != size
    ]
    if damaged:
        raise UserError(
            f"checkpoint {checkpoint} is damaged: {', '.join(damaged)}. Convert or fetch it anew."
        )
