"""What the engine asks of the hardware."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import Store

from megatron_omni.platforms.attention import AttentionKernel, PlainAttention
from megatron_omni.platforms.shared_memory import HostMemory, SharedMemory


class Platform(ABC):
    """One kind of hardware. The rest of the engine never asks which."""

    name: str
    """Device type, as in `torch.device(name)`."""
    backend: str
    """Backend of torch.distributed."""
    attention: AttentionKernel = PlainAttention()
    """Attention over a part of the keys."""
    memory: str = "device memory"
    """What `peak_memory_gib` measures, in words."""
    shared_memory: type[SharedMemory] = HostMemory
    """The nearest memory to the device that other processes can open."""
    visible_devices_variable: str = ""
    """Environment variable that limits a process to some devices; empty if there is none."""

    @abstractmethod
    def prepare(self) -> None:
        """Make Megatron usable here. Called once, before Megatron is imported."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of the host's process `local_rank`, made current."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work queued on the current device."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give device memory that is kept for later back to other processes."""

    @abstractmethod
    def peak_memory_gib(self) -> float:
        """Highest use of device memory since the last reset, in GiB; on a CPU, of resident memory."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Measure the peak anew from here. On a CPU the peak counts from the start of the process."""

    def visible_devices(self, numbers: Iterable[int]) -> dict[str, str]:
        """Environment for a process that is to see these of our devices."""
        name = self.visible_devices_variable
        if not name:
            return {}
        ours = os.environ[name].split(",") if os.environ.get(name) else None
        return {name: ",".join(ours[number] if ours else str(number) for number in numbers)}

    @abstractmethod
    def process_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Backend:
        """A group beside torch.distributed's default one, which need not exist; blocks until all have joined.

        `address` is this machine's, where the other ranks reach it; NCCL and HCCL choose their own.
        """
