"""Ascend NPUs, through torch_npu and MindSpeed."""

import importlib
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import Store

from megatron_omni.platforms.base import Platform


class NpuPlatform(Platform):
    name = "npu"
    backend = "hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"

    def prepare(self) -> None:
        importlib.import_module("torch_npu")  # adds torch.npu
        importlib.import_module("mindspeed.megatron_adaptor")  # patches Megatron, so it comes first

    def device(self, local_rank: int) -> torch.device:
        torch.npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def empty_cache(self) -> None:
        torch.npu.empty_cache()

    def peak_memory_gib(self) -> float:
        return torch.npu.max_memory_allocated() / 2**30

    def reset_peak_memory(self) -> None:
        torch.npu.reset_peak_memory_stats()

    def process_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Backend:
        hccl = importlib.import_module("torch_npu._C._distributed_c10d").ProcessGroupHCCL
        options = hccl.Options()
        options._timeout = timeout
        return hccl(store, rank, size, options)
