"""A rank that dies, hangs or fails ends the others in bounded time, and they say who it was."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.peers import LostRanksError, meet, naming_lost_ranks
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


def meet_a_late_rank() -> list[float]:
    """Seconds that each meeting took; rank 1 comes later than a collective would wait."""
    layout = initialize(ParallelConfig(distributed_timeout_minutes=TIMEOUT / timedelta(minutes=1)), seed=0)
    seconds = []
    for number in (1, 2, 3):
        start = time.monotonic()
        if layout.rank == 1 and number == 2:
            time.sleep(2 * TIMEOUT.total_seconds())
        meet(number, limit=30)
        seconds.append(time.monotonic() - start)
        layout.gather_data_parallel(torch.ones(3))
    return seconds


def test_a_meeting_waits_longer_than_a_collective():
    for first, second, third in run_distributed(meet_a_late_rank, 3):
        assert second > 2 * TIMEOUT.total_seconds() - 1
        assert first < 3 and third < 3


def fail_before_the_meeting(limit: float) -> tuple[str, float]:
    layout = initialize(ParallelConfig(), seed=0)
    start = time.monotonic()
    try:
        with naming_lost_ranks(WAIT):
            if layout.rank == 1 and limit > 10:
                raise ValueError("bad sample")
            if layout.rank == 1:
                time.sleep(limit + 3)
            meet(1, limit)
    except (LostRanksError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


def test_a_meeting_ends_when_a_rank_has_failed():
    for rank, (message, seconds) in enumerate(run_distributed(fail_before_the_meeting, 3, 60.0)):
        assert "ValueError: bad sample" in message, rank
        assert seconds < 10


def test_a_meeting_ends_at_its_limit():
    (first, seconds), *_ = run_distributed(fail_before_the_meeting, 3, 2.0)
    assert "no sign of rank(s) [1]" in first and seconds < 10
