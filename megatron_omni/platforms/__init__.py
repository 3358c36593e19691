"""The only room that knows the hardware."""

import importlib.util
import os
from functools import cache

import torch

from megatron_omni.errors import UserError
from megatron_omni.platforms.base import Platform
from megatron_omni.platforms.cpu import CpuPlatform
from megatron_omni.platforms.cuda import CudaPlatform
from megatron_omni.platforms.npu import NpuPlatform

_PLATFORMS = {platform.name: platform for platform in (CudaPlatform, NpuPlatform, CpuPlatform)}


@cache
def current_platform() -> Platform:
    """The hardware of this process: a CUDA GPU, else an Ascend NPU, else the CPU.

    The environment variable MEGATRON_OMNI_PLATFORM (cuda, npu or cpu) overrides the choice.
    """
    name = os.environ.get("MEGATRON_OMNI_PLATFORM") or _detect()
    if name not in _PLATFORMS:
        raise UserError(f"MEGATRON_OMNI_PLATFORM={name!r} is unknown; set one of {', '.join(_PLATFORMS)}")
    return _PLATFORMS[name]()


def _detect() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if importlib.util.find_spec("torch_npu") else "cpu"
