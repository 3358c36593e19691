"""The policy as it was before training, which a KL penalty compares with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from megatron_omni.models.layers.lora import adapters_disabled
from megatron_omni.parallel.pipeline import ForwardPipeline, Lane


@dataclass(frozen=True)
class Reference:
    """Runs forward passes of the frozen policy."""

    pipeline: ForwardPipeline
    ready: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within its block the pipeline's chunks compute as the frozen policy does."""

    def run(self, lanes: Iterable[Lane[None]]) -> None:
        """Each lane to its end; see `ForwardPipeline.run`."""
        with self.ready():
            for _ in self.pipeline.run(lanes):
                pass

    @staticmethod
    def without_adapters(policy: ForwardPipeline) -> "Reference":
        """The policy in training with its adapters off, which costs no memory."""
        return Reference(policy, lambda: adapters_disabled(policy.chunks))

    @staticmethod
    def on_host(frozen: ForwardPipeline, device: torch.device) -> "Reference":
        """A frozen copy that is on the device only while it is used."""
        return Reference(frozen, lambda: _on_device(frozen.chunks, device))


@contextmanager
def _on_device(chunks: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    for chunk in chunks:
        chunk.to(device)
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.to("cpu")
