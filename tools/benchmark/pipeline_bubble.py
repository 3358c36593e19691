"""Share of the time in which pipeline stages wait, in an update and while sampling, beside theory.

Real processes run Megatron's schedules and `ForwardPipeline` on a tiny model. A stage's forward pass takes a
fixed time, in which its process sleeps after the little there is to compute, its backward pass twice as long:
so stages do not contend for cores. All else, messages above all, counts as waiting. In theory a stage of P
waits (P − 1) / (V·M + P − 1) of the time, with V chunks a process and M micro-batches or, while sampling,
passes of all micro-batches: `python tools/benchmark/pipeline_bubble.py`.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from megatron_omni.config.schema import Config, ParallelConfig
from megatron_omni.models.base import ImageSize
from megatron_omni.models.qwen_image.config import QwenImageConfig
from megatron_omni.parallel.pipeline import Lane
from megatron_omni.parallel.state import form_groups
from tools.benchmark.processes import run_on_processes
from tools.benchmark.workload import Workload, build_chunks, build_policy, build_updater

QWEN = QwenImageConfig(
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=1,
    joint_attention_dim=16,
    axes_dims_rope=(4, 6, 6),
)


@dataclass(frozen=True)
class Case:
    """Work for a pipeline: an update, or the sampling of each micro-batch in `passes` passes."""

    stages: int
    chunks: int
    micro_batches: int
    passes: int = 0
    """0: an update."""

    def __str__(self) -> str:
        layout = f"PP {self.stages}" + (f" × {self.chunks} virtual stages" if self.chunks > 1 else "")
        work = f"sampling, {self.passes} passes of" if self.passes else "update of"
        return f"{layout:25s}{work} {self.micro_batches} micro-batches"

    @property
    def theory(self) -> float:
        """Narayanan et al. (arXiv 2104.04473), section 2.2, as a share of the whole time."""
        units = self.micro_batches * (self.passes or 1)
        return (self.stages - 1) / (self.chunks * units + self.stages - 1)


CASES = (
    Case(2, 1, 4),
    Case(2, 1, 16),
    Case(2, 2, 4),
    Case(2, 2, 16),
    Case(2, 1, 4, passes=5),
    Case(2, 2, 4, passes=5),
    Case(4, 1, 8),
    Case(4, 1, 16),
    Case(4, 1, 8, passes=5),
    Case(4, 1, 9, passes=5),
)
QUICK = (Case(2, 1, 4), Case(2, 2, 4), Case(2, 1, 4, passes=2))


class Pace:
    """Makes calls take a fixed time, and notes when they began and ended."""

    def __init__(self):
        self.calls: list[tuple[float, float]] = []

    def __call__(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def paced(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            result = function(*args, **kwargs)
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            self.calls.append((start, time.monotonic()))
            return result

        return paced

    @contextmanager
    def schedules(self, forward: float) -> Iterator[None]:
        """Within the block Megatron's schedules go at this pace."""
        paced = {
            "forward_step": self(schedules.forward_step, forward),
            "backward_step": self(schedules.backward_step, 2 * forward),
        }
        with mock.patch.multiple(schedules, **paced):
            yield


def idle_shares(ranks: list[list[tuple[float, float]]]) -> list[float]:
    """Of each process, from its calls; the time goes from the first call of any to the last."""
    calls = [call for rank in ranks for call in rank]
    elapsed = max(end for _, end in calls) - min(start for start, _ in calls)
    return [1 - sum(end - start for start, end in rank) / elapsed for rank in ranks]


def measure(cases: list[Case], unit: float) -> list[list[tuple[float, float]]]:
    """This process's calls in each case. `unit`: seconds of a process's forward pass. Collective."""
    return [measure_case(case, unit / case.chunks) for case in cases]


def measure_case(case: Case, forward: float) -> list[tuple[float, float]]:
    parallel = ParallelConfig(
        pipeline_model_parallel_size=case.stages, num_virtual_stages_per_pipeline_rank=case.chunks
    )
    config = Config(parallel=parallel)
    layout = form_groups(parallel, seed=0, device=torch.device("cpu"))
    workload = Workload(QWEN, ImageSize(2, 2), ((2,),) * case.micro_batches)
    chunks = build_chunks(QWEN, config, layout)
    policy = build_policy(config, chunks)
    updater = build_updater(workload, config, layout, policy, torch.linspace(1, 0, 3))
    batches = workload.batches(layout)
    updater.step(batches[: case.stages])  # the first step sets things up

    pace = Pace()
    dist.barrier()
    if case.passes:
        policy.forward = pace(policy.forward, forward)

        def lane(inputs: Any) -> Lane[None]:
            for _ in range(case.passes):
                yield inputs

        list(policy.run(lane(updater._inputs(batch)) for batch in batches))
    else:
        with pace.schedules(forward):
            updater.step(batches)
    parallel_state.destroy_model_parallel()
    return pace.calls


def results(cases: tuple[Case, ...], unit: float) -> Iterator[tuple[Case, list[float]]]:
    """Each case with the idle share of every stage."""
    for stages, group in groupby(cases, key=lambda case: case.stages):
        alike = list(group)
        ranks = run_on_processes(measure, stages, alike, unit)
        yield from zip(alike, map(idle_shares, map(list, zip(*ranks, strict=True))), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a stage's forward pass")
    parser.add_argument("--quick", action="store_true", help="few and short cases: to see that it runs")
    args = parser.parse_args()
    print(f"{'idle share':70s} theory  measured   by stage")
    cases, unit = (QUICK, 0.01) if args.quick else (CASES, args.unit)
    for case, shares in results(cases, unit):
        mean = sum(shares) / len(shares)
        print(
            f"{case!s:70s} {case.theory:6.3f} {mean:9.3f}   " + " ".join(f"{s:.3f}" for s in shares),
            flush=True,
        )


if __name__ == "__main__":
    main()
