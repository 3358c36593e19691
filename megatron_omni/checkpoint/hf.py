"""From a Hugging Face (diffusers, transformers) folder to a Megatron model and back, by the model's table.

A rank holds some chunks of the model (one a pipeline stage), and of these a share (tensor parallelism).
Parameters have the same names at every layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_omni.checkpoint.collective import together
from megatron_omni.checkpoint.hf_folder import check_target, check_weights, hf_shapes, write_folder
from megatron_omni.checkpoint.mapping import ADAPTER_SUFFIX, Entry, Row, match, model_heads
from megatron_omni.checkpoint.safetensors_folder import SafetensorsFolder
from megatron_omni.models.layers.lora import adapters, merged_weight


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the whole model."""

    shape: tuple[int, ...]
    """Of the share that a tensor-parallel rank has."""
    dtype: torch.dtype
    stage: int
    """Pipeline rank that holds it."""


@torch.no_grad()
def load_hf(chunks: Sequence[nn.Module], mapping: Sequence[Row], folder: Path) -> None:
    """Fill a Megatron model's parameters from the weights in `folder`, such as `…/transformer`. Collective.

    Each rank reads its own slices only, one tensor at a time, and converts them to the parameters' dtype.
    Adapters are left alone. Raises `UserError` on every rank for files that are missing or damaged, and for
    names and shapes that do not fit the whole model; it lists all of these.
    """
    rank, size = _tensor_parallel()
    whole = whole_model(chunks)
    with together():
        weights = SafetensorsFolder(folder)
        entries = match(mapping, whole, model_heads(chunks))
        check_weights(weights, _hf_shapes(entries, whole))
        own = own_parameters(chunks)
        for entry in entries:
            if entry.megatron in own:
                parts = [
                    weights.read(name, entry.hf_slice(weights.shape(name), rank, size)) for name in entry.hf
                ]
                own[entry.megatron].copy_(entry.to_megatron(parts, size))


@torch.no_grad()
def hf_tensors(
    chunks: Sequence[nn.Module], mapping: Sequence[Row], of_adapters: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The whole model's tensors, in the parameters' dtype, under their Hugging Face names. Collective.

    Every rank gets them, on its device: the model's with its enabled adapters merged into it, or, with the
    adapters' table and `of_adapters`, theirs alone. One parameter at a time travels: the stage that holds it
    sends each share to the same tensor-parallel rank of the other stages, then the tensor-parallel ranks
    gather. So all ranks must take all tensors.
    """
    own, whole = own_parameters(chunks, of_adapters), whole_model(chunks, of_adapters)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    device = next(iter(own.values())).device
    adapter_of = {
        id(linear.weight): adapter
        for chunk in chunks
        for linear, adapter in adapters(chunk)
        if adapter.enabled
    }
    for entry in match(mapping, whole, model_heads(chunks)):
        shard = own.get(entry.megatron)
        if id(shard) in adapter_of:
            shard = merged_weight(shard, adapter_of[id(shard)])
        if stages > 1:
            shard = _from_stage(shard, whole[entry.megatron], device)
        yield from zip(entry.hf, entry.to_hf(_gather(shard, entry.dim)), strict=True)


def export_hf(
    chunks: Sequence[nn.Module],
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
    whole, tensors = whole_model(chunks), hf_tensors(chunks, mapping)
    with together():
        try:
            if dist.get_rank() == 0:
                weights = SafetensorsFolder(source / transformer_folder)
                check_weights(weights, _hf_shapes(match(mapping, whole, model_heads(chunks)), whole))
                check_target(source, folder, transformer_folder)
                write_folder(tensors, weights.files, source, folder, transformer_folder)
        finally:
            for _ in tensors:  # the other ranks take part in gathering, and so does rank 0 after a failure
                pass


def own_parameters(chunks: Sequence[nn.Module], of_adapters: bool = False) -> dict[str, nn.Parameter]:
    """This rank's parameters: the model's without its adapters, or theirs alone."""
    return {
        name: parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if (f"{ADAPTER_SUFFIX}." in name) == of_adapters
    }


def whole_model(chunks: Sequence[nn.Module], of_adapters: bool = False) -> dict[str, WholeParameter]:
    """As `own_parameters`, of all pipeline stages. Collective over them."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = {
        name: WholeParameter(tuple(parameter.shape), parameter.dtype, stage)
        for name, parameter in own_parameters(chunks, of_adapters).items()
    }
    stages = [own] * parallel_state.get_pipeline_model_parallel_world_size()
    if len(stages) > 1:
        dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    return {name: parameter for each in stages for name, parameter in each.items()}


def _hf_shapes(entries: Sequence[Entry], whole: dict[str, WholeParameter]) -> dict[str, tuple[int, ...]]:
    shapes = {name: parameter.shape for name, parameter in whole.items()}
    return hf_shapes(entries, shapes, _tensor_parallel()[1])


def _tensor_parallel() -> tuple[int, int]:
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _from_stage(shard: Tensor | None, parameter: WholeParameter, device: torch.device) -> Tensor:
    """The share that the parameter's stage holds, on every stage."""
    if shard is None:
        shard = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(shard, group=group, group_src=parameter.stage)
    return shard


def _gather(shard: Tensor, dim: int | None) -> list[Tensor]:
    """The shards of all tensor-parallel ranks; a parameter that is whole on each is not sent."""
    size = _tensor_parallel()[1]
    if dim is None or size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards
