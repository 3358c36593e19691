"""A run: what `pretrain_rl.py` moves forward, iteration by iteration."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from megatron_omni.algorithms.base import Advantages
from megatron_omni.checkpoint.adapter import save_adapter
from megatron_omni.checkpoint.collective import on_rank_0
from megatron_omni.checkpoint.distributed import Checkpointer, Resumed
from megatron_omni.checkpoint.folder import latest_checkpoint
from megatron_omni.checkpoint.hf import export_hf
from megatron_omni.checkpoint.replace import replace_text
from megatron_omni.config.io import to_yaml
from megatron_omni.config.schema import Config
from megatron_omni.config.validate import validate
from megatron_omni.data.sampler import shard
from megatron_omni.errors import UserError
from megatron_omni.parallel import state
from megatron_omni.parallel.peers import naming_lost_ranks
from megatron_omni.platforms import current_platform
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rollout.base import RolloutRequest, Trajectory
from megatron_omni.training.build import Parts, build_parts
from megatron_omni.training.evaluation import Evaluation
from megatron_omni.training.memory import GIB, MemoryEstimate
from megatron_omni.training.metrics import MetricsWriter
from megatron_omni.training.progress import ProgressDisplay
from megatron_omni.training.report import write_report
from megatron_omni.training.run_log import LAYOUT_FILE
from megatron_omni.training.samples import SampleCaption, sample_folder, save_samples
from megatron_omni.training.timing import Timings
from megatron_omni.training.update import UpdateResult


class Run:
    """The state of a run on this process, and the steps that an iteration is made of."""

    def __init__(self, config: Config, layout: state.Layout, parts: Parts, checkpointer: Checkpointer):
        self.config = config
        self.layout = layout
        self.parts = parts
        self.algorithm = parts.algorithm
        self.engine = parts.engine
        self.checkpointer = checkpointer
        self.folder = run_folder(config)
        self.checkpoints = checkpoint_folder(config)
        self.platform = current_platform()
        self.timings = Timings(self.platform.synchronize)
        self.resumed = self._resume()
        self.iteration = self.resumed.iteration if self.resumed else 0
        self.first_iteration = self.iteration + 1
        self.saved_iteration = self.iteration
        self.memory = _largest(parts.memory)
        self.eval_reward: float | None = None
        """Of the current weights, where they have been evaluated."""
        self.rewards: list[GlobalRewards] = []
        self.zero_fractions: list[float] = []
        self.updates: list[UpdateResult] = []
        """Of this iteration."""

    def iterations(self) -> Iterator[int]:
        """The iterations that are still to do."""
        yield from range(self.iteration, self.config.training.train_iters)

    def next_prompts(self, iteration: int) -> tuple[list[dict[str, Any]], int]:
        """This process's rows of the iteration, and the number of the first."""
        self.started = time.perf_counter()
        size = self.config.rollout.rollout_batch_size
        batch = self.parts.prompts.batch(iteration, size, self.config.training.seed)
        rows = shard(batch, self.layout.data_rank, self.layout.data_size)
        return [row.metadata for row in rows], self.layout.data_rank * len(rows)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Books the time of the block under `time/<name>`."""
        return self.timings.phase(name)

    def draw(self, requests: list[RolloutRequest]) -> Trajectory:
        """The requests' samples. Each finished micro-batch goes to the reward while the next is drawn."""
        parts, start = [], 0
        for trajectory in self.engine.generate(requests):
            if self.algorithm.uses_rewards:
                self.parts.scorer.submit(trajectory, requests[start : start + len(trajectory)])
            start += len(trajectory)
            parts.append(trajectory)
        return Trajectory.concatenate(parts)

    def scored(self, trajectory: Trajectory) -> Iterator[tuple[Trajectory, Advantages]]:
        """The samples of each optimizer step with their advantages, as soon as rewards for these are there.

        So the samples of later steps are scored while earlier ones train. A step is left out if none of its
        samples has a reward.
        """
        steps, group = self.config.algorithm.updates_per_iteration, self.config.rollout.n_samples_per_prompt
        size = len(trajectory) // steps
        all_at_once = self.algorithm.needs_all_rewards or size % group  # a group may be in two steps
        scored = len(trajectory) if all_at_once else size
        samples = self._samples_of_steps(trajectory, size)
        self.rewards, self.zero_fractions, self.updates = [], [], []
        for start in range(0, len(trajectory), scored):
            with self.phase("reward_wait"):
                rewards = self._rewards(trajectory.rows(start, start + scored))
            self.rewards.append(rewards)
            if not rewards.valid.any():
                continue
            advantages = self.algorithm.advantages(rewards)
            self.zero_fractions.append(advantages.zero_fraction)
            first = self.layout.data_rank * scored - start
            for begin in range(start, start + scored, size):
                own = advantages.rows(first + begin, first + begin + size)
                yield samples[begin // size], own

    def update(self, trajectory: Trajectory, advantages: Advantages, iteration: int) -> None:
        """One optimizer step."""
        size = self.config.training.micro_batch_size
        batches = self.algorithm.micro_batches(trajectory, advantages, size, iteration)
        self.updates.append(self.parts.updater.step(batches))

    def start(self) -> None:
        """Evaluates the initial weights."""
        if self.parts.evaluator:
            evaluation = self._evaluate(0)
            self.writer.log(0, evaluation.metrics, {"eval/samples": evaluation.images})
            self.display.message(f"before training: {_scores(evaluation)}")

    def finish_iteration(self, iteration: int, trajectory: Trajectory) -> None:
        """Reports iteration number `iteration` (from 1), and evaluates and saves where these are due.

        Raises `UserError` if no sample has a reward.
        """
        seconds = time.perf_counter() - self.started
        rewards = GlobalRewards.concatenate(self.rewards)
        rewards.require_some()
        metrics = self._reduce(self.updates)
        if self.algorithm.uses_rewards:
            metrics |= {
                "train/reward_mean": float(rewards.valid_values().mean()),
                "train/reward_std": float(rewards.valid_values().std(correction=0)),
                "train/advantage_zero_fraction": fmean(self.zero_fractions),
                "reward/failed": float(rewards.failed),
            }
            if len(rewards.weights) > 1:
                metrics |= {f"reward/{name}_mean": mean for name, mean in rewards.means().items()}
                metrics |= {f"reward/{name}_failed": float(n) for name, n in rewards.failures().items()}
            if rewards.error:
                self.display.message(
                    f"{rewards.failed} samples have no reward; the last error: {rewards.error}"
                )
        metrics |= self.timings.take() | {
            "time/iteration": seconds,
            "throughput/samples_per_second": len(rewards.prompt_id) / seconds,
            "consistency/weight_version": float(trajectory.weight_version),
            "memory/peak_gib": self._peak_memory(),
            "memory/estimated_gib": self.memory.total / GIB,
        }
        metrics |= self.layout.reduce_data_parallel(self.engine.metrics(), dist.ReduceOp.SUM)
        self._check_finite(iteration, metrics)
        last = iteration == self.config.training.train_iters
        pictures = {}
        if self.parts.evaluator and (last or iteration % self.config.training.eval_interval == 0):
            evaluation = self._evaluate(iteration)
            metrics |= evaluation.metrics
            pictures = {"eval/samples": evaluation.images}
        self.eval_reward = metrics.get("eval/reward_mean")
        self.iteration = iteration
        self.writer.log(iteration, metrics, pictures)
        self.display.update(iteration, metrics)
        if iteration == self.first_iteration:
            self.display.message(
                f"memory: {metrics['memory/peak_gib']:.3g} GiB at most so far ({self.platform.memory}), "
                f"{metrics['memory/estimated_gib']:.3g} GiB estimated"
            )
        if pictures and not last:
            self._write_report()
        self.checkpointer.poll()
        interval = self.config.checkpoint.save_interval
        if last or (interval and iteration % interval == 0):
            self._save()

    def finish(self) -> None:
        """The last checkpoint, the export and the report."""
        if self.saved_iteration < self.iteration:
            self._save()
        self.checkpointer.finish()
        if self.config.checkpoint.export_hf:
            self._export_at_end()
        self._write_report()
        self.display.message(f"checkpoint: {self.checkpoints}")
        self.display.message(f"report: {self.folder / 'report.html'}")

    @contextmanager
    def opened(self) -> Iterator["Run"]:
        """The run with its outputs open."""
        resumed = self.iteration or None
        loaded = self.resumed.name if self.resumed else None
        on_rank_0(lambda: _prepare_folder(self.config, resumed, loaded, self._describe()))
        self.writer = MetricsWriter(self.folder, self.config, resumed)
        self.display = ProgressDisplay(self.config.training.train_iters, self.iteration)
        try:
            with self.display:
                self.display.message(self._describe())
                self.display.message(f"memory of the largest process, estimated: {self.memory}")
                if self.resumed:
                    self.display.message(_origin(self.resumed, self.config.checkpoint.load))
                yield self
        finally:
            self.writer.close()
            self.checkpointer.close()

    def _resume(self) -> Resumed | None:
        if not self.config.checkpoint.load:
            return None
        resumed = self.checkpointer.load(Path(self.config.checkpoint.load))
        if resumed:
            self.engine.update_weights(version=resumed.iteration)
        return resumed

    def _save(self) -> None:
        with self.phase("save"):
            self.parts.optimization.gather_parameters()
            consumed = self.iteration * self.config.rollout.rollout_batch_size
            self.checkpointer.save(
                self.checkpoints,
                self.iteration,
                {"consumed_prompts": consumed},
                self.eval_reward,
                self._export_trained if self.config.checkpoint.save_hf else None,
            )
        self.saved_iteration = self.iteration

    def _export_at_end(self) -> None:
        """The model in Hugging Face form; with LoRA also the adapters."""
        model, adapter = self.folder / "hf", self.folder / "adapter"
        self._export_model(model)
        self.display.message(f"model: {model}")
        if self.config.lora.lora_rank:
            self._export_trained(adapter)
            self.display.message(f"adapter: {adapter}")

    def _export_trained(self, target: Path) -> None:
        """What is trained, in Hugging Face form: the adapters, or the whole model."""
        if not self.config.lora.lora_rank:
            self._export_model(target)
            return
        optimization, source = self.parts.optimization, Path(self.config.model.model_path)
        optimization.gather_parameters()
        save_adapter(optimization.modules, self.parts.family.mapping, self.config.lora, source, target)

    def _export_model(self, target: Path) -> None:
        """The whole model in Hugging Face form, with its adapters merged into it."""
        optimization, family = self.parts.optimization, self.parts.family
        source = Path(self.config.model.model_path)
        optimization.gather_parameters()
        export_hf(optimization.modules, family.mapping, source, target, family.transformer_folder)

    def _samples_of_steps(self, trajectory: Trajectory, size: int) -> list[Trajectory]:
        """`size` samples each, with old log-probabilities under the current weights if the engine gave none.

        The first step computes its own as it trains.
        """
        samples = [trajectory.rows(begin, begin + size) for begin in range(0, len(trajectory), size)]
        if self.algorithm.has_ratio and trajectory.old_log_probs is None and len(samples) > 1:
            later = trajectory.rows(size, len(trajectory))
            with self.phase("log_probs"):
                old = self.parts.updater.log_probs(later, self.config.training.micro_batch_size)
            for step, log_probs in zip(samples[1:], old.split(size), strict=True):
                step.old_log_probs = log_probs
        return samples

    def _rewards(self, trajectory: Trajectory) -> GlobalRewards:
        """Of these samples, the next ones that were submitted, of all processes."""
        if self.algorithm.uses_rewards:
            return self.parts.scorer.collect(len(trajectory))
        prompt_id = self.layout.gather_data_parallel(trajectory.prompt_id)
        none = torch.zeros(0, len(prompt_id))
        return GlobalRewards({}, none, none.bool(), prompt_id)

    def _evaluate(self, iteration: int) -> Evaluation:
        start = time.perf_counter()
        evaluation = self.parts.evaluator.run()
        evaluation.metrics["time/eval"] = time.perf_counter() - start
        if self.layout.rank == 0:
            heldout = evaluation.heldout_rewards or [None] * len(evaluation.prompts)
            captions = [
                SampleCaption(prompt, reward, second)
                for prompt, reward, second in zip(
                    evaluation.prompts, evaluation.rewards, heldout, strict=True
                )
            ]
            save_samples(sample_folder(self.folder, iteration), evaluation.images, captions)
        return evaluation

    def _reduce(self, updates: list[UpdateResult]) -> dict[str, float]:
        """Over updates and processes. Consistency is that of the first update, whose weights sampled."""
        first = {name: value for name, value in updates[0].means.items() if name.startswith("consistency/")}
        means = {
            name: sum(update.means[name] for update in updates) / len(updates) for name in updates[0].means
        }
        return self.layout.reduce_data_parallel(means | first, dist.ReduceOp.AVG) | (
            self.layout.reduce_data_parallel(updates[0].maxima, dist.ReduceOp.MAX)
        )

    def _peak_memory(self) -> float:
        """The largest process's, in GiB."""
        peak = torch.tensor(self.platform.peak_memory_gib(), device=self.layout.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return peak.item()

    def _check_finite(self, iteration: int, metrics: dict[str, float]) -> None:
        for name in ("train/loss", "train/grad_norm"):
            if not math.isfinite(metrics[name]):
                raise UserError(
                    f"{name} is {metrics[name]} in iteration {iteration}: training has diverged. Lower --lr "
                    f"and resume with --load {self.checkpoints}, whose last checkpoint is untouched."
                )

    def _write_report(self) -> None:
        if self.layout.rank == 0:
            write_report(self.folder)

    def _describe(self) -> str:
        """What really runs, on one line."""
        chunks = self.parts.optimization.modules
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        size = f"{sum(parameter.numel() for parameter in parameters) / 1e6:.1f} M parameters"
        if self.config.lora.lora_rank:
            size += f" ({trained / 1e6:.2f} M of them trained: LoRA of rank {self.config.lora.lora_rank})"
        dtype = "bfloat16" if self.config.model.bf16 else "float32"
        facts = [
            f"{self.config.algorithm.algorithm} on {self.config.model.model}",
            f"{size} a process in {dtype}",
            chunks[0].implementation,
            str(self.layout),
        ]
        return " · ".join(facts)


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Builds a run, resumes it where `checkpoint.load` says so, and closes it at the end.

    Raises `UserError` for settings and input that cannot work, before anything is trained.
    """
    validate(config, int(os.environ.get("WORLD_SIZE", "1")))
    layout = state.initialize(config.parallel, config.training.seed)
    with naming_lost_ranks(), closing(build_parts(config, layout)) as parts:
        optimization = parts.optimization
        checkpointer = Checkpointer(
            optimization.chunks, optimization.optimizer, optimization.scheduler, config
        )
        with Run(config, layout, parts, checkpointer).opened() as run:
            yield run
    state.destroy()


def run_folder(config: Config) -> Path:
    return Path(config.logging.output_dir) / config.logging.run_name


def checkpoint_folder(config: Config) -> Path:
    return Path(config.checkpoint.save) if config.checkpoint.save else run_folder(config) / "checkpoints"


def _prepare_folder(config: Config, resumed: int | None, loaded: str | None, layout: str) -> None:
    """The run's folder with its settings. What an earlier run left is moved aside, not overwritten.

    `resumed`: the iteration a run goes on from; `loaded`: the checkpoint it or a new run began with.
    """
    folder, checkpoints = run_folder(config), checkpoint_folder(config)
    if resumed is None and folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        folder.rename(aside)
        print(f"{folder} held an earlier run: it is now {aside}")
    if checkpoints.is_dir() and latest_checkpoint(checkpoints) not in (None, loaded):
        raise UserError(
            f"{checkpoints} holds checkpoints of another run: resume it with --load, or set another --save."
        )
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "config.yaml", to_yaml(config))
    replace_text(folder / LAYOUT_FILE, layout)


def _largest(memory: MemoryEstimate) -> MemoryEstimate:
    """That of the process that needs most. Collective."""
    estimates = [memory] * dist.get_world_size()
    dist.all_gather_object(estimates, memory)
    return max(estimates, key=lambda each: each.total)


def _origin(resumed: Resumed, folder: str) -> str:
    if resumed.iteration == 0:
        return f"started from the weights in {Path(folder) / resumed.name}"
    generators = "" if resumed.same_layout else "; the layout is another, so random generators start anew"
    return f"resumed after iteration {resumed.iteration}{generators}"


def _scores(evaluation: Evaluation) -> str:
    metrics = evaluation.metrics
    text = f"held-out reward {metrics['eval/reward_mean']:.3f} ± {metrics['eval/reward_sem']:.3f}"
    if "eval/heldout_reward_mean" in metrics:
        text += f", second judge {metrics['eval/heldout_reward_mean']:.3f}"
    return text
