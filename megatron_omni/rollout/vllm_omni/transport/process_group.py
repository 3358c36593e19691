"""Weights sent over a process group of their own, which fits in beside those of any program."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore, Store, TCPStore

from megatron_omni.errors import UserError
from megatron_omni.platforms import current_platform
from megatron_omni.rollout.vllm_omni.transport.background import in_background
from megatron_omni.rollout.vllm_omni.transport.base import (
    Receiver,
    Sender,
    TransportError,
    require_same_hardware,
)
from megatron_omni.rollout.vllm_omni.transport.bucket import ALIGNMENT, Bucket, aligned

KIND = "process_group"


class ProcessGroupSender(Sender):
    """Rank 0; worker i is rank 1 + i. Each `push` has its own group, which forms with its first bucket."""

    def __init__(
        self, bucket_bytes: int, workers: int, device: torch.device, timeout: float, engine_host: str
    ):
        self.device, self.workers = device, workers
        self.address = _address_towards(engine_host)
        self.store = _listen(self.address, timeout)
        self.group: Backend | None = None
        self.groups = 0
        self.description = {
            "kind": KIND,
            "hardware": current_platform().name,
            "address": self.address,
            "port": self.store.port,
        }
        super().__init__(bucket_bytes, timeout, workers)

    def reserve(self, nbytes: int) -> None:
        super().close()
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def publish(self, bucket: Bucket) -> Bucket:
        return replace(super().publish(bucket), location={"group": self.groups})

    def transmit(self, bucket: Bucket) -> Future | None:
        return in_background(self._send, bucket) if bucket.nbytes else None

    def sent_bytes(self, bucket: Bucket) -> int:
        return _part_bytes(bucket, self.workers) * self.workers

    def _send(self, bucket: Bucket) -> None:
        parts = self.bytes_of(bucket)[: self.sent_bytes(bucket)].chunk(self.workers)
        if self.group is None:
            self._join(bucket.location["group"])
        group, sending = self.group, []
        for worker, part in enumerate(parts):
            with _lost(f"worker {worker} of the engine", self.timeout):
                sending.append(group.send([part], 1 + worker, 0))
        for worker, work in enumerate(sending):
            with _lost(f"worker {worker} of the engine", self.timeout):
                work.wait(timedelta(seconds=self.timeout))

    def _join(self, number: int) -> None:
        with _lost("a worker of the engine", self.timeout):
            group = _join(self.store, f"all/{number}", 0, 1 + self.workers, self.address, self.timeout)
        if number != self.groups:
            group.abort()
            raise TransportError("the update ended before all workers of the engine had joined")
        self.group = group

    def end(self) -> None:
        if self.group:
            self.group.abort()  # workers that still wait for it hear so at once
        self.group = None
        self.groups += 1

    def close(self) -> None:
        super().close()
        self.end()
        self.store = None


class ProcessGroupReceiver(Receiver, kind=KIND):
    def __init__(
        self, description: dict[str, Any], worker: int, workers: int, device: torch.device, timeout: float
    ):
        require_same_hardware(current_platform().name, description["hardware"])
        self.worker, self.workers, self.device, self.timeout = worker, workers, device, timeout
        sender, port = description["address"], description["port"]
        with _lost(f"the trainer at {sender}, port {port}, does not answer; it", timeout):
            limit = timedelta(seconds=timeout)
            self.store = TCPStore(sender, port, is_master=False, timeout=limit, wait_for_workers=False)
        self.address = _address_towards(sender)
        self.group: Backend | None = None
        self.peers: Backend | None = None
        self.number: int | None = None
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        if bucket.nbytes:
            self._receive_bytes(bucket)
        return bucket.views(self.memory)

    def _receive_bytes(self, bucket: Bucket) -> None:
        if self.number != bucket.location["group"]:
            self._join_groups(bucket.location["group"])
        part = _part_bytes(bucket, self.workers)
        if self.memory.numel() < part * self.workers:
            self.memory = None  # the old one goes first
            self.memory = torch.empty(part * self.workers, dtype=torch.uint8, device=self.device)
        whole = self.memory[: part * self.workers]
        own = whole[part * self.worker : part * (self.worker + 1)]
        limit = timedelta(seconds=self.timeout)
        with _lost("the trainer", self.timeout):
            self.group.recv([own], 0, 0).wait(limit)
        if self.workers > 1:
            with _lost("another worker of the engine", self.timeout):
                self.peers._allgather_base(whole, own).wait(limit)

    def _join_groups(self, number: int) -> None:
        self._leave_groups()
        with _lost("the trainer or another worker of the engine", self.timeout):
            self.group = _join(
                self.store, f"all/{number}", 1 + self.worker, 1 + self.workers, self.address, self.timeout
            )
            if self.workers > 1:
                self.peers = _join(
                    self.store, f"workers/{number}", self.worker, self.workers, self.address, self.timeout
                )
        self.number = number

    def _leave_groups(self) -> None:
        for group in (self.group, self.peers):
            if group:
                group.abort()
        self.group = self.peers = self.number = None

    def close(self) -> None:
        self._leave_groups()
        self.store = self.memory = None


def _part_bytes(bucket: Bucket, workers: int) -> int:
    """What each worker gets from the trainer."""
    return aligned(-(-bucket.nbytes // workers), ALIGNMENT)


def _address_towards(host: str) -> str:
    """This machine's address on the route to `host`."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unsent:
            unsent.connect(target)
            return unsent.getsockname()[0]
    except OSError as error:
        raise UserError(f"no route to the host {host!r}, to or from which weights go: {error}") from error


def _listen(address: str, timeout: float) -> TCPStore:
    """A store on a free port of that address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family)
    port = server.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


def _join(store: Store, name: str, rank: int, size: int, address: str, timeout: float) -> Backend:
    limit = timedelta(seconds=timeout)
    return current_platform().process_group(PrefixStore(name, store), rank, size, address, limit)


@contextmanager
def _lost(who: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # as all of torch.distributed's errors are
        raise TransportError(f"{who} is gone, or was silent for {timeout:g} s: {error}") from error
