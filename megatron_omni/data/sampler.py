"""Which rows an iteration takes: a plain function of the iteration, so resuming has no state to lose."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megatron_omni.errors import UserError

T = TypeVar("T")


def batch_indices(rows: int, iteration: int, size: int, seed: int) -> list[int]:
    """The `size` row indices of `iteration` (from 0), the same in every process.

    The epochs, each a shuffle of all `rows` rows, are laid end to end and cut into batches, so nothing is
    dropped: a batch may end one epoch and begin the next. With `rows` ≥ 2 × `size`, no row is twice in a
    batch; smaller sets may repeat rows there, and must if `rows` < `size`.
    """
    start = iteration * size
    indices: list[int] = []
    while len(indices) < size:
        epoch, position = divmod(start + len(indices), rows)
        indices += _epoch_order(rows, epoch, size, seed)[position : position + size - len(indices)].tolist()
    return indices


def shard(batch: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """The contiguous part of a batch that data-parallel rank `rank` of `ranks` takes."""
    if len(batch) % ranks:
        raise UserError(
            f"a batch of {len(batch)} prompts cannot be split evenly over {ranks} data-parallel ranks"
        )
    share = len(batch) // ranks
    return batch[rank * share : (rank + 1) * share]


def _epoch_order(rows: int, epoch: int, size: int, seed: int) -> np.ndarray:
    """The shuffle of `epoch`, arranged so that the batch it shares with the epoch before holds no row twice.

    That batch ends the previous shuffle with its last `shared` rows, so the first rows here are taken from
    the others. Unless the set is small, this moves none of the last rows here: the next epoch relies on them.
    """
    order = _shuffle(rows, epoch, seed)
    shared = epoch * rows % size
    if shared == 0 or shared > rows:
        return order
    used = _shuffle(rows, epoch - 1, seed)[-shared:]
    fresh = np.flatnonzero(~np.isin(order, used))[: size - shared]
    return np.concatenate([order[fresh], np.delete(order, fresh)])


def _shuffle(rows: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)
