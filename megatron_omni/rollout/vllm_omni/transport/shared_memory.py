"""Weights in memory that the engine's workers map: nothing is sent."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_omni.platforms import current_platform
from megatron_omni.rollout.vllm_omni.transport.base import (
    Receiver,
    Sender,
    TransportError,
    require_same_hardware,
)
from megatron_omni.rollout.vllm_omni.transport.bucket import Bucket

KIND = "shared_memory"


class SharedMemorySender(Sender):
    def __init__(self, bucket_bytes: int, device: torch.device, timeout: float):
        self.device = device
        self.shared = None
        super().__init__(bucket_bytes, timeout)

    @property
    def description(self) -> dict[str, Any]:
        return {"kind": KIND, "memory": self.shared.handle}

    def reserve(self, nbytes: int) -> None:
        self.close()
        self.shared = current_platform().shared_memory(nbytes, self.device)
        self.memory = self.shared.tensor

    def publish(self, bucket: Bucket) -> Bucket:
        return replace(
            super().publish(bucket),
            location={"memory": self.shared.handle, "offset": self.start(bucket.slot)},
        )

    def close(self) -> None:
        super().close()
        if self.shared:
            self.shared.close()
            self.shared = None


class SharedMemoryReceiver(Receiver, kind=KIND):
    def __init__(
        self, description: dict[str, Any], worker: int, workers: int, device: torch.device, timeout: float
    ):
        self.device = device
        self._open(
            description["memory"]
        )  # now, so that what is out of reach is known before the first bucket

    def _open(self, handle: dict[str, Any]) -> None:
        self.handle = self.memory = None  # the old one goes first
        shared_memory = current_platform().shared_memory
        require_same_hardware(shared_memory.name, handle["of"])
        self.memory = shared_memory.open(handle, self.device)
        self.handle = handle

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        handle, offset = bucket.location["memory"], bucket.location["offset"]
        if handle != self.handle:  # it has grown
            self._open(handle)
        if not current_platform().shared_memory.is_shared(handle):
            raise TransportError(f"the trainer, which shares the weights' memory {handle}, is gone")
        return bucket.views(self.memory[offset : offset + bucket.nbytes])

    def close(self) -> None:
        self.handle = self.memory = None
