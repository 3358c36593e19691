"""Shared losses against reference values and closed forms."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from megatron_omni.algorithms.losses import clipped_policy_loss, gaussian_kl
from megatron_omni.sampling.step import stochastic_step


def test_clipped_loss_reference_value():
    ratio = torch.tensor([2e-4, -2e-4, 5e-5, 0.0]).exp()
    advantages = torch.tensor([1.0, -1.0, -10.0, 2.0]).clamp(-5, 5)
    loss = clipped_policy_loss(ratio, advantages, 1e-4)
    assert loss.values.mean().item() == pytest.approx(0.7500124, abs=1e-6)
    assert loss.clipped.float().mean().item() == 0.5


@pytest.mark.parametrize("kind", ["sde", "dance", "cps"])
def test_kl_is_the_gaussian_one_for_every_kind_of_step(kind):
    x, v, other, noise = torch.randn(4, 3, 7)
    step, reference = (
        stochastic_step(x, velocity, 0.6, 0.5, kind=kind, noise_level=0.7, noise=noise)
        for velocity in (v, other)
    )
    exact = kl_divergence(Normal(step.mean, step.std), Normal(reference.mean, step.std)).mean(1)
    torch.testing.assert_close(gaussian_kl(step.mean, reference.mean, step.std), exact)
