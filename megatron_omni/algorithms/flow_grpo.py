"""Flow-GRPO (arXiv 2505.05470) and its fast variant with a window of stochastic steps."""

from random import Random
from typing import Any

from torch import Tensor

from megatron_omni.algorithms.advantages import group_advantages
from megatron_omni.algorithms.base import Advantages, Loss, TrainingBatch, cut, weighted_mean
from megatron_omni.algorithms.losses import clipped_policy_loss, gaussian_kl
from megatron_omni.config.schema import Config
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rollout.base import RolloutRequest, Trajectory
from megatron_omni.sampling.seeds import derive_seed
from megatron_omni.sampling.step import Step, stochastic_step
from megatron_omni.sampling.windows import draw_trained, draw_window


class FlowGrpo:
    """Clipped policy gradient over the stochastic steps of a flow sampler."""

    uses_rewards = True
    has_ratio = True

    def __init__(self, config: Config, sigmas: Tensor):
        """sigmas: [steps + 1], the sampler's table."""
        self.config = config.algorithm
        self.combination = config.reward.reward_combination
        self.rollout = config.rollout
        self.seed = config.training.seed
        self.sigma_max = sigmas[1].item()
        self.needs_all_rewards = self.config.global_std
        self.needs_reference = self.config.kl_coefficient > 0

    def requests(self, iteration: int, rows: list[dict[str, Any]], first: int) -> list[RolloutRequest]:
        requests = []
        for prompt_id, metadata in enumerate(rows, start=first):
            random = Random(derive_seed(self.seed, "window", iteration, prompt_id))
            window = draw_window(
                self.rollout.num_inference_steps,
                self.rollout.sde_window_size,
                self.rollout.sde_window_range,
                random,
            )
            trained = draw_trained(window, self.rollout.timestep_fraction, random)
            shared = derive_seed(self.seed, "group", iteration, prompt_id)
            noise_seed = shared if self.rollout.share_initial_noise else None
            for member in range(self.rollout.n_samples_per_prompt):
                seed = derive_seed(self.seed, "sample", iteration, prompt_id, member)
                requests.append(RolloutRequest(prompt_id, metadata, seed, window, trained, noise_seed))
        return requests

    def advantages(self, rewards: GlobalRewards) -> Advantages:
        return group_advantages(
            rewards,
            self.combination,
            global_std=self.config.global_std,
            clip_max=self.config.adv_clip_max,
        )

    def micro_batches(
        self, trajectory: Trajectory, advantages: Advantages, size: int, iteration: int
    ) -> list[TrainingBatch]:
        old = trajectory.old_log_probs

        def batch(rows: slice, slot: int) -> TrainingBatch:
            return TrainingBatch(
                prompts=trajectory.prompts[rows],
                latents=trajectory.latents[rows, slot],
                sigma=trajectory.sigmas[rows, slot],
                weights=advantages.weights[rows],
                advantages=advantages.values[rows],
                next_latents=trajectory.next_latents[rows, slot],
                next_sigma=trajectory.next_sigmas[rows, slot],
                log_prob=trajectory.log_probs[rows, slot],
                old_log_prob=None if old is None else old[rows, slot],
            )

        slots = range(trajectory.sigmas.shape[1])
        return [batch(rows, slot) for rows in cut(len(trajectory), size) for slot in slots]

    def log_prob(self, batch: TrainingBatch, velocity: Tensor) -> Tensor:
        return self._replay(batch, velocity).log_prob

    def loss(self, batch: TrainingBatch, velocity: Tensor) -> Loss:
        step = self._replay(batch, velocity)
        current = step.log_prob.detach()
        old = current if batch.old_log_prob is None else batch.old_log_prob
        ratio = (step.log_prob - old).exp()
        policy = clipped_policy_loss(ratio, batch.advantages, self.config.clip_range)
        loss = weighted_mean(policy.values, batch.weights)
        means = {"train/clip_fraction": weighted_mean(policy.clipped.float(), batch.weights)}
        if self.needs_reference:
            reference = self._replay(batch, batch.reference_velocity)
            kl = weighted_mean(gaussian_kl(step.mean, reference.mean, step.std), batch.weights)
            loss = loss + self.config.kl_coefficient * kl
            means["train/kl"] = kl
        difference = current - batch.log_prob
        deviation = difference.abs()
        return Loss(
            loss,
            means | {"train/loss": loss, "consistency/log_prob_abs_diff_mean": deviation.mean()},
            {
                "consistency/log_prob_abs_diff_max": deviation.max(),
                "consistency/ratio_abs_dev_max": (difference.exp() - 1).abs().max(),
            },
        )

    def _replay(self, batch: TrainingBatch, velocity: Tensor) -> Step:
        return stochastic_step(
            batch.latents,
            velocity,
            batch.sigma,
            batch.next_sigma,
            kind=self.rollout.sde_type,
            noise_level=self.rollout.noise_level,
            sigma_max=self.sigma_max,
            next_sample=batch.next_latents,
        )
