"""Rewards of the samples in flight: scored by other processes while sampling goes on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_omni.errors import UserError
from megatron_omni.parallel.state import Layout
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rollout.base import RolloutRequest, Trajectory


@dataclass(frozen=True)
class GlobalRewards:
    """Scores of all processes' samples, in the order of data-parallel ranks. B samples in all."""

    values: Tensor
    """[B] float32."""
    valid: Tensor
    """[B] bool."""
    prompt_id: Tensor
    """[B] int64."""

    @property
    def failed(self) -> int:
        return int((~self.valid).sum())

    def valid_values(self) -> Tensor:
        return self.values[self.valid]


class Scorer:
    """Scores trajectories in the reward's worker processes.

    One process of each replica owns the workers; its results are broadcast to the others, so that all go on
    with the same numbers.
    """

    def __init__(self, layout: Layout, open_pool: Callable[[], RewardPool]):
        self.layout = layout
        self.pool = open_pool() if layout.leads_replica else None
        self.pending = []

    def submit(self, trajectory: Trajectory, requests: list[RolloutRequest]) -> None:
        """Start scoring a trajectory; `requests` are the ones it answers."""
        metadata = [request.metadata for request in requests]
        future = self.pool.submit(trajectory.images, metadata) if self.pool else None
        self.pending.append((future, trajectory.prompt_id))

    def collect(self) -> GlobalRewards:
        """Waits for everything submitted and gathers it from all processes."""
        prompt_id = torch.cat([ids for _, ids in self.pending])
        results = [future.result() for future, _ in self.pending if future]
        self.pending = []
        table = torch.zeros(3, len(prompt_id))
        if self.pool:
            table[0] = torch.cat([result.values for result in results])
            table[1] = torch.cat([result.valid for result in results])
            table[2] = prompt_id
        table = self.layout.gather_data_parallel(self.layout.broadcast_in_replica(table))
        values, valid, prompt_id = table.unbind()
        if not valid.any():
            errors = [result.error for result in results if result.error]
            raise UserError(
                f"every sample's reward failed; the last error was: {errors[-1] if errors else '?'}"
            )
        return GlobalRewards(values, valid.bool(), prompt_id.long())

    def close(self) -> None:
        if self.pool:
            self.pool.close()
