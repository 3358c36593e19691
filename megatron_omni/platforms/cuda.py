"""NVIDIA GPUs."""

import torch

from megatron_omni.platforms import megatron_fixes
from megatron_omni.platforms.attention import CudaAttention
from megatron_omni.platforms.base import Platform


class CudaPlatform(Platform):
    name = "cuda"
    backend = "nccl"
    attention = CudaAttention()

    def prepare(self) -> None:
        megatron_fixes.install()

    def device(self, local_rank: int) -> torch.device:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()
