"""Failures that every rank learns of, so that none waits for one that gave up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_omni.errors import UserError

Result = TypeVar("Result")


@contextmanager
def together(group: ProcessGroup | None = None) -> Iterator[None]:
    """Collective over all ranks: an error in the block on any rank is an error on every rank.

    A rank whose own block failed raises its own error; the others raise the first failure of another rank.
    The block itself may not be left half-way through another collective. `group`, which holds all ranks,
    keeps the messages apart from those of another thread.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    failures: list[tuple[type[Exception], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if error is None else _describe(error), group=group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, message = failure
            raise kind(f"{message} (on rank {rank})")


def _describe(error: Exception) -> tuple[type[Exception], str]:
    kind = next((kind for kind in (UserError, OSError) if isinstance(error, kind)), RuntimeError)
    return kind, str(error) or repr(error)


def on_rank_0(function: Callable[[], Result], group: ProcessGroup | None = None) -> Result:
    """Collective: what `function` returns on rank 0, on every rank; its error is raised on every rank.

    `group` as for `together`.
    """
    result = [None]
    with together(group):
        if dist.get_rank() == 0:
            result = [function()]
    dist.broadcast_object_list(result, src=0, group=group)
    return result[0]
