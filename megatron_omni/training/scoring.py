"""Rewards of the samples in flight: scored by other processes while sampling goes on."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_omni.parallel.state import Layout
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rewards.pool import PendingReward, RewardPool
from megatron_omni.rollout.base import RolloutRequest, Trajectory


@dataclass(frozen=True)
class _Pending:
    prompt_id: Tensor
    rewards: list[PendingReward]
    """One a reward; none on processes without workers."""


class Scorer:
    """Scores trajectories in the rewards' worker processes.

    One process of each replica owns the workers; its results are broadcast to the others, so that all go on
    with the same numbers. Each reward has workers of its own, so that a slow one does not hold up a fast one.
    """

    def __init__(self, layout: Layout, weights: dict[str, float], open_pool: Callable[[str], RewardPool]):
        """weights: of the rewards, by name, which `open_pool` is called with."""
        self.layout = layout
        self.weights = weights
        self._pending: list[_Pending] = []
        with ExitStack() as opened:
            names = weights if layout.leads_replica else ()
            self.pools = [opened.enter_context(open_pool(name)) for name in names]
            self._opened = opened.pop_all()

    def check_prompts(self, metadata: list[dict[str, Any]]) -> None:
        """Raise `UserError` if a reward cannot begin, such as for a prompt that it can never score."""
        for pool in self.pools:
            pool.check_prompts(metadata)

    def submit(self, trajectory: Trajectory, requests: list[RolloutRequest]) -> None:
        """Start scoring a trajectory; `requests` are the ones it answers."""
        metadata = [request.metadata for request in requests]
        rewards = [pool.submit(trajectory.images, metadata) for pool in self.pools]
        self._pending.append(_Pending(trajectory.prompt_id, rewards))

    def collect(self, samples: int | None = None) -> GlobalRewards:
        """The scores of this process's `samples` that were submitted first, and as many of each other's.

        By default of all samples. Waits for them; all processes get the same.
        """
        pending = self._take(samples)
        prompt_id = torch.cat([batch.prompt_id for batch in pending])
        results = [[reward.result() for reward in batch.rewards] for batch in pending]
        count = len(self.weights)
        table = torch.zeros(2 * count + 1, len(prompt_id))
        if self.pools:
            for row, parts in enumerate(zip(*results, strict=True)):
                table[row] = torch.cat([part.values for part in parts])
                table[count + row] = torch.cat([part.valid for part in parts])
            table[-1] = prompt_id
        table = self.layout.gather_data_parallel(self.layout.broadcast_in_replica(table))
        errors = [part.error for batch in results for part in batch if part.error]
        return GlobalRewards(
            self.weights,
            table[:count],
            table[count : 2 * count].bool(),
            table[-1].long(),
            errors[-1] if errors else "",
        )

    def _take(self, samples: int | None) -> list[_Pending]:
        """The oldest pending batches."""
        taken, count = [], 0
        while self._pending and (samples is None or count < samples):
            taken.append(self._pending.pop(0))
            count += len(taken[-1].prompt_id)
        return taken

    def close(self) -> None:
        self._opened.close()
