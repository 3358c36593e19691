"""From a Hugging Face (diffusers, transformers) folder to a Megatron model and back, by the model's table."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_omni.checkpoint.collective import together
from megatron_omni.checkpoint.mapping import Entry, Heads, Row, match
from megatron_omni.checkpoint.replace import replacing
from megatron_omni.checkpoint.safetensors_folder import DTYPES, SafetensorsFolder, SafetensorsWriter
from megatron_omni.errors import UserError


@torch.no_grad()
def load_hf(model: nn.Module, mapping: Sequence[Row], folder: Path) -> None:
    """Fill a Megatron model's parameters from the weights in `folder`, such as `…/transformer`. Collective.

    Each rank reads its own slices only, one tensor at a time, and converts them to the parameters' dtype.
    Raises `UserError` on every rank for files that are missing or damaged, and for names and shapes that do
    not fit; it lists all of these.
    """
    rank, size = _tensor_parallel()
    with together():
        parameters = dict(model.named_parameters())
        weights = SafetensorsFolder(folder)
        entries = match(mapping, parameters, _heads(model))
        _check(weights, folder, entries, parameters)
        for entry in entries:
            parts = [weights.read(name, entry.hf_slice(weights.shape(name), rank, size)) for name in entry.hf]
            parameters[entry.megatron].copy_(entry.to_megatron(parts, size))


@torch.no_grad()
def hf_tensors(model: nn.Module, mapping: Sequence[Row]) -> Iterator[tuple[str, Tensor]]:
    """The model's whole tensors, in the parameters' dtype, under their Hugging Face names. Collective.

    Every rank gets them. One parameter at a time is gathered from the tensor-parallel ranks, so all ranks
    must take all tensors.
    """
    parameters = dict(model.named_parameters())
    for entry in match(mapping, parameters, _heads(model)):
        shards = _gather(parameters[entry.megatron].detach(), entry.dim)
        yield from zip(entry.hf, entry.to_hf(shards), strict=True)


def export_hf(
    model: nn.Module,
    mapping: Sequence[Row],
    source: Path,
    folder: Path,
    transformer_folder: str = "transformer",
) -> None:
    """Write a complete Hugging Face folder with the model's weights. Collective; rank 0 writes.

    `source` is the folder the model came from. Its weights in `transformer_folder` give the layout: the same
    files, order of tensors, dtypes and metadata; all its other files are copied. What was loaded and not
    trained comes out byte for byte. An older export in `folder` is replaced when the new one is complete.

    Raises `UserError` on every rank, and leaves `folder` as it was, for a source that does not fit the model,
    a target that is not an older export, and a full disk.
    """
    tensors = hf_tensors(model, mapping)
    with together():
        try:
            if dist.get_rank() == 0:
                weights = SafetensorsFolder(source / transformer_folder)
                parameters = dict(model.named_parameters())
                _check(
                    weights,
                    source / transformer_folder,
                    match(mapping, parameters, _heads(model)),
                    parameters,
                )
                _check_target(source, folder, transformer_folder)
                _write_folder(tensors, weights, source, folder, transformer_folder)
        finally:
            for _ in tensors:  # the other ranks take part in gathering, and so does rank 0 after a failure
                pass


def _write_folder(
    tensors: Iterator[tuple[str, Tensor]],
    weights: SafetensorsFolder,
    source: Path,
    folder: Path,
    transformer_folder: str,
) -> None:
    def old_weights(directory: str, names: list[str]) -> list[str]:
        # The folder's other weight files are copies of the old weights in another precision or format.
        is_weights = Path(directory) == source / transformer_folder
        return [
            name for name in names if is_weights and name.endswith((".safetensors", ".bin", ".index.json"))
        ]

    try:
        with replacing(folder) as partial:
            shutil.copytree(source, partial, ignore=old_weights, dirs_exist_ok=True)
            if weights.index:
                shutil.copy(weights.index, partial / transformer_folder)
            with closing(SafetensorsWriter(weights, partial / transformer_folder)) as writer:
                for name, tensor in tensors:
                    writer.write(name, tensor)
    except (OSError, shutil.Error) as error:
        free = shutil.disk_usage(next(path for path in folder.absolute().parents if path.exists())).free
        raise UserError(
            f"cannot export to {folder}: {error}. {free / 2**30:.2f} GiB are free there; nothing was changed."
        ) from error


def _check(
    weights: SafetensorsFolder, folder: Path, entries: list[Entry], parameters: dict[str, nn.Parameter]
) -> None:
    """All faults of the folder's weights for this model, in one `UserError`."""
    size = _tensor_parallel()[1]
    wanted = {
        name: shape
        for entry in entries
        for name, shape in zip(entry.hf, entry.hf_shapes(parameters[entry.megatron].shape, size), strict=True)
    }
    found = set(weights.names)
    faults = [f"{name}: missing in the folder" for name in wanted.keys() - found]
    faults += [f"{name}: not in the model" for name in found - wanted.keys()]
    for name in wanted.keys() & found:
        if weights.shape(name) != wanted[name]:
            faults.append(
                f"{name}: {list(weights.shape(name))} in the folder, {list(wanted[name])} in the model"
            )
        if weights.dtype(name) not in DTYPES:
            faults.append(f"{name}: dtype {weights.dtype(name)}, known are {', '.join(DTYPES)}")
    if faults:
        lines = "\n".join(f"  {fault}" for fault in sorted(faults))
        raise UserError(
            f"the weights in {folder} do not fit the model; does its config.json belong to them?\n{lines}"
        )


def _check_target(source: Path, folder: Path, transformer_folder: str) -> None:
    nested = [folder.resolve(), *folder.resolve().parents], [source.resolve(), *source.resolve().parents]
    if source.resolve() in nested[0] or folder.resolve() in nested[1]:
        raise UserError(f"cannot export to {folder}: it overlaps with the model's source folder {source}.")
    if (folder / transformer_folder / "config.json").exists() or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(
            f"cannot export to {folder}: it holds something other than an older export; empty it first."
        )


def _heads(model: nn.Module) -> Heads:
    return Heads(model.config.num_attention_heads, model.config.num_query_groups)


def _tensor_parallel() -> tuple[int, int]:
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _gather(shard: Tensor, dim: int | None) -> list[Tensor]:
    """The shards of all tensor-parallel ranks; a parameter that is whole on each is not sent."""
    size = _tensor_parallel()[1]
    if dim is None or size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards
