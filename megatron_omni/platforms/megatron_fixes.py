"""Faults of megatron-core 0.16 to 0.19 without Transformer Engine and Apex, mended on every device."""

import os
import warnings
from functools import cache
from types import ModuleType

from megatron_omni.platforms.host_adam import HostAdam
from megatron_omni.platforms.import_hook import after_import

_WARNINGS_OF_ITS_OWN_CODE = (
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)


@cache
def install() -> None:
    """Mend each faulty module as soon as it is imported."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's wish, with tensor parallelism
    for message in _WARNINGS_OF_ITS_OWN_CODE:
        warnings.filterwarnings("ignore", message)
    after_import("megatron", _mend)


def _mend(module: ModuleType) -> None:
    if module.__name__ in _MENDERS:
        _MENDERS[module.__name__](module)


def _mend_moe_utils(module: ModuleType) -> None:
    """0.16 leaves the name undefined without Transformer Engine and then tests it against None."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _mend_cpu_offloading(module: ModuleType) -> None:
    """Megatron's own takes CUDA parameters only."""
    module.HybridDeviceOptimizer = HostAdam


_MENDERS = {
    "megatron.core.transformer.moe.moe_utils": _mend_moe_utils,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": _mend_cpu_offloading,
}
