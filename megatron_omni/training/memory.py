"""What takes a process's memory while it trains, estimated before the first step.

Weights, gradients and optimizer state are counted. Activations are measured on few tokens and scaled: what a
forward pass keeps for the backward pass grows linearly with their number.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_omni.config.schema import Config
from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.parallel.state import Layout

GIB = 2**30
MASTER_BYTES, MOMENTS_BYTES = 4, 8
"""Float32 state of a weight; a float32 model is its own master."""

PROBE_TOKENS = 32


@dataclass(frozen=True)
class Workload:
    """What an update works on, on one data-parallel rank."""

    rows: int
    """Of a micro-batch: samples, twice as many with guidance."""
    text_tokens: int
    image_tokens: int
    text_channels: int
    latent_channels: int
    micro_batches: int
    """In one update."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process's device; without the temporaries of kernels and what sampling holds."""

    parameters: int
    """Of the model in training."""
    frozen: int
    """Networks beside it: text encoder, image codec, reference copy."""
    gradients: int
    optimizer: int
    """Master weights and moments."""
    activations: int
    """At most at a time: those kept by the micro-batches in flight, and those being recomputed."""
    host: int
    """Optimizer state in host memory instead."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.frozen + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        kinds = ("parameters", "frozen", "gradients", "optimizer", "activations")
        parts = [f"{kind} {getattr(self, kind) / GIB:.3g}" for kind in kinds if getattr(self, kind)]
        host = f"; in host memory {self.host / GIB:.3g}" if self.host else ""
        return f"{self.total / GIB:.3g} GiB = {' + '.join(parts)}{host}"


def estimate(
    config: Config,
    layout: Layout,
    chunks: Sequence[nn.Module],
    workload: Workload,
    frozen: Iterable[nn.Module] = (),
) -> MemoryEstimate:
    """This process's memory in training. Collective over tensor- and context-parallel ranks.

    `chunks`: its part of the model, without the data-parallel wrapping; `frozen`: all other networks.
    """
    settings = config.optimizer
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    sharded = settings.use_distributed_optimizer
    share = trained // (layout.data_size * layout.context_size) if sharded else trained
    offloaded = settings.optimizer_cpu_offload
    state = share * (MOMENTS_BYTES + (MASTER_BYTES if config.model.bf16 else 0))
    staged_gradients = 4 * share
    return MemoryEstimate(
        parameters=_size(weights),
        frozen=_size(weight for network in frozen for weight in network.parameters()),
        gradients=trained * (2 if settings.grad_reduce_in_bf16 else 4),
        optimizer=0 if offloaded else state,
        activations=activation_bytes(layout, chunks, workload),
        host=state + staged_gradients if offloaded else 0,
    )


def activation_bytes(layout: Layout, chunks: Sequence[nn.Module], workload: Workload) -> int:
    """At most at a time: kept by the passes in flight, and what backward recomputes of one of them."""
    passes = [_measure_scaled(chunk, workload) for chunk in chunks]
    in_flight = peak_in_flight([each.kept for each in passes], layout, workload.micro_batches)
    return in_flight + max(each.peak - each.kept for each in passes)


def peak_in_flight(kept: Sequence[int], layout: Layout, micro_batches: int) -> int:
    """The most that forward passes hold at a time under Megatron's 1F1B schedule, interleaved or not.

    `kept`: what a pass through each of the process's chunks holds until it has gone backward.
    """
    stages, chunks = layout.pipeline_size, len(kept)
    later_stages = stages - layout.pipeline_rank - 1
    passes = micro_batches * chunks
    # Through each chunk go as many micro-batches at a time as there are stages; backward, the last one first.
    forward = [kept[number // stages % chunks] for number in range(passes)]
    backward = [kept[-1 - number // stages % chunks] for number in range(passes)]
    warm_up = later_stages if chunks == 1 else 2 * later_stages + (chunks - 1) * stages
    held = peak = sum(forward[:warm_up])
    for arriving, leaving in zip(forward[warm_up:], backward, strict=False):
        peak = max(peak, held + arriving)
        held += arriving - leaving
    return peak


@dataclass(frozen=True)
class _Pass:
    """Bytes that autograd holds for one pass through a chunk."""

    kept: int
    """Between forward and backward."""
    peak: int
    """With what backward recomputes, at most."""


def _measure_scaled(chunk: nn.Module, workload: Workload) -> _Pass:
    """A pass of the workload's size, from passes of few tokens in about the same proportion."""
    config = chunk.config
    shares = config.tensor_model_parallel_size * config.context_parallel_size  # every rank has as many
    tokens = workload.text_tokens + workload.image_tokens
    text = max(1, round(PROBE_TOKENS * workload.text_tokens / tokens))
    few, more = (
        _measure(chunk, workload, times * shares * text, times * shares * (PROBE_TOKENS - text))
        for times in (1, 2)
    )
    growth = tokens / (PROBE_TOKENS * shares) - 1
    return _Pass(
        round(few.kept + growth * (more.kept - few.kept)), round(few.peak + growth * (more.peak - few.peak))
    )


def _measure(chunk: nn.Module, workload: Workload, text_tokens: int, image_tokens: int) -> _Pass:
    """A pass on zeros, forward and backward."""
    weight = next(chunk.parameters())
    rows, dtype, device = workload.rows, weight.dtype, weight.device
    latents = torch.zeros(rows, image_tokens, workload.latent_channels, device=device)
    embeddings = torch.zeros(rows, text_tokens, workload.text_channels, dtype=dtype, device=device)
    mask = torch.ones(rows, text_tokens, dtype=torch.bool, device=device)
    condition = TextCondition(embeddings, mask, padded=False)
    if not chunk.pre_process:
        hop = torch.zeros(chunk.hop_shape(latents, condition), dtype=dtype, device=device, requires_grad=True)
        chunk.set_input_tensor([hop])
    with SavedTensors(chunk.parameters()) as saved:
        output = chunk(latents, torch.zeros(rows, device=device), condition, ImageSize(1, image_tokens))
        kept = saved.now
        output.backward(torch.zeros_like(output))
    chunk.set_input_tensor([None])
    chunk.zero_grad()
    handed_on = 0 if chunk.post_process else _size([output])  # held by the schedule
    return _Pass(kept + handed_on, saved.peak + handed_on)


class SavedTensors:
    """Within the block: how many bytes autograd holds, each storage once, without those of `weights`."""

    def __init__(self, weights: Iterable[Tensor]):
        self.weights = {_storage(weight) for weight in weights}
        self.uses: Counter[int] = Counter()
        self.now = self.peak = 0
        self.hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> "SavedTensors":
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hooks.__exit__(*exception)

    def _pack(self, tensor: Tensor) -> "_Saved":
        saved = _Saved(tensor.detach())
        if _storage(tensor) not in self.weights:
            self._count(_storage(tensor), tensor.untyped_storage().nbytes(), 1)
            # Autograd drops it when the backward pass is done with it.
            weakref.finalize(saved, self._count, _storage(tensor), tensor.untyped_storage().nbytes(), -1)
        return saved

    def _count(self, storage: int, size: int, change: int) -> None:
        held_before = self.uses[storage] > 0
        self.uses[storage] += change
        self.now += size * ((self.uses[storage] > 0) - held_before)
        self.peak = max(self.peak, self.now)


@dataclass(eq=False)
class _Saved:
    tensor: Tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
