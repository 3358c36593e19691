"""Ascend NPUs, through torch_npu and MindSpeed."""

import importlib

import torch

from megatron_omni.platforms.base import Platform


class NpuPlatform(Platform):
    name = "npu"
    backend = "hccl"

    def prepare(self) -> None:
        importlib.import_module("torch_npu")  # adds torch.npu
        importlib.import_module("mindspeed.megatron_adaptor")  # patches Megatron, so it comes first

    def device(self, local_rank: int) -> torch.device:
        torch.npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def peak_memory_gib(self) -> float:
        return torch.npu.max_memory_allocated() / 2**30

    def reset_peak_memory(self) -> None:
        torch.npu.reset_peak_memory_stats()
