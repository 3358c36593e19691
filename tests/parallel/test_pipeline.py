"""Lanes of forward passes through pipeline stages: each gets what one process would compute."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.pipeline import ForwardPipeline, Lane
from megatron_omni.parallel.state import form_groups
from tests.distributed import run_distributed


@dataclass
class Pass:
    latents: Tensor
    condition: float


class Chunk(nn.Module):
    """Stage number `index`: x → 3 x + index + condition."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index
        self.input_tensor = None

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        (self.input_tensor,) = input_tensor

    def hop_shape(self, latents: Tensor, condition: float) -> tuple[int, ...]:
        return latents.shape

    def forward(self, inputs: Pass) -> Tensor:
        x = inputs.latents if self.index == 0 else self.input_tensor
        return 3 * x + self.index + inputs.condition


def make_lane(number: int, passes: int) -> Lane[tuple[int, Tensor]]:
    """Its passes differ in size from other lanes' passes."""
    x = torch.arange(1 + number % 3, dtype=torch.float64) + number
    for step in range(passes):
        x = (yield Pass(x, 0.5 * step)) % 7
    return number, x


def expected(number: int, passes: int, stages: int) -> tuple[int, Tensor]:
    lane = make_lane(number, passes)
    chunks = [Chunk(index) for index in range(stages)]
    try:
        inputs = next(lane)
        while True:
            output = None
            for chunk in chunks:
                chunk.set_input_tensor([output])
                output = chunk(inputs)
            inputs = lane.send(output)
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_lanes_give_on_every_process_what_one_process_computes(pipeline: int, chunks: int):
    run_distributed(check_lanes, 4, ParallelConfig(1, False, pipeline, chunks))


def check_lanes(config: ParallelConfig) -> None:
    dist.init_process_group("gloo")
    layout = form_groups(config, seed=0, device=torch.device("cpu"))
    chunks = [Chunk(stage.index) for stage in layout.stages]
    forward = ForwardPipeline(chunks, lambda chunk, inputs: chunk(inputs), torch.float64)
    stages = layout.pipeline_size * layout.chunks

    @given(lanes=st.integers(0, 7), passes=st.integers(1, 4))
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    def check_equal_lanes(lanes: int, passes: int) -> None:
        results = list(forward.run(make_lane(number, passes) for number in range(lanes)))
        assert [number for number, _ in results] == list(range(lanes))
        for number, x in results:
            assert torch.equal(x, expected(number, passes, stages)[1])

    @given(passes=st.lists(st.integers(1, 5), max_size=7))
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    def check_unequal_lanes(passes: list[int]) -> None:
        results = dict(forward.run(make_lane(*lane) for lane in enumerate(passes)))
        for number, count in enumerate(passes):
            assert torch.equal(results[number], expected(number, count, stages)[1])

    check_equal_lanes()
    check_unequal_lanes()
    parallel_state.destroy_model_parallel()
