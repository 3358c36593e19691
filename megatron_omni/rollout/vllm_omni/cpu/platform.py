"""The platform class: which workers and kernels vLLM-Omni takes on a CPU."""

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

ROOM = __name__.rpartition(".")[0]
ATTENTION = "TORCH_SDPA"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with what vLLM-Omni asks beyond it."""

    _omni_enum = OmniPlatformEnum.OOT
    dist_backend = "gloo"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return f"{ROOM}.autoregressive_worker.CpuArWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return f"{ROOM}.autoregressive_worker.CpuGenerationWorker"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return f"{ROOM}.diffusion_worker.CpuDiffusionWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None and selected_backend.upper() != ATTENTION:
            raise ValueError(f"attention backend {selected_backend!r}: a CPU has {ATTENTION} only.")
        return f"{ROOM}.attention.CpuSdpaBackend"

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        return False

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return psutil.cpu_count()

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs asynchronously."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    mem_get_info = get_device_memory

    # torch's CPU allocator keeps no statistics.

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        pass

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0
