from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.data.sampler import batch_indices, shard
from megatron_omni.errors import UserError

rows_ = st.integers(1, 60)
sizes = st.integers(1, 24)
seeds = st.integers(0, 2**31)


@given(rows_, sizes, seeds, st.integers(1, 4))
def test_every_row_is_seen_once_an_epoch(rows, size, seed, epochs):
    batches = -(-rows * epochs // size)
    stream = list(chain.from_iterable(batch_indices(rows, i, size, seed) for i in range(batches)))
    for epoch in range(epochs):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(sizes, st.integers(0, 60), seeds, st.integers(0, 300))
def test_no_row_is_twice_in_a_batch_if_the_set_is_large_enough(size, more, seed, iteration):
    batch = batch_indices(2 * size + more, iteration, size, seed)
    assert len(set(batch)) == len(batch) == size


@given(rows_, sizes, seeds, st.integers(0, 50))
def test_a_small_set_is_repeated_evenly(rows, size, seed, iteration):
    counts = Counter(batch_indices(rows, iteration, size, seed))
    assert sum(counts.values()) == size
    assert max(counts.values()) <= size // rows + 2


@given(rows_, sizes, seeds, st.integers(0, 1000))
def test_an_iteration_is_the_same_whatever_came_before(rows, size, seed, iteration):
    resumed = batch_indices(rows, iteration, size, seed)
    for other in range(3):
        batch_indices(rows, other, size, seed)
    assert batch_indices(rows, iteration, size, seed) == resumed


def test_epochs_and_seeds_are_shuffled_differently():
    epochs = {tuple(batch_indices(20, i, 20, seed)) for i in range(3) for seed in range(3)}
    assert len(epochs) == 9


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_parts_make_up_the_batch(ranks):
    batch = batch_indices(50, 3, 8, 0)
    assert [index for rank in range(ranks) for index in shard(batch, rank, ranks)] == batch


def test_a_batch_that_does_not_divide_is_an_error():
    with pytest.raises(UserError, match="8 prompts cannot be split evenly over 3"):
        shard(range(8), 0, 3)
