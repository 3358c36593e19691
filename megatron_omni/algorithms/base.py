"""What an algorithm owes the loop. It knows no model and no hardware."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rollout.base import RolloutRequest, Trajectory


@dataclass(frozen=True)
class Advantages:
    """One value a sample. B samples."""

    values: Tensor
    """[B] float32."""
    weights: Tensor
    """[B] float32: 0 where the reward failed, else so that they average 1 over the batch."""
    zero_fraction: float
    """Share of samples without any learning signal."""

    @staticmethod
    def uniform(count: int) -> "Advantages":
        """The same for all samples, where none is better than another."""
        ones = torch.ones(count)
        return Advantages(ones, ones, 0.0)

    def rows(self, start: int, stop: int) -> "Advantages":
        return Advantages(self.values[start:stop], self.weights[start:stop], self.zero_fraction)


@dataclass
class TrainingBatch:
    """One micro-batch: what a forward pass takes and what its loss compares with. B samples at one step."""

    prompts: list[str]
    latents: Tensor
    """[B, N, C], the model's input."""
    sigma: Tensor
    """[B]."""
    weights: Tensor
    """[B], weights of the samples in the loss."""
    advantages: Tensor | None = None
    """[B]."""
    next_latents: Tensor | None = None
    """[B, N, C], the state that the sampler went to."""
    next_sigma: Tensor | None = None
    """[B]."""
    log_prob: Tensor | None = None
    """[B], of that step under the weights that sampled."""
    old_log_prob: Tensor | None = None
    """[B], what its ratio compares with; None: the same under the weights in training, for a ratio of 1."""
    target: Tensor | None = None
    """[B, N, C], the velocity to predict, in supervised training."""
    reference_velocity: Tensor | None = None
    """[B, N, C], of the frozen initial weights, where the algorithm needs them."""


@dataclass
class Loss:
    """A scalar to minimise, and what to report of it."""

    value: Tensor
    """Scalar with gradient: the mean over the micro-batch."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Scalars that average over micro-batches and processes."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Scalars whose maximum is reported."""


class Algorithm(Protocol):
    """Prompts → sampling requests; scored trajectories → micro-batches; model outputs → a loss."""

    uses_rewards: bool
    """Whether training samples are scored."""
    needs_all_rewards: bool
    """Whether a sample's advantage depends on other groups' rewards."""
    has_ratio: bool
    """Whether the loss compares the steps' probabilities with old ones."""
    needs_reference: bool
    """Whether micro-batches need the velocity of the frozen initial weights."""

    def requests(self, iteration: int, rows: list[dict[str, Any]], first: int) -> list[RolloutRequest]:
        """Group by group. `rows` are this process's prompts: number `first` and on of the iteration."""
        ...

    def advantages(self, rewards: GlobalRewards) -> Advantages:
        """Of these samples, whole groups of all processes."""
        ...

    def micro_batches(
        self, trajectory: Trajectory, advantages: Advantages, size: int, iteration: int
    ) -> list[TrainingBatch]:
        """Of one optimizer step on these samples, cut every `size` samples as sampling did."""
        ...

    def log_prob(self, batch: TrainingBatch, velocity: Tensor) -> Tensor:
        """[B], of the batch's step; if the loss has a ratio. Arguments as of `loss`."""
        ...

    def loss(self, batch: TrainingBatch, velocity: Tensor) -> Loss:
        """velocity: [B, N, C] float32, the guided velocity at `batch.latents`, with gradient."""
        ...


def cut(count: int, size: int) -> list[slice]:
    """Slices of `size` samples."""
    return [slice(start, start + size) for start in range(0, count, size)]


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean over samples; a weight of 0 takes a sample out even if its value is not finite."""
    return (torch.where(weights > 0, values, 0.0) * weights).mean()
