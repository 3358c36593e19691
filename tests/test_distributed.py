"""The harness of the tests with several processes."""

import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed


def rank_times(factor: torch.Tensor) -> tuple[torch.Tensor, int]:
    dist.init_process_group("gloo")
    return factor * dist.get_rank(), torch.get_num_threads()


def test_results_come_by_rank_from_processes_of_one_thread():
    assert run_distributed(rank_times, 3, torch.tensor(2.0)) == [(0.0, 1), (2.0, 1), (4.0, 1)]


def misbehave(fault: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    child = subprocess.Popen(["sleep", "600"])
    (folder / str(dist.get_rank())).write_text(f"{os.getpid()} {child.pid}")
    dist.barrier()
    if dist.get_rank() == 1:
        if fault == "raises":
            raise ValueError("the fault")
        if fault == "exits":
            os._exit(7)
    time.sleep(600)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("raises", RuntimeError, r"(?s)rank 1 of 2 failed.*in misbehave.*ValueError: the fault"),
        ("exits", RuntimeError, "rank 1 died with exit code 7"),
        ("hangs", TimeoutError, r"ranks \[0, 1\] of 2 did not finish"),
    ],
)
def test_a_failure_names_the_rank_and_leaves_no_process(
    tmp_path: Path, fault: str, error: type, message: str
):
    with pytest.raises(error, match=message):
        run_distributed(misbehave, 2, fault, tmp_path, timeout=4 if fault == "hangs" else 60)
    assert multiprocessing.active_children() == []
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)  # the system takes a moment to end what was killed
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended may still wait for its new parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
