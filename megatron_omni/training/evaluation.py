"""Held-out prompts, drawn by the deterministic sampler and scored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_omni.config.schema import Config
from megatron_omni.data.prompts import PromptSet
from megatron_omni.parallel.state import Layout
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rollout.base import RolloutEngine, RolloutRequest
from megatron_omni.sampling.seeds import derive_seed
from megatron_omni.training.scoring import Scorer


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation saw."""

    metrics: dict[str, float]
    images: Tensor
    """[S, 3, H, W] uint8, of the first prompts."""
    prompts: list[str]
    """Of those pictures."""
    rewards: list[float | None]
    """Of those pictures; none where scoring failed."""
    heldout_rewards: list[float | None] | None
    """Of those pictures, by the second judge."""


class Evaluator:
    """Draws the same held-out prompts from the same seeds each time, so that pictures can be compared."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        engine: RolloutEngine,
        prompts: PromptSet,
        scorer: Scorer,
        heldout_scorer: Scorer | None,
    ):
        seed = config.training.seed
        self.engine = engine
        self.scorer = scorer
        self.heldout_scorer = heldout_scorer
        # Every rank draws equally many, so that collectives match. Rank 0 draws the first ones.
        per_rank = max(1, min(config.training.eval_samples, len(prompts)) // layout.data_size)
        self.pictures = min(config.logging.sample_images, per_rank)
        first = layout.data_rank * per_rank
        self.requests = [
            RolloutRequest(
                number, prompts.rows[number % len(prompts)].metadata, derive_seed(seed, "evaluation", number)
            )
            for number in range(first, first + per_rank)
        ]

    def run(self) -> Evaluation:
        """Evaluates the current weights; all ranks take part and get the same metrics."""
        scorers = [scorer for scorer in (self.scorer, self.heldout_scorer) if scorer]
        images, start = [], 0
        for trajectory in self.engine.generate(self.requests):
            answered = self.requests[start : start + len(trajectory)]
            start += len(trajectory)
            images.append(trajectory.images)
            for scorer in scorers:
                scorer.submit(trajectory, answered)
        rewards = self.scorer.collect()
        rewards.require_some()
        metrics = _statistics("eval/reward", rewards)
        if len(rewards.weights) > 1:
            metrics |= {f"eval/{name}_mean": mean for name, mean in rewards.means().items()}
        metrics["eval/exact_match"] = float((rewards.valid_values() == 1).float().mean())
        heldout = self.heldout_scorer.collect() if self.heldout_scorer else None
        if heldout:
            metrics |= _statistics("eval/heldout_reward", heldout)
        kept = slice(0, self.pictures)
        return Evaluation(
            metrics,
            torch.cat(images)[kept],
            [request.prompt for request in self.requests[kept]],
            _shown(rewards)[kept],
            _shown(heldout)[kept] if heldout else None,
        )


def _shown(rewards: GlobalRewards) -> list[float | None]:
    pairs = zip(rewards.values.tolist(), rewards.valid.tolist(), strict=True)
    return [value if valid else None for value, valid in pairs]


def _statistics(name: str, rewards: GlobalRewards) -> dict[str, float]:
    values = rewards.valid_values()
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else torch.zeros(())
    return {f"{name}_mean": float(values.mean()), f"{name}_sem": float(error)}
