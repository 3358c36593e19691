"""`tools/benchmark/communication.py` counts all that is sent, and no layout sends more than it needs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_omni.models.base import ImageSize
from tests.distributed import run_distributed
from tools.benchmark.communication import LAYOUTS, PASSES, WORKLOAD, count, measure_all, processes, rows

UNEQUAL = replace(
    WORKLOAD,
    qwen=replace(WORKLOAD.qwen, num_layers=4),
    size=ImageSize(8, 10),
    text_lengths=((13, 12), (16, 15), (12, 11), (14, 15)),
)
N = 1000
FLOATS = 4 * N
"""Bytes of N numbers."""


def numbers(count: int = N) -> Tensor:
    return torch.zeros(count)


# What a rank of three sends, and the collective.
COLLECTIVES: dict[str, tuple[float, Callable[[], object]]] = {
    "all_reduce": (4 / 3 * FLOATS, lambda: dist.all_reduce(numbers())),
    "broadcast": (2 / 3 * FLOATS, lambda: dist.broadcast(numbers(), src=1)),
    "all_gather": (2 * FLOATS, lambda: dist.all_gather([numbers() for _ in range(3)], numbers())),
    "all_gather_into_tensor": (2 * FLOATS, lambda: dist.all_gather_into_tensor(numbers(3 * N), numbers())),
    "reduce_scatter_tensor": (2 * FLOATS, lambda: dist.reduce_scatter_tensor(numbers(), numbers(3 * N))),
    "all_to_all_single": (2 * FLOATS, lambda: dist.all_to_all_single(numbers(3 * N), numbers(3 * N))),
    "barrier": (0, dist.barrier),
}


def test_collectives_count_as_what_a_ring_sends():
    for rank, sent in enumerate(run_distributed(count_collectives, 3)):
        for name, (expected, _) in COLLECTIVES.items():
            traffic = sent.pop(name)
            assert (round(traffic.bytes), traffic.messages) == (round(expected), 1), name
        assert sent["uneven"].bytes == pytest.approx(4 * (60 - (10, 20, 30)[rank]))
        assert (sent["passed on"].bytes, sent["passed on"].messages) == (FLOATS, 1)
        assert sent["objects"].bytes > 0


def count_collectives() -> dict:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sent = {name: count(collective) for name, (_, collective) in COLLECTIVES.items()}
    splits = [10, 20, 30]
    mine = splits[rank]

    def uneven() -> None:
        dist.all_to_all_single(numbers(3 * mine), numbers(60), [mine] * 3, splits)

    def pass_on() -> None:
        ahead = dist.P2POp(dist.isend, numbers(), (rank + 1) % 3)
        behind = dist.P2POp(dist.irecv, numbers(), (rank - 1) % 3)
        for work in dist.batch_isend_irecv([ahead, behind]):
            work.wait()

    sent["uneven"] = count(uneven)
    sent["passed on"] = count(pass_on)
    sent["objects"] = count(lambda: dist.all_gather_object([None] * 3, "text"))
    return sent


@pytest.mark.slow
def test_no_layout_sends_over_a_tenth_more_than_it_needs():
    layouts = {name: config for name, config in LAYOUTS.items() if processes(config) == 2}
    table = list(rows(layouts, {"unequal": UNEQUAL}))
    assert len(table) == 2 * len(layouts)
    assert {str(row): row.ratio for row in table if not 1 <= row.ratio <= 1.1} == {}


KERNEL = Path("/proc/self/io")
PLAIN = ["TP 2", "PP 2 × 2 virtual stages", "CP 2, Ulysses", "CP 2, ring", "DP 2"]
"""Layouts whose collectives gloo computes as a ring does."""


@pytest.mark.skipif(not KERNEL.exists(), reason="the kernel does not tell what a process writes")
def test_the_kernel_has_seen_as_many_bytes_leave_as_were_counted():
    cases = [(LAYOUTS[name], UNEQUAL) for name in PLAIN]
    assert {processes(config) for config, _ in cases} == {2}
    for counted, written in run_distributed(count_twice, 2, cases):
        sampling, updates = written[::2], written[1::2]
        for name, (update, one_pass), *seen in zip(PLAIN, counted, updates, sampling, strict=True):
            for counted_bytes, seen_bytes in zip((update.bytes, PASSES * one_pass.bytes), seen, strict=True):
                # gloo adds a header to each message.
                assert 0 <= seen_bytes - counted_bytes < 0.01 * counted_bytes + 8192, name


def count_twice(cases: list) -> tuple[list, list[int]]:
    """Traffic as counted and as the kernel saw it, of each sampling and then each update."""
    dist.init_process_group("gloo")
    written = []

    def count_and_ask(work: Callable[[], object]) -> object:
        dist.barrier()
        before = kernel_count()
        traffic = count(work)
        dist.barrier()
        written.append(kernel_count() - before)
        return traffic

    with mock.patch("tools.benchmark.communication.count", count_and_ask):
        return measure_all(cases), written


def kernel_count() -> int:
    """Bytes that this process has written, to sockets too."""
    return int(dict(line.split(": ") for line in KERNEL.read_text().splitlines())["wchar"])
