"""Rollout in place: the training weights sample, forward only."""

from collections.abc import Iterable, Iterator

import torch

from megatron_omni.parallel.pipeline import Lane
from megatron_omni.rollout.base import MicroBatchEngine, RolloutRequest, Trajectory
from megatron_omni.rollout.parts import EngineParts
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.sampling.sampler import Sampler
from megatron_omni.sampling.seeds import generator


class MegatronEngine(MicroBatchEngine):
    """Samples with the very parameters that are being trained, so there is no weight to synchronise.

    Requests are cut into micro-batches of `micro_batch_size`, as training cuts their trajectories: then
    every replayed log-probability is the same number, bit by bit.
    """

    def __init__(self, parts: EngineParts):
        super().__init__(parts.config.training.micro_batch_size)
        rollout, pipeline = parts.config.rollout, parts.pipeline
        self.policy = parts.policy
        self.pipeline = pipeline
        self.embeddings = parts.embeddings
        self.device = parts.layout.device
        self.negative_prompt = rollout.negative_prompt
        self.size = pipeline.latent_size(rollout.height, rollout.width)
        self.sampler = Sampler(
            kind=rollout.sde_type,
            noise_level=rollout.noise_level,
            sigmas=pipeline.sigmas(rollout.num_inference_steps, self.size),
            size=self.size,
            guidance=Guidance(rollout.true_cfg_scale, parts.config.model.batch_invariant),
        )

    def draw(self, micro_batches: Iterable[list[RolloutRequest]]) -> Iterator[Trajectory]:
        return self.policy.run(map(self._lane, micro_batches))

    def _lane(self, requests: list[RolloutRequest]) -> Lane[Trajectory]:
        prompts = [request.prompt for request in requests]
        *embeddings, negative = self.embeddings([*prompts, self.negative_prompt])
        noise = [
            self.pipeline.initial_noise(generator(r.initial_seed, "initial"), self.size) for r in requests
        ]
        path = yield from self.sampler.sample(
            torch.stack(noise).to(self.device),
            embeddings,
            negative,
            windows=[request.window for request in requests],
            recorded=[request.trained for request in requests],
            seeds=[request.seed for request in requests],
            record_means=requests[0].record_means,
        )
        return Trajectory(
            prompts=prompts,
            prompt_id=torch.tensor([request.prompt_id for request in requests]),
            seeds=torch.tensor([request.seed for request in requests]),
            clean_latents=path.clean_latents,
            latents=path.latents,
            next_latents=path.next_latents,
            sigmas=self.sampler.sigmas[path.steps].to(self.device),
            next_sigmas=self.sampler.sigmas[path.steps + 1].to(self.device),
            log_probs=path.log_probs,
            images=self.pipeline.decode_latents(path.clean_latents, self.size).cpu(),
            weight_version=self.weight_version,
            old_log_probs=path.log_probs,
            means=path.means,
        )
