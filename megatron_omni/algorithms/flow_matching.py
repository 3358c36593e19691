"""Supervised flow matching (arXiv 2210.02747): pre-training and fine-tuning on pictures."""

from typing import Any

import torch
from torch import Tensor

from megatron_omni.algorithms.base import Advantages, Loss, TrainingBatch, cut, weighted_mean
from megatron_omni.config.schema import Config
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rollout.base import RolloutRequest, Trajectory
from megatron_omni.sampling.seeds import derive_seed, generator


class FlowMatching:
    """Mean squared error of the velocity at logit-normal times (arXiv 2403.03206, section 3.1)."""

    uses_rewards = False
    needs_all_rewards = False
    has_ratio = False
    needs_reference = False

    def __init__(self, config: Config, sigmas: Tensor):
        self.copies = config.rollout.n_samples_per_prompt
        self.seed = config.training.seed

    def requests(self, iteration: int, rows: list[dict[str, Any]], first: int) -> list[RolloutRequest]:
        return [
            RolloutRequest(number, row, derive_seed(self.seed, "sample", iteration, number, copy))
            for number, row in enumerate(rows, start=first)
            for copy in range(self.copies)
        ]

    def advantages(self, rewards: GlobalRewards) -> Advantages:
        return Advantages.uniform(len(rewards.prompt_id))

    def micro_batches(
        self, trajectory: Trajectory, advantages: Advantages, size: int, iteration: int
    ) -> list[TrainingBatch]:
        def batch(rows: slice) -> TrainingBatch:
            clean = trajectory.clean_latents[rows]
            noise, sigma = [], []
            for seed in trajectory.seeds[rows].tolist():
                random = generator(seed, "flow matching")
                sigma.append(torch.randn((), generator=random).sigmoid())
                noise.append(torch.randn(clean.shape[1:], generator=random))
            noise, sigma = torch.stack(noise).to(clean), torch.stack(sigma).to(clean)
            t = sigma[:, None, None]
            return TrainingBatch(
                prompts=trajectory.prompts[rows],
                latents=(1 - t) * clean + t * noise,
                sigma=sigma,
                weights=advantages.weights[rows],
                target=noise - clean,
            )

        return [batch(rows) for rows in cut(len(trajectory), size)]

    def loss(self, batch: TrainingBatch, velocity: Tensor) -> Loss:
        error = ((velocity - batch.target) ** 2).flatten(1).mean(1)
        loss = weighted_mean(error, batch.weights)
        return Loss(loss, {"train/loss": loss})
