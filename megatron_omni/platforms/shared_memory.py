"""Memory that other processes of this host can open, with nothing to clean up after any way to end."""

import mmap
import os
import uuid
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_omni.errors import UserError


class SharedMemory(ABC):
    """Made by one process, which passes the handle to others; JSON values."""

    name: ClassVar[str]
    """Of the kind of memory, which handles tell as "of"."""
    tensor: Tensor
    """[nbytes] uint8."""
    handle: dict[str, Any]

    @abstractmethod
    def __init__(self, nbytes: int, device: torch.device): ...

    @abstractmethod
    def close(self) -> None:
        """No process can open it any more. It is freed with the last tensor that lies in it, anywhere."""

    @staticmethod
    @abstractmethod
    def open(handle: dict[str, Any], device: torch.device) -> Tensor:
        """Another process's memory. Raises `UserError` with the reason if it is out of reach."""

    @staticmethod
    def is_shared(handle: dict[str, Any]) -> bool:
        """Whether its maker lives and has not closed it; true where this cannot be known."""
        return True


class HostMemory(SharedMemory):
    """An anonymous file: two jobs cannot clash, a killed process leaves none. Others find it in /proc."""

    name = "host memory"

    def __init__(self, nbytes: int, device: torch.device):
        self.fd = os.memfd_create(f"megatron_omni-{uuid.uuid4().hex}")
        os.ftruncate(self.fd, nbytes)
        self.tensor = _map(self.fd, nbytes)
        pid, file = os.getpid(), os.readlink(_path(os.getpid(), self.fd))
        self.handle = {"of": self.name, "pid": pid, "fd": self.fd, "file": file, "nbytes": nbytes}

    def close(self) -> None:
        self.tensor = None
        os.close(self.fd)

    @staticmethod
    def open(handle: dict[str, Any], device: torch.device) -> Tensor:
        path = _path(handle["pid"], handle["fd"])
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{_out_of_reach(handle)}: {error}") from error
        try:
            if os.readlink(_path(os.getpid(), fd)) != handle["file"]:
                raise UserError(f"{_out_of_reach(handle)}: another process has that number here")
            return _map(fd, handle["nbytes"])
        finally:
            os.close(fd)

    @staticmethod
    def is_shared(handle: dict[str, Any]) -> bool:
        try:
            return os.readlink(_path(handle["pid"], handle["fd"])) == handle["file"]
        except OSError:
            return False


def _map(fd: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def _path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"


def _out_of_reach(handle: dict[str, Any]) -> str:
    return (
        f"cannot open the memory that process {handle['pid']} shares; it must be alive, on the same host, in "
        "the same container and of the same user; otherwise choose the transport process_group or folder"
    )
