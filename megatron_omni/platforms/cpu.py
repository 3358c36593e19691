"""The CPU: for tests, for development and for small runs."""

import resource
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroupGloo, Store

from megatron_omni.platforms import megatron_fixes, megatron_on_cpu
from megatron_omni.platforms.attention import CpuAttention
from megatron_omni.platforms.base import Platform


class CpuPlatform(Platform):
    name = "cpu"
    backend = "gloo"
    attention = CpuAttention()
    memory = "resident memory, libraries included"

    def prepare(self) -> None:
        megatron_fixes.install()
        megatron_on_cpu.install()

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def peak_memory_gib(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def reset_peak_memory(self) -> None:
        pass

    def process_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Backend:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)
