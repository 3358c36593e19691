"""The stochastic step against the papers' values and against exact Gaussians."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.sampling.step import stochastic_step

# Qwen-Image's schedule for 10 steps and 1024 image tokens.
SIGMAS = [1, 0.928970, 0.851485, 0.766624, 0.673281, 0.570117, 0.455497, 0.327400, 0.183300, 0.02, 0]
STOCHASTIC = ["sde", "dance", "cps"]


def tensor(value: float) -> torch.Tensor:
    return torch.full((1, 4), value)


@pytest.mark.parametrize(
    ("kind", "noise_level", "index", "mean", "scale", "log_prob"),
    [
        ("sde", 1.2, 0, 0.098206, 4.502557, -1.226260),
        ("sde", 1.2, 1, 0.091027, 4.339703, -1.232908),
        ("sde", 1.2, 4, 0.267285, 1.722631, -0.452072),
        ("cps", 0.8, 0, 0.121635, 0.883503, -0.195144),
        ("cps", 0.8, 1, 0.147347, 0.809810, -0.163948),
        ("cps", 0.8, 4, 0.228192, 0.542214, -0.073499),
    ],
)
def test_reference_values(kind, noise_level, index, mean, scale, log_prob):
    arguments = dict(kind=kind, noise_level=noise_level, sigma_max=SIGMAS[1])
    sigma, sigma_next = SIGMAS[index], SIGMAS[index + 1]
    step = stochastic_step(
        tensor(0.3), tensor(-0.2), sigma, sigma_next, noise=torch.full((1, 4), 0.5), **arguments
    )
    std = scale * (math.sqrt(sigma - sigma_next) if kind == "sde" else 1)
    torch.testing.assert_close(step.mean, tensor(mean), atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(step.std.flatten(), torch.tensor([std]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step.next_sample, step.mean + 0.5 * step.std)
    torch.testing.assert_close(step.log_prob, torch.tensor([log_prob]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", STOCHASTIC)
@given(seed=st.integers(0, 10_000), index=st.integers(0, 8), noise_level=st.floats(0.1, 0.9))
def test_replay_gives_the_same_log_prob_bit_by_bit(kind, seed, index, noise_level):
    random = torch.Generator().manual_seed(seed)
    x, v, noise = torch.randn(3, 2, 5, 8, generator=random)
    arguments = dict(kind=kind, noise_level=noise_level, sigma_max=SIGMAS[1])
    drawn = stochastic_step(x, v, SIGMAS[index], SIGMAS[index + 1], noise=noise, **arguments)
    sigma, sigma_next = (torch.full((2,), SIGMAS[i]) for i in (index, index + 1))
    replayed = stochastic_step(x, v, sigma, sigma_next, next_sample=drawn.next_sample, **arguments)
    assert torch.equal(drawn.log_prob, replayed.log_prob)
    assert torch.equal(drawn.mean, replayed.mean)


@pytest.mark.parametrize("kind", ["sde", "dance"])
@given(seed=st.integers(0, 10_000), index=st.integers(0, 8))
def test_log_prob_is_the_gaussian_density(kind, seed, index):
    random = torch.Generator().manual_seed(seed)
    x, v, noise = torch.randn(3, 2, 5, 8, generator=random)
    step = stochastic_step(
        x, v, SIGMAS[index], SIGMAS[index + 1], kind=kind, noise_level=0.7, sigma_max=SIGMAS[1], noise=noise
    )
    exact = torch.distributions.Normal(step.mean, step.std).log_prob(step.next_sample).mean((1, 2))
    torch.testing.assert_close(step.log_prob, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [*STOCHASTIC, "ode"])
def test_each_sample_keeps_its_own_sigma(kind):
    x, v, noise = torch.randn(3, 3, 6)
    sigma, sigma_next = torch.tensor(SIGMAS[1:4]), torch.tensor(SIGMAS[2:5])
    arguments = dict(kind=kind, noise_level=0.7, sigma_max=SIGMAS[1])
    together = stochastic_step(x, v, sigma, sigma_next, noise=noise, **arguments)
    for i in range(3):
        row = slice(i, i + 1)
        alone = stochastic_step(
            x[row], v[row], sigma[i].item(), sigma_next[i].item(), noise=noise[row], **arguments
        )
        assert torch.equal(together.next_sample[row], alone.next_sample)
        torch.testing.assert_close(together.std[row], alone.std)


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_without_noise_level_every_kind_approaches_the_ode(kind):
    x, v, noise = torch.randn(3, 2, 6)
    ode = stochastic_step(x, v, 0.6, 0.5, kind="ode", noise_level=0.0)
    step = stochastic_step(x, v, 0.6, 0.5, kind=kind, noise_level=1e-4, noise=noise)
    torch.testing.assert_close(step.next_sample, ode.next_sample, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, SIGMAS[1]), (0.02, 0.0), (1e-4, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_at_both_ends_in_half_precision_and_under_autocast(kind, sigma, sigma_next, dtype):
    x, v, noise = torch.randn(3, 2, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        step = stochastic_step(
            x, v, sigma, sigma_next, kind=kind, noise_level=0.7, sigma_max=SIGMAS[1], noise=noise
        )
    for value in (step.next_sample, step.log_prob, step.mean, step.std):
        assert value.dtype == torch.float32
        assert value.isfinite().all()


def test_the_gradient_reaches_the_velocity_only_through_the_mean():
    x, noise = torch.randn(2, 2, 6)
    v = torch.randn(2, 6, requires_grad=True)
    drawn = stochastic_step(x, v.detach(), 0.6, 0.5, kind="sde", noise_level=0.7, noise=noise)
    step = stochastic_step(x, v, 0.6, 0.5, kind="sde", noise_level=0.7, next_sample=drawn.next_sample)
    step.log_prob.sum().backward()
    slope = (1 + (0.7**2 * 0.6 / 0.4) / (2 * 0.6) * 0.4) * -0.1
    expected = (drawn.next_sample - drawn.mean) / drawn.std**2 * slope / 6
    torch.testing.assert_close(v.grad, expected)


@pytest.mark.parametrize("given", [{}, {"noise": tensor(0), "next_sample": tensor(0)}])
def test_noise_or_next_sample_but_not_both(given):
    with pytest.raises(ValueError, match="either noise"):
        stochastic_step(tensor(0), tensor(0), 0.5, 0.4, kind="sde", noise_level=0.7, **given)
