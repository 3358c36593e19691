"""NVIDIA GPUs."""

from datetime import timedelta

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import Store

from megatron_omni.platforms import megatron_fixes
from megatron_omni.platforms.attention import CudaAttention
from megatron_omni.platforms.base import Platform
from megatron_omni.platforms.cuda_memory import CudaMemory


class CudaPlatform(Platform):
    name = "cuda"
    backend = "nccl"
    attention = CudaAttention()
    shared_memory = CudaMemory
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"

    def prepare(self) -> None:
        megatron_fixes.install()

    def device(self, local_rank: int) -> torch.device:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def process_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Backend:
        from torch.distributed import ProcessGroupNCCL  # not in every build

        options = ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # then its watchdog ends the process; whoever waits gives up before
        return ProcessGroupNCCL(store, rank, size, options)
