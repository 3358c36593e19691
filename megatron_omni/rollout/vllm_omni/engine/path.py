"""What is recorded of one sample's way, and its form in vLLM-Omni's outputs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.sampling.step import Step


@dataclass
class RecordedPath:
    """The trained steps of one sample. S of them, N tokens, C channels; float32."""

    request: SampleRequest
    latents: list[Tensor] = field(default_factory=list)
    next_latents: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    sigmas: list[tuple[float, float]] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def record(self, latents: Tensor, step: Step, sigma: float, sigma_next: float) -> None:
        """A step of this one sample: latents [1, N, C]."""
        self.latents.append(latents[0])
        self.next_latents.append(step.next_sample[0])
        self.sigmas.append((sigma, sigma_next))
        self.log_probs.append(step.log_prob[0])
        if self.request.record_means:
            self.means.append(step.mean[0])

    def trajectory(self, clean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """vLLM-Omni's fields `trajectory_latents`, `_timesteps` and `_log_probs`, which cross processes in
        shared memory: [latents, next latents, means, clean; N, C], [S, 2] and [S], on the CPU."""
        log_probs = torch.stack(self.log_probs) if self.log_probs else clean.new_empty(0)
        rows = [*self.latents, *self.next_latents, *self.means, clean]
        sigmas = torch.tensor(self.sigmas, dtype=torch.float32).view(-1, 2)
        return torch.stack(rows).cpu(), sigmas, log_probs.cpu()


def path_arrays(
    request: SampleRequest, latents: Tensor, sigmas: Tensor, log_probs: Tensor
) -> dict[str, Tensor]:
    """The named tensors of a path, from the three of `RecordedPath.trajectory`."""
    steps = len(request.trained)
    names = ["latents", "next_latents"] + ["means"] * request.record_means
    *parts, clean = latents.split([steps] * len(names) + [1])
    return dict(zip(names, parts, strict=True)) | {
        "clean_latents": clean[0],
        "sigmas": sigmas[:, 0],
        "next_sigmas": sigmas[:, 1],
        "log_probs": log_probs,
    }
