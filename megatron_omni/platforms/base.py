"""What the engine asks of the hardware."""

from abc import ABC, abstractmethod

import torch

from megatron_omni.platforms.attention import AttentionKernel, PlainAttention


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
    def peak_memory_gib(self) -> float:
        """Highest use of device memory since the last reset, in GiB; on a CPU, of resident memory."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Measure the peak anew from here. On a CPU the peak counts from the start of the process."""
