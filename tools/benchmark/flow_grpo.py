"""Time of a whole Flow-GRPO iteration against the straightforward loop on diffusers' pipeline.

Same model, prompts, batch, steps and reward: those of the quickstart, once without and once with guidance.
Every contestant has processes of its own, which wait while another is measured; repetitions alternate
between all of them. First, one iteration with the same noise shows that all compute the same.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from diffusers_loop import DiffusersLoop, Outcome, Sample

from megatron_omni.config.parse import parse_config
from megatron_omni.config.schema import Config

ROOT = Path(__file__).parents[2]
PHASES = ("rollout", "reward", "update")
QUICK = "--rollout-batch-size 4 --n-samples-per-prompt 2 --micro-batch-size 2 --num-inference-steps 3".split()


@dataclass(frozen=True)
class Command:
    """One iteration to do."""

    iteration: int
    threads: int
    updates: int
    seeded: bool
    """Draw the engine's noise in the straightforward loop too."""


@dataclass(frozen=True)
class Contestant:
    """A way to run the iteration."""

    engine: bool
    processes: int
    threads: int

    def __str__(self) -> str:
        name = "megatron_omni" if self.engine else "diffusers loop"
        scoring = f"{self.processes} scoring" if self.engine else "scoring thread"
        return f"{name}, processes {self.processes}, threads {self.threads}, {scoring}"


def contestants(threads: list[int]) -> list[Contestant]:
    """One process of each kind at every number of threads, and the engine on two processes."""
    single = [Contestant(engine, 1, count) for engine in (False, True) for count in threads]
    return [*single, Contestant(engine=True, processes=2, threads=1)]


def serve_engine(config: Config, connection: Connection) -> None:
    """Iterations of `pretrain_rl.train`, with everything but what it writes to disk."""
    from megatron_omni.checkpoint.distributed import Checkpointer
    from megatron_omni.parallel import state
    from megatron_omni.rewards.combination import GlobalRewards
    from megatron_omni.training.build import build_parts
    from megatron_omni.training.run import Run
    from pretrain_rl import train

    class BenchmarkedRun(Run):
        def start(self) -> None:
            connection.send("ready")

        def iterations(self) -> Iterator[int]:
            while command := connection.recv():
                torch.set_num_threads(command.threads)
                self.config.algorithm.updates_per_iteration = command.updates
                yield command.iteration

        def finish_iteration(self, iteration, trajectory) -> None:
            seconds = self.timings.take()
            phases = [seconds[f"time/{phase}"] for phase in ("rollout", "reward_wait", "update")]
            norm = self.updates[0].means["train/grad_norm"]
            connection.send(
                Outcome(*phases, float(GlobalRewards.concatenate(self.rewards).values.mean()), norm)
            )

        def finish(self) -> None:
            pass

    layout = state.initialize(config.parallel, config.training.seed)
    with closing(build_parts(config, layout)) as parts:
        optimization = parts.optimization
        checkpointer = Checkpointer(
            optimization.chunks, optimization.optimizer, optimization.scheduler, config
        )
        train(BenchmarkedRun(config, layout, parts, checkpointer))
    state.destroy()


def serve_diffusers(config: Config, connection: Connection) -> None:
    """Iterations of the straightforward loop, on the prompts and trained steps that the engine takes."""
    from megatron_omni.algorithms.flow_grpo import FlowGrpo
    from megatron_omni.data.prompts import PromptSet
    from megatron_omni.sampling.seeds import generator

    loop = DiffusersLoop(config)
    algorithm = FlowGrpo(config, loop.sigmas)
    prompts = PromptSet.from_file(config.data.train_data)
    connection.send("ready")
    while command := connection.recv():
        torch.set_num_threads(command.threads)
        batch = prompts.batch(command.iteration, config.rollout.rollout_batch_size, config.training.seed)
        requests = algorithm.requests(command.iteration, [row.metadata for row in batch], first=0)

        def noise(rows: slice, step: int | None, requests=requests) -> torch.Tensor:
            height, width = loop.grid[1:]
            drawn = []
            for request in requests[rows]:
                if step is None:
                    random = generator(request.seed, "initial")
                    start = torch.randn(1, 1, 16, 2 * height, 2 * width, generator=random)
                    drawn.append(loop.pipe._pack_latents(start, 1, 16, 2 * height, 2 * width)[0])
                else:
                    random = generator(request.seed, "step", step)
                    drawn.append(torch.randn(height * width, 64, generator=random))
            return torch.stack(drawn)

        samples = [Sample(request.prompt, request.trained) for request in requests]
        connection.send(loop.iterate(samples, command.updates, noise if command.seeded else None))


class World:
    """The processes of one contestant."""

    def __init__(self, serve, config: Config, processes: int):
        context = get_context("spawn")
        # A free port, held from here on.
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.connections = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            process = context.Process(target=in_world, args=(environment, serve, config, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def receive(self) -> list:
        return [connection.recv() for connection in self.connections]

    def iterate(self, command: Command) -> tuple[float, list[Outcome]]:
        """Wall time of one iteration and what its processes report."""
        start = time.perf_counter()
        for connection in self.connections:
            connection.send(command)
        outcomes = self.receive()
        return time.perf_counter() - start, outcomes

    def close(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            if process.is_alive():
                connection.send(None)
        for process in self.processes:
            process.join()


def in_world(environment: dict[str, str], serve, config: Config, connection: Connection) -> None:
    os.environ.update(environment)
    serve(config, connection)


@contextmanager
def worlds(config: Config, competing: list[Contestant]) -> Iterator[dict[tuple[bool, int], World]]:
    """By (engine, processes), ready to iterate."""
    with ExitStack() as stack:
        opened = {}
        for key in dict.fromkeys((each.engine, each.processes) for each in competing):
            serve = serve_engine if key[0] else serve_diffusers
            opened[key] = stack.enter_context(closing(World(serve, config, key[1])))
        for world in opened.values():
            world.receive()
        yield opened


def check_agreement(opened: dict[tuple[bool, int], World]) -> None:
    """The first iteration, from the same weights and noise, has the same reward and gradient everywhere.

    One update, so that the gradient is over the same samples whichever process draws them.
    """
    command = Command(iteration=0, threads=1, updates=1, seeded=True)
    expected, *others = (world.iterate(command)[1][0] for world in opened.values())
    print(f"  same noise: reward {expected.reward_mean:.6f}, gradient norm {expected.grad_norm:.6f}", end="")
    for other in others:
        print(f" | {other.reward_mean:.6f}, {other.grad_norm:.6f}", end="")
        assert abs(other.reward_mean - expected.reward_mean) < 0.005
        assert abs(other.grad_norm / expected.grad_norm - 1) < 0.02
    print(flush=True)


def measure(config: Config, competing: list[Contestant], repetitions: int) -> None:
    updates = config.algorithm.updates_per_iteration
    rows: dict[Contestant, list[list[float]]] = {contestant: [] for contestant in competing}
    with worlds(config, competing) as opened:
        check_agreement(opened)
        for repetition in range(repetitions):
            for contestant in competing:
                command = Command(repetition + 1, contestant.threads, updates, seeded=False)
                total, outcomes = opened[contestant.engine, contestant.processes].iterate(command)
                phases = [max(getattr(outcome, phase) for outcome in outcomes) for phase in PHASES]
                rows[contestant].append([*phases, total])
    print_table(rows)


def print_table(rows: dict[Contestant, list[list[float]]]) -> None:
    """Median seconds, and each total over that of the diffusers loop at its better number of threads."""
    medians = {who: [statistics.median(column) for column in zip(*rows[who], strict=True)] for who in rows}
    baseline = min(medians[who][-1] for who in rows if not who.engine)
    print(f"  {'seconds':62s}" + "".join(f"{name:>9s}" for name in (*PHASES, "total", "ratio")))
    for who, seconds in medians.items():
        numbers = "".join(f"{value:9.3f}" for value in (*seconds, seconds[-1] / baseline))
        print(f"  {who!s:62s}{numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "examples/quickstart/flow_grpo_ocr.yaml"))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a single process")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 4.0], help="scales; 1 is off")
    parser.add_argument("--quick", action="store_true", help="tiny batches: to see that it runs")
    args = parser.parse_args()
    os.chdir(ROOT)
    for scale in args.guidance:
        flags = ["--config", args.config, "--true-cfg-scale", str(scale), "--eval-data", ""]
        config = parse_config(flags + (QUICK if args.quick else []))
        rollout = config.rollout
        print(
            f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples, "
            f"{rollout.height} × {rollout.width} pixels, {rollout.num_inference_steps} steps, micro-batch "
            f"{config.training.micro_batch_size}, {config.algorithm.updates_per_iteration} updates, "
            f"guidance {scale:g}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
            flush=True,
        )
        measure(config, contestants(args.threads), args.repetitions)


if __name__ == "__main__":
    main()
