"""Weights as safetensors files in a folder that both sides see."""

import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_omni.errors import UserError
from megatron_omni.rollout.vllm_omni.transport.base import Receiver, Sender, TransportError
from megatron_omni.rollout.vllm_omni.transport.bucket import Bucket

KIND = "folder"


class FolderSender(Sender):
    """Each bucket is a file, removed when all workers have loaded it. At most two exist.

    A sender has a folder of its own in `folder`, and a lock beside it as long as it lives; by that the next
    sender on the same folder knows what a killed one has left, and removes it.
    """

    def __init__(self, bucket_bytes: int, folder: Path, timeout: float):
        self.written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = folder.resolve() / f"weights-{socket.gethostname()}-{uuid.uuid4().hex}"
            with _lock(folder / "weights.lock"):  # no lock of a sender is seen before that sender has it
                _remove_abandoned(folder)
                self.lock = _lock(_lock_of(self.folder))
                self.folder.mkdir()
        except OSError as error:
            raise UserError(f"weights cannot travel through the folder {folder}: {error}") from error
        self.description = {"kind": KIND, "folder": str(self.folder)}
        super().__init__(bucket_bytes, timeout)

    def reserve(self, nbytes: int) -> None:
        super().close()
        self.memory = torch.empty(nbytes, dtype=torch.uint8)

    def publish(self, bucket: Bucket) -> Bucket:
        name = f"{self.written:06d}.safetensors"
        path = self.folder / name
        partial = path.with_suffix(".partial")
        try:
            save_file(dict(bucket.views(self.bytes_of(bucket))), partial)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot write weights to {path}: {error}; make room there or set another folder"
            ) from error
        self.written += 1
        return replace(bucket, location={"file": name})

    def retire(self, bucket: Bucket) -> None:
        (self.folder / bucket.location["file"]).unlink()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
        _lock_of(self.folder).unlink(missing_ok=True)
        self.lock.close()


class FolderReceiver(Receiver, kind=KIND):
    def __init__(
        self, description: dict[str, Any], worker: int, workers: int, device: torch.device, timeout: float
    ):
        self.folder = Path(description["folder"])
        if not self.folder.is_dir():
            raise UserError(
                f"the engine's worker on {socket.gethostname()} does not see {self.folder}, where the "
                "trainer puts weights; set a folder on a file system that both share"
            )

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        path = self.folder / Path(bucket.location["file"]).name
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise TransportError(f"cannot read the weights in {path}: {error}") from error
        return ((spec.name, tensors[spec.name]) for spec in bucket.tensors)


def _lock_of(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _lock(path: Path, flags: int = 0) -> Any:
    """The file, open and locked until it is closed or this process ends; `fcntl.LOCK_NB` not to wait."""
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | flags)
    return file


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob("weights-*.lock"):
        with suppress(OSError), _lock(path, fcntl.LOCK_NB):  # of a living sender, or just removed by another
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()
