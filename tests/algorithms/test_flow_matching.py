"""Supervised flow matching: times, targets and reproducibility."""

import torch

from megatron_omni.algorithms.flow_matching import FlowMatching
from megatron_omni.config.schema import Config
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rollout.base import Trajectory


def build() -> FlowMatching:
    config = Config()
    config.rollout.n_samples_per_prompt = 1
    return FlowMatching(config, torch.tensor([1.0, 0.0]))


def trajectory(algorithm: FlowMatching, iteration: int, count: int = 64) -> Trajectory:
    requests = algorithm.requests(iteration, [{"prompt": str(i)} for i in range(count)], 0)
    none = torch.zeros(count, 0)
    return Trajectory(
        prompts=[r.prompt for r in requests],
        prompt_id=torch.arange(count),
        seeds=torch.tensor([r.seed for r in requests]),
        clean_latents=torch.randn(count, 6, 4, generator=torch.Generator().manual_seed(0)),
        latents=none,
        next_latents=none,
        sigmas=none,
        next_sigmas=none,
        log_probs=none,
        images=none,
        weight_version=0,
    )


def batches(algorithm: FlowMatching, iteration: int, size: int = 64):
    data = trajectory(algorithm, iteration)
    none = torch.zeros(0, len(data))
    advantages = algorithm.advantages(GlobalRewards({}, none, none.bool(), data.prompt_id))
    return data, algorithm.micro_batches(data, advantages, size, iteration)


def test_the_true_velocity_has_no_loss_and_leads_from_noise_to_data():
    algorithm = build()
    data, (batch,) = batches(algorithm, 0)
    assert algorithm.loss(batch, batch.target).value == 0
    sigma = batch.sigma[:, None, None]
    torch.testing.assert_close(batch.latents - sigma * batch.target, data.clean_latents)


def test_times_are_logit_normal():
    algorithm = build()
    logits = torch.cat([batches(algorithm, i)[1][0].sigma.logit() for i in range(50)])
    assert abs(logits.mean()) < 0.06
    assert abs(logits.std() - 1) < 0.06


def test_noise_belongs_to_the_sample_and_the_iteration():
    algorithm = build()
    (_, (whole,)), (_, halves) = batches(algorithm, 0), batches(algorithm, 0, size=32)
    assert torch.equal(whole.target, torch.cat([half.target for half in halves]))
    assert not torch.equal(whole.target, batches(algorithm, 1)[1][0].target)
