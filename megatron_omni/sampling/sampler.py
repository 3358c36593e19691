"""The denoising loop."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_omni.models.base import ImageSize
from megatron_omni.parallel.pipeline import Lane
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.sampling.seeds import generator
from megatron_omni.sampling.step import Kind, stochastic_step


@dataclass(frozen=True)
class SampledPath:
    """Where a batch went. B samples, S recorded steps, N tokens, C channels; all float32."""

    clean_latents: Tensor
    """[B, N, C]."""
    latents: Tensor
    """[B, S, N, C], before each recorded step."""
    next_latents: Tensor
    """[B, S, N, C], after it."""
    steps: Tensor
    """[B, S] int64, the index of each recorded step."""
    log_probs: Tensor
    """[B, S]."""
    means: Tensor | None
    """[B, S, N, C], of each recorded step; if asked for."""


@dataclass(frozen=True)
class Sampler:
    """Draws a batch of samples along one table of sigmas."""

    kind: Kind
    noise_level: float
    sigmas: Tensor
    """[steps + 1] float32 on the CPU."""
    size: ImageSize
    guidance: Guidance

    @torch.no_grad()
    def sample(
        self,
        noise: Tensor,
        embeddings: list[Tensor],
        negative: Tensor,
        windows: list[tuple[int, ...]],
        recorded: list[tuple[int, ...]],
        seeds: list[int],
        record_means: bool = False,
    ) -> Lane[SampledPath]:
        """From initial noise [B, N, C] down to sigma 0, all rows in one forward pass a step.

        A lane for `megatron_omni.parallel.pipeline.ForwardPipeline`, which runs the model.

        Row b is stochastic at the steps `windows[b]`, with noise that depends on (seeds[b], step) alone;
        the steps `recorded[b]`, equally many in every row, are kept.
        """
        x = noise.float()
        latents, next_latents = (x.new_empty(len(x), len(recorded[0]), *x.shape[1:]) for _ in range(2))
        means = torch.empty_like(latents) if record_means else None
        log_probs = x.new_empty(len(x), len(recorded[0]))
        for i in range(len(self.sigmas) - 1):
            sigma, sigma_next = self.sigmas[i].item(), self.sigmas[i + 1].item()
            inputs = self.guidance.inputs(x, x.new_full((len(x),), sigma), embeddings, negative, self.size)
            velocity = self.guidance.combine((yield inputs))
            step = stochastic_step(x, velocity, sigma, sigma_next, kind="ode", noise_level=0.0)
            x_next = step.next_sample
            stochastic = [i in window for window in windows]
            if any(stochastic):
                step = stochastic_step(
                    x,
                    velocity,
                    sigma,
                    sigma_next,
                    kind=self.kind,
                    noise_level=self.noise_level,
                    sigma_max=self.sigmas[1].item(),
                    noise=self._step_noise(x, seeds, i),
                )
                rows = torch.tensor(stochastic, device=x.device)[:, None, None]
                x_next = torch.where(rows, step.next_sample, x_next)
            for row, kept in enumerate(recorded):
                if i in kept:
                    slot = kept.index(i)
                    latents[row, slot], next_latents[row, slot] = x[row], x_next[row]
                    log_probs[row, slot] = step.log_prob[row]
                    if means is not None:
                        means[row, slot] = step.mean[row]
            x = x_next
        steps = torch.tensor(recorded, dtype=torch.long).view(len(x), -1)
        return SampledPath(x, latents, next_latents, steps, log_probs, means)

    @staticmethod
    def _step_noise(x: Tensor, seeds: list[int], step: int) -> Tensor:
        rows = [torch.randn(x.shape[1:], generator=generator(seed, "step", step)) for seed in seeds]
        return torch.stack(rows).to(x.device)
