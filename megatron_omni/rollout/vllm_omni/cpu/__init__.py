"""vLLM-Omni on a machine without a GPU: a plug-in, which it finds through this package's entry points.

vLLM itself runs on CPUs; vLLM-Omni 0.30 has no such platform. Importing this module imports neither.
"""

import gc

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is half of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines may share the cores
    "TORCHDYNAMO_DISABLE": "1",  # compiling C++ takes longer than it saves here
}
"""Variables that processes of vLLM and vLLM-Omni want on a CPU, unless the user has set them."""


def platform() -> str | None:
    """Entry point of `vllm_omni.platform_plugins`: the platform's class where vLLM runs on the CPU."""
    from vllm.platforms import current_platform

    return (
        "megatron_omni.rollout.vllm_omni.cpu.platform.CpuOmniPlatform" if current_platform.is_cpu() else None
    )


def prepare() -> None:
    """Entry point of `vllm_omni.general_plugins`, called in every process before it loads a model."""
    from vllm.platforms import current_platform

    gc.freeze()  # what is imported stays: neither sampling nor an end in order need look through it
    if current_platform.is_cpu():
        from vllm.model_executor.layers.linear import LinearBase

        # Repacked weights could not be loaded again, as a weight update does.
        LinearBase.skip_weight_relayout = True
