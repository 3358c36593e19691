"""What an iteration gains from scoring samples while others are sampled and trained.

Two runs begin alike and take turns iteration by iteration, in one process with one thread: one scores as any
run does, the other waits for the scores of each micro-batch before it draws the next. The judge takes a given
share of the time that sampling takes, one picture after the other, and no processor: it sleeps in the scoring
process. All metrics but times are equal in both runs, bit by bit. The least possible time follows from what
sampling, updates and the judge take in the run that does not wait.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # The scoring process imports this file: what is slow to import is not for it.
    from megatron_omni.training.run import Run

ROOT = Path(__file__).parents[2]
SETTINGS = """--config examples/quickstart/flow_grpo_ocr.yaml --reward scoring:judge --eval-data=
    --rollout-batch-size 8 --n-samples-per-prompt 8 --micro-batch-size 8 --sde-window-size 2"""
QUICK = " --rollout-batch-size 2 --n-samples-per-prompt 2 --micro-batch-size 2 --num-inference-steps 3"
MODES = ("synchronous", "asynchronous")
PHASES = ("rollout", "reward_wait", "update", "iteration")
MEASURED = ("time/", "throughput/", "memory/")


def judge(images: np.ndarray, metadata: list[dict]) -> list[float]:
    """The brightness, after the time that the rows name."""
    time.sleep(sum(row.get("seconds", 0.0) for row in metadata))
    return (images.mean((1, 2, 3)) / 255).tolist()


@contextmanager
def open_runs(flags: list[str]) -> Iterator[dict[str, "Run"]]:
    """A run of each mode. `pretrain_rl.train` does one iteration of it and leaves `metrics`, but no files."""
    import torch
    from rich.console import Console

    from megatron_omni.checkpoint.distributed import Checkpointer
    from megatron_omni.config.parse import parse_config
    from megatron_omni.parallel import state
    from megatron_omni.training.build import build_parts
    from megatron_omni.training.progress import ProgressDisplay
    from megatron_omni.training.run import Run
    from megatron_omni.training.scoring import Scorer

    class SynchronousScorer(Scorer):
        def __init__(self, scorer: Scorer):
            vars(self).update(vars(scorer))

        def submit(self, trajectory, requests) -> None:
            super().submit(trajectory, requests)
            for reward in self._pending[-1].rewards:
                reward.result()

    class BenchmarkedRun(Run):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.writer, self.display = self, ProgressDisplay(1, console=Console(quiet=True))

        def iterations(self) -> Iterator[int]:
            yield self.iteration

        def log(self, iteration, metrics, pictures) -> None:
            self.metrics = metrics

        def finish(self) -> None:
            pass

    torch.set_num_threads(1)
    config = parse_config(flags)
    layout = state.initialize(config.parallel, config.training.seed)
    runs = {}
    with ExitStack() as stack:
        for mode in MODES:
            parts = stack.enter_context(closing(build_parts(config, layout)))
            if mode == "synchronous":
                parts = replace(parts, scorer=SynchronousScorer(parts.scorer))
            trained = parts.optimization
            checkpointer = Checkpointer(trained.chunks, trained.optimizer, trained.scheduler, config)
            runs[mode] = BenchmarkedRun(config, layout, parts, checkpointer)
        yield runs
    state.destroy()


def iterate(runs: dict[str, "Run"], updates: int, seconds: float) -> list[list[float]]:
    """One iteration of each run with a judge that takes `seconds` a picture: the times of `PHASES`."""
    from pretrain_rl import train

    for run in runs.values():
        run.config.algorithm.updates_per_iteration = updates
        for row in run.parts.prompts.rows:
            row.metadata["seconds"] = seconds
        train(run)
    one, other = (
        {name: value for name, value in run.metrics.items() if not name.startswith(MEASURED)}
        for run in runs.values()
    )
    assert one == other and one["train/grad_norm"] > 0, (one, other)
    return [[run.metrics[f"time/{phase}"] for phase in PHASES] for run in runs.values()]


def least(sampling: float, scoring: float, update: float, micro_batches: int, updates: int) -> float:
    """Seconds an iteration must take, from those of a micro-batch's sampling and scoring and of an update."""
    scored = [sampling + scoring]
    for drawn in range(2, micro_batches + 1):
        scored.append(max(scored[-1], drawn * sampling) + scoring)
    clock = micro_batches * sampling
    for step in range(1, updates + 1):
        clock = max(clock, scored[step * micro_batches // updates - 1]) + update
    return clock


def measure(runs: dict[str, "Run"], updates: list[int], shares: list[float], repetitions: int) -> None:
    config = runs["asynchronous"].config
    size = config.training.micro_batch_size
    micro_batches = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt // size
    iterate(runs, 1, 0.0)  # warms up
    picture = statistics.median(iterate(runs, 1, 0.0)[1][0] for _ in range(3)) / micro_batches / size
    cases = [(count, share) for count in updates for share in shares]
    spent = {case: [] for case in cases}
    for _ in range(repetitions):
        for count, share in cases:
            spent[count, share].append(iterate(runs, count, share * picture))
    print(f"{micro_batches} micro-batches of {size}, {1000 * picture:.1f} ms of sampling a picture")
    print(f"{'median seconds':26s}{MODES[0]:>27s}{MODES[1]:>36s}{'least':>9s}{'least, real':>18s}")
    names = "rollout update total rollout wait update total total ratio ratio".split()
    print(f"{'':26s}" + "".join(f"{name:>9s}" for name in names))
    for (count, share), times in spent.items():
        waiting, beside = np.median(times, axis=0)
        best = statistics.median(
            least(rollout / micro_batches, share * picture * size, update / count, micro_batches, count)
            for _, (rollout, _, update, _) in times
        )
        seconds = "".join(f"{number:9.3f}" for number in (*waiting[[0, 2, 3]], *beside, best))
        ratios = f"{best / waiting[3]:9.3f}   {beside[3] / waiting[3]:6.3f}"
        print(f"{f'updates {count}, judge {share:g}':26s}{seconds}{ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 2], help="optimizer steps an iteration")
    shares = [0, 0.25, 0.5, 1, 2]
    parser.add_argument("--shares", type=float, nargs="+", default=shares, help="judge's time / sampling's")
    parser.add_argument("--quick", action="store_true", help="tiny batches: to see that it runs")
    args = parser.parse_args()
    os.chdir(ROOT)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ", end="")
    with open_runs((SETTINGS + (QUICK if args.quick else "")).split()) as runs:
        measure(runs, args.updates, args.shares, args.repetitions)


if __name__ == "__main__":
    main()
