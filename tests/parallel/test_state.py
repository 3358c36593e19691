"""Process groups, what a layout gathers, and isolation of jobs on one host."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

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


def devices(config: ParallelConfig, last_host: str) -> list[int]:
    """Of a replica, were these processes on devices, and the last one on `last_host`."""
    layout = initialize(config, seed=0)
    if layout.rank == layout.world_size - 1:
        socket.gethostname = lambda: last_host
    return replace(layout, device=torch.device("cuda", layout.rank)).replica_devices()


def test_a_replica_knows_its_devices_on_the_leaders_host():
    here = socket.gethostname()
    assert run_distributed(devices, 4, TP2, here) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    pipeline = ParallelConfig(pipeline_model_parallel_size=2)  # replicas are not neighbours
    assert run_distributed(devices, 4, pipeline, here) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert run_distributed(devices, 4, pipeline, "elsewhere") == [[0, 2], [1], [0, 2], [1]]


@pytest.mark.parametrize(
    ("config", "description"),
    [
        (ParallelConfig(2), "tensor parallel 2 × data parallel 1"),
        (ParallelConfig(2, True), "tensor parallel 2 + sequence parallel × data parallel 1"),
        (ParallelConfig(1), "tensor parallel 1 × data parallel 2"),
        (
            ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=3),
            "tensor parallel 1 × pipeline 2 × 3 virtual stages × data parallel 1",
        ),
        (
            ParallelConfig(context_parallel_size=2, ulysses_degree_in_cp=1),
            "tensor parallel 1 × context 2 (Ulysses 1 × ring 2) × data parallel 1",
        ),
    ],
)
def test_a_layout_describes_itself(config: ParallelConfig, description: str):
    layouts = {str(layout) for layout, _, _ in run_distributed(places, 2, config)}
    assert layouts == {f"2 cpu process(es): {description}"}


def communicate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict, dict]:
    layout = initialize(TP2, seed=0)
    mine = torch.tensor([[10.0, 20.0]]) + layout.rank
    before = mine.clone()
    broadcast = layout.broadcast_in_replica(mine)
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


def initialize_alone(folder: Path) -> list[tuple[str, float]]:
    """A process without torchrun's environment, in its own world while another one is in its own, twice."""
    rank = os.environ.pop("RANK")
    seen = []
    for round_ in range(2):
        layout = initialize(ParallelConfig(), seed=0)
        (folder / f"{rank}.{round_}").touch()
        while len(list(folder.glob(f"*.{round_}"))) < 2:
            time.sleep(0.01)
        ones = torch.ones(())
        dist.all_reduce(ones)
        seen.append((str(layout), ones.item()))
        destroy()
    return seen


def test_jobs_of_one_process_start_by_themselves_side_by_side_and_again_after_destroy(tmp_path: Path):
    alone = ("1 cpu process(es): tensor parallel 1 × data parallel 1", 1.0)
    assert run_distributed(initialize_alone, 2, tmp_path) == [[alone, alone]] * 2
