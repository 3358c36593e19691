"""Waiting for other ranks, and saying which failed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from megatron_omni.errors import UserError

ENDED = "ended"
"""Key of the number of ranks that have left a note."""


class LostRanksError(UserError):
    """A collective failed because of other ranks; the message says which."""


@contextmanager
def naming_lost_ranks(wait: timedelta = timedelta(seconds=10)) -> Iterator[None]:
    """Goes round everything that communicates.

    A rank that fails leaves a note for the others. One whose collective failed, because a peer is gone or was
    silent for the process group's timeout, reads the notes of all and raises `LostRanksError`; whoever left
    none within `wait` has died or hangs. (NCCL's watchdog ends processes itself; torchrun says who failed.)
    """
    try:
        yield
    except Exception as error:
        communication = _is_communication_error(error)
        try:
            store = dist.distributed_c10d._get_default_store()
            store.add(ENDED, 1)
            store.set(_key(dist.get_rank()), "" if communication else f"{type(error).__name__}: {error}")
            notes = _read_notes(store, wait) if communication else {}
        except dist.DistError as store_error:
            raise LostRanksError(f"the host of the rendezvous (rank 0's) is gone: {store_error}") from error
        if not communication:
            raise
        raise LostRanksError(_describe(notes, wait)) from error


def meet(number: int, limit: float) -> None:
    """Wait until all ranks have called this `number` times (from 1): longer than a collective may last.

    Raises `DistError`, as collectives do, if a rank has failed meanwhile or `limit` seconds have passed.
    """
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    key, deadline = f"met/{number}", time.monotonic() + limit
    if store.add("arrived", 1) == number * ranks:
        store.set(key, "")
        store.delete_key(f"met/{number - 1}")
    while not store.check([key]):
        time.sleep(0.1)
        if store.add(ENDED, 0) or time.monotonic() > deadline:
            raise dist.DistError(f"not all ranks have come within {limit:g} s, or one has failed")


def _is_communication_error(error: Exception) -> bool:
    """Gloo's are plain RuntimeErrors that tell the source file."""
    return isinstance(error, dist.DistError) or "/gloo/transport/" in str(error)


def _key(rank: int) -> str:
    return f"{ENDED}/{rank}"


def _read_notes(store: dist.Store, wait: timedelta) -> dict[int, str | None]:
    """Each rank's note: its own error, "" if it lost another rank, None if there is no note."""
    ranks = range(dist.get_world_size())
    with suppress(dist.DistStoreError):  # not all have come in time
        store.wait([_key(rank) for rank in ranks], wait)
    return {rank: store.get(_key(rank)).decode() if store.check([_key(rank)]) else None for rank in ranks}


def _describe(notes: dict[int, str | None], wait: timedelta) -> str:
    silent = [rank for rank, note in notes.items() if note is None]
    lines = [f"rank {rank} failed with {note}" for rank, note in notes.items() if note]
    if silent:
        lines.append(f"no sign of rank(s) {silent} for {wait.total_seconds():g} s: dead or hanging")
    return "; ".join(lines) or "all ranks live but have lost contact; see the error above"
