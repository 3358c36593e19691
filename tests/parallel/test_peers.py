"""A rank that dies, hangs or fails ends the others in bounded time, and they say who it was."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.peers import LostRanksError, naming_lost_ranks
from megatron_omni.parallel.state import initialize
from tests.distributed import run_distributed

TIMEOUT, WAIT = timedelta(seconds=2), timedelta(seconds=1)


def lose_rank(rank: int, fault: str) -> tuple[str, float]:
    minutes = TIMEOUT / timedelta(minutes=1)
    layout = initialize(ParallelConfig(distributed_timeout_minutes=minutes), seed=0)
    layout.reduce_data_parallel({"warm": 1.0}, dist.ReduceOp.SUM)
    start = time.monotonic()
    try:
        with naming_lost_ranks(WAIT):
            if layout.rank == rank:
                inflict(fault)
            layout.gather_data_parallel(torch.ones(3))
    except (LostRanksError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    raise AssertionError("a collective with a lost rank succeeded")


def inflict(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("bad sample")


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("fault", ["killed", "hangs"])
def test_survivors_name_a_dead_or_hanging_rank_in_bounded_time(lost: int, fault: str):
    bound = WAIT if fault == "killed" else TIMEOUT + WAIT
    results = run_distributed(lose_rank, 3, lost, fault, dying=(lost,))
    for rank in {0, 1, 2} - {lost}:
        message, seconds = results[rank]
        assert f"no sign of rank(s) [{lost}]" in message
        assert seconds < bound.total_seconds() + 5


def test_survivors_repeat_the_error_of_the_rank_that_failed():
    results = run_distributed(lose_rank, 3, 1, "fails")
    assert results[1][0] == "ValueError: bad sample"
    for rank in (0, 2):
        assert results[rank][0] == "LostRanksError: rank 1 failed with ValueError: bad sample"
