"""The step of the sampler: the one place where this arithmetic stands, for rollout and for every loss."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["ode", "sde", "dance", "cps"]


@dataclass(frozen=True)
class Step:
    """One step from sigma to sigma_next. B samples; float32."""

    next_sample: Tensor
    """[B, ...]."""
    log_prob: Tensor | None
    """[B], the mean over all other dimensions; None for the deterministic step."""
    mean: Tensor
    """[B, ...]."""
    std: Tensor
    """[B, 1, ...], the standard deviation of the step: the one every KL or trust region is to use."""


def stochastic_step(
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    kind: Kind,
    noise_level: float,
    sigma_max: float | None = None,
    noise: Tensor | None = None,
    next_sample: Tensor | None = None,
) -> Step:
    """One step of rectified flow, x = (1 − σ)·x0 + σ·ε, with the velocity v = ε − x0.

    Kinds: `ode`, Euler's step; `sde`, Flow-GRPO (arXiv 2505.05470, eq. 9) with g = η·√(σ/(1−σ));
    `dance`, DanceGRPO (arXiv 2505.07818), the same with g = η; `cps`, Flow-CPS (arXiv 2509.05952), whose
    log-probability is −(x' − μ)² without scale or normaliser.

    Args:
        sample, velocity: [B, ...], any float dtype; the arithmetic is float32 whatever autocast says.
        sigma, sigma_next: a number, or [B] for samples at different steps.
        noise_level: η.
        sigma_max: stands for σ in g's denominator where σ = 1: the schedule's second sigma.
        noise: standard normal, to draw the next sample. Give this or `next_sample`, not both.
        next_sample: a stored next sample, to evaluate its log-probability.
    """
    if kind != "ode" and (noise is None) == (next_sample is None):
        raise ValueError(f"a {kind!r} step needs either noise (to sample) or next_sample (to replay)")
    with torch.autocast(sample.device.type, enabled=False):
        x, v = sample.float(), velocity.float()
        s, s_next = _per_sample(sigma, x), _per_sample(sigma_next, x)
        dt = s_next - s
        if kind == "ode":
            mean = x + v * dt
            return Step(mean if next_sample is None else next_sample, None, mean, torch.zeros_like(s))
        if kind == "cps":
            std = s_next * math.sin(noise_level * math.pi / 2)
            data, pure_noise = x - s * v, x + (1 - s) * v
            mean = (1 - s_next) * data + (s_next**2 - std**2).sqrt() * pure_noise
        else:
            g = _noise_scale(kind, s, noise_level, sigma_max)
            drift = g**2 / (2 * s)
            mean = x * (1 + drift * dt) + v * (1 + drift * (1 - s)) * dt
            std = g * (-dt).sqrt()
        drawn = mean + std * noise.float() if next_sample is None else next_sample.float()
        log_density = -((drawn - mean) ** 2)
        if kind != "cps":
            log_density = log_density / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        return Step(drawn, log_density.flatten(1).mean(1), mean, std)


def _noise_scale(kind: Kind, sigma: Tensor, noise_level: float, sigma_max: float | None) -> Tensor:
    if kind == "dance":
        return torch.full_like(sigma, noise_level)
    if sigma_max is None:
        sigma_max = math.nan  # shows up as NaN only if some sigma is 1, where it is needed
    return noise_level * (sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))).sqrt()


def _per_sample(sigma: float | Tensor, sample: Tensor) -> Tensor:
    """[B, 1, ...], to broadcast over the sample."""
    sigma = torch.as_tensor(sigma, dtype=torch.float32, device=sample.device)
    return sigma.expand(len(sample)).view(-1, *[1] * (sample.dim() - 1))
