"""GPU memory that other processes of this host can open.

Not PyTorch's own sharing: that one counts its readers, and never frees what a killed reader had open.
"""

import base64
import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_omni.errors import UserError
from megatron_omni.platforms.shared_memory import SharedMemory

_LAZY_ENABLE_PEER_ACCESS = 1


class CudaMemory(SharedMemory):
    """One allocation of the CUDA driver, outside PyTorch's cache and its statistics."""

    name = "CUDA memory"

    def __init__(self, nbytes: int, device: torch.device):
        torch.cuda.empty_cache()  # the driver cannot use what PyTorch keeps for later
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context
            pointer, ipc = ctypes.c_uint64(), _IpcHandle()
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            memory = _Memory(pointer, nbytes, torch.cuda.current_device(), "cuMemFree_v2")
            _call("cuIpcGetMemHandle", ctypes.byref(ipc), pointer)
            self.tensor = memory.tensor()
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        text = base64.b64encode(bytes(ipc)).decode()
        self.handle = {"of": self.name, "gpu": uuid, "ipc": text, "nbytes": nbytes}

    def close(self) -> None:
        self.tensor = None

    @staticmethod
    def open(handle: dict[str, Any], device: torch.device) -> Tensor:
        """On the GPU that has it, which may be another than `device`."""
        index = _gpu(handle["gpu"])
        ipc = _IpcHandle.from_buffer_copy(base64.b64decode(handle["ipc"], validate=True))
        pointer = ctypes.c_uint64()
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes the context
            try:
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), ipc, _LAZY_ENABLE_PEER_ACCESS)
            except RuntimeError as error:
                raise UserError(
                    f"cannot open the GPU memory that the trainer shares: {error}; it must be alive, on the "
                    "same host and in a container with the same IPC and PID namespaces; otherwise choose the "
                    "transport process_group or folder"
                ) from error
            return _Memory(pointer, handle["nbytes"], index, "cuIpcCloseMemHandle").tensor()


class _IpcHandle(ctypes.Structure):
    """The driver's CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_byte * 64)]


class _Memory:
    """Given back to the driver when no tensor lies in it any more."""

    def __init__(self, pointer: ctypes.c_uint64, nbytes: int, device: int, free: str):
        self.pointer, self.device, self.free = pointer, device, free
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer.value, False),
            "version": 3,
        }

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=torch.device("cuda", self.device))

    def __del__(self):
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # nothing may still read it
            _call(self.free, self.pointer)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *args: Any) -> None:
    status = getattr(_driver(), function)(*args)
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{function} failed with {name.value.decode() if name.value else status}")


def _gpu(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise UserError(
        f"the trainer shares memory of the GPU {uuid}, which this process does not see; add it to "
        "CUDA_VISIBLE_DEVICES, or choose the transport process_group"
    )
