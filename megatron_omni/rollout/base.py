"""What every rollout engine owes the loop, and the typed value it returns."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutRequest:
    """One image to draw.

    Its seeds alone decide all noise, so that the same request gives the same trajectory on any worker, in any
    order. `window` and `trained` are the same for all members of a group.
    """

    prompt_id: int
    """Number of the prompt in the iteration: the members of a group share it."""
    metadata: dict[str, Any]
    """The prompt set's row, with "prompt"."""
    seed: int
    """Of the noise of stochastic steps, and of the initial noise."""
    window: tuple[int, ...] = ()
    """Indices of the stochastic steps."""
    trained: tuple[int, ...] = ()
    """Those of them that training replays."""
    noise_seed: int | None = None
    """Another seed for the initial noise, where several samples are to start from the same."""
    record_means: bool = False
    """Whether to keep the mean of each of those steps, too."""

    @property
    def initial_seed(self) -> int:
        return self.seed if self.noise_seed is None else self.noise_seed

    @property
    def prompt(self) -> str:
        return self.metadata["prompt"]


@dataclass
class Trajectory:
    """Samples drawn by one version of the weights. B samples, S trained steps, N image tokens, C channels.

    Everything a loss needs stands here as float32, whatever the model's dtype; conditions are kept by
    reference (the prompt), since each prompt is encoded once.
    """

    prompts: list[str]
    prompt_id: Tensor
    """[B] int64, the group of each sample."""
    seeds: Tensor
    """[B] int64."""
    clean_latents: Tensor
    """[B, N, C], the packed latents at sigma 0."""
    latents: Tensor
    """[B, S, N, C], the state before each trained step."""
    next_latents: Tensor
    """[B, S, N, C], the state after it."""
    sigmas: Tensor
    """[B, S]."""
    next_sigmas: Tensor
    """[B, S]."""
    log_probs: Tensor
    """[B, S], under the weights that sampled."""
    images: Tensor
    """[B, 3, H, W] uint8, what the reward sees."""
    weight_version: int
    old_log_probs: Tensor | None = None
    """[B, S], what probability ratios compare with, from engines that compute as the trainer does; for others
    the trainer fills it in."""
    means: Tensor | None = None
    """[B, S, N, C], the mean of each trained step under the weights that sampled; if the requests asked."""

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, start: int, stop: int) -> "Trajectory":
        """Samples `start` to `stop`, as views."""
        cut = {
            f.name: value[start:stop]
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), (Tensor, list))
        }
        return replace(self, **cut)

    @staticmethod
    def concatenate(parts: list["Trajectory"]) -> "Trajectory":
        """One trajectory from several of the same weights and image size."""
        first = parts[0]
        joined = {}
        for f in fields(first):
            value = getattr(first, f.name)
            if isinstance(value, Tensor):
                joined[f.name] = torch.cat([getattr(part, f.name) for part in parts])
            elif isinstance(value, list):
                joined[f.name] = [item for part in parts for item in getattr(part, f.name)]
        return replace(first, **joined)


class RolloutEngine(Protocol):
    """Draws trajectories: the same request gives the same one, up to the engine's stated error."""

    samples_policy: bool
    """Whether the model in training draws its pictures; then evaluations are drawn by it, too."""

    def generate(self, requests: list[RolloutRequest]) -> Iterable[Trajectory]:
        """Trajectories in the order of the requests, one per micro-batch as it is finished.

        Handing each over at once lets the reward score it while the next is being drawn.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Sample with the trainer's current weights from now on; trajectories carry `version`. Collective."""
        ...

    def metrics(self) -> dict[str, float]:
        """What to report of the iteration, on the process that leads the replica; counted anew from here."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class MicroBatchEngine(ABC):
    """A `RolloutEngine` that draws micro-batch by micro-batch on the trainer's own process."""

    samples_policy = True

    def __init__(self, micro_batch_size: int):
        self.micro_batch_size = micro_batch_size
        self.weight_version = 0

    def generate(self, requests: list[RolloutRequest]) -> Iterator[Trajectory]:
        size = self.micro_batch_size
        yield from self.draw(requests[start : start + size] for start in range(0, len(requests), size))

    def update_weights(self, version: int) -> None:
        self.weight_version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:  # noqa: B027 (there is nothing to end)
        pass

    @abstractmethod
    def draw(self, micro_batches: Iterable[list[RolloutRequest]]) -> Iterator[Trajectory]:
        """The trajectory of each micro-batch, in order, with `weight_version`."""
