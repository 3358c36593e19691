"""Process groups, what a layout gathers, and isolation of jobs on one host."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.state import Layout, destroy, initialize
from tests.distributed import run_distributed

TP2 = ParallelConfig(tensor_model_parallel_size=2)


def places(config: ParallelConfig) -> tuple[Layout, list[int], list[int]]:
    layout = initialize(config, seed=0)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    data_group = parallel_state.get_data_parallel_group()
    return layout, dist.get_process_group_ranks(tensor_group), dist.get_process_group_ranks(data_group)


def test_tensor_parallel_ranks_are_neighbours_and_data_parallelism_takes_what_is_left():
    ranks = run_distributed(places, 4, TP2)
    assert [(r.rank, r.tensor_rank, r.data_rank) for r, _, _ in ranks] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert [groups for _, *groups in ranks] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    assert {(r.world_size, r.tensor_size, r.data_size) for r, _, _ in ranks} == {(4, 2, 2)}


@pytest.mark.parametrize(
    ("config", "description"),
    [
        (ParallelConfig(2), "2 cpu process(es): tensor parallel 2 × data parallel 1"),
        (ParallelConfig(2, True), "2 cpu process(es): tensor parallel 2 + sequence parallel × data parallel 1"),
        (ParallelConfig(1), "2 cpu process(es): tensor parallel 1 × data parallel 2"),
    ],
)
def test_a_layout_describes_itself(config: ParallelConfig, description: str):
    assert {str(layout) for layout, _, _ in run_distributed(places, 2, config)} == {description}


def communicate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict, dict]:
    layout = initialize(TP2, seed=0)
    mine = torch.tensor([[10.0, 20.0]]) + layout.rank
    before = mine.clone()
    broadcast = layout.broadcast_tensor_parallel(mine)
    values = {"loss": float(layout.rank), "norm": -float(layout.rank)}
    reduced = [layout.reduce_data_parallel(values, op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)]
    return layout.gather_data_parallel(mine), broadcast, mine - before, *reduced


def test_a_layout_gathers_broadcasts_and_reduces_in_its_own_groups():
    for rank, (gathered, broadcast, change, total, largest) in enumerate(run_distributed(communicate, 4)):
        column = rank % 2
        assert gathered.tolist() == [[10.0 + column, 20.0 + column, 12.0 + column, 22.0 + column]]
        assert broadcast.tolist() == [[10.0 + rank - column, 20.0 + rank - column]]
        assert not change.any()
        assert total == {"loss": 2.0 + 2 * column, "norm": -2.0 - 2 * column}
        assert largest == {"loss": 2.0 + column, "norm": 0.0 - column}


def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    initialize(TP2, seed=3)
    shared = torch.randn(4)
    with get_cuda_rng_tracker().fork():
        first = torch.randn(4)
    with get_cuda_rng_tracker().fork():
        second = torch.randn(4)
    return shared, first, second, torch.randn(4)


def test_the_forked_generator_differs_between_tensor_ranks_and_leaves_the_shared_one_alone():
    ranks = run_distributed(draw, 4)
    expected = torch.randn(8, generator=torch.Generator().manual_seed(3))
    for shared, first, second, after in ranks:
        assert torch.cat([shared, after]).tolist() == expected.tolist()
        assert not torch.equal(first, second)
    firsts = [first.tolist() for _, first, _, _ in ranks]
    assert firsts[0] == firsts[2] != firsts[1] == firsts[3]


ALONE = """
import torch.distributed as dist
from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.state import destroy, initialize
for seed in range(2):
    print(initialize(ParallelConfig(), seed))
    dist.barrier()
    input()
    destroy()
"""


def test_jobs_of_one_process_start_by_themselves_side_by_side_and_again_after_destroy():
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    command = [sys.executable, "-c", ALONE]
    pipe = subprocess.PIPE
    jobs = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(2)]
    try:
        for job in jobs:  # both stand in their world at once
            assert "1 cpu process(es)" in job.stdout.readline()
        for job in jobs:
            job.communicate("\n\n", timeout=60)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0]


def twice() -> tuple[int, int]:
    sizes = []
    for config in (TP2, ParallelConfig()):
        sizes.append(initialize(config, seed=0).tensor_size)
        destroy()
    return tuple(sizes)


def test_destroy_makes_room_for_another_layout():
    assert run_distributed(twice, 2) == [(2, 1), (2, 1)]
