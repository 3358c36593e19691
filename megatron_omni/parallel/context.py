"""Context parallelism: the share of each stream's tokens that a rank computes.

A stream's tokens lie in contiguous shares in the order of ranks, which differ by one token at most: no
length needs padding. Everything but attention works on a rank's own tokens; attention is
`megatron_omni.parallel.usp`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_omni.parallel.stages import split_sizes


@dataclass(frozen=True)
class ContextParallel:
    """This process's place among those that share a sample's tokens; without a group it has all of them."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    """Neighbours, which exchange heads for tokens."""
    ring: ProcessGroup | None = None
    """One of each set of neighbours: rank = ring rank × Ulysses' size + Ulysses rank."""

    @staticmethod
    def current() -> "ContextParallel":
        """As `megatron_omni.parallel.state.initialize` made it."""
        if not parallel_state.is_initialized() or parallel_state.get_context_parallel_world_size() == 1:
            return ContextParallel()
        group = parallel_state.get_context_parallel_group()
        ulysses, ring = parallel_state.get_hierarchical_context_parallel_groups()
        return ContextParallel(group.rank(), group.size(), group, ulysses, ring)

    def __str__(self) -> str:
        return f"Ulysses {self.ulysses.size()} × ring {self.ring.size()}" if self.group else "one process"

    def sizes(self, tokens: int) -> list[int]:
        """How many of a stream's tokens each rank has."""
        return split_sizes(tokens, self.size)

    def share(self, tokens: int) -> slice:
        """This rank's tokens of a stream."""
        sizes = self.sizes(tokens)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def joint_mask(self, masks: list[Tensor]) -> Tensor:
        """Masks of whole streams [B, tokens], joined in the order in which the ranks hold the tokens."""
        parts = [mask.split(self.sizes(mask.shape[1]), dim=1) for mask in masks]
        return torch.cat([part for rank in zip(*parts, strict=True) for part in rank], dim=1)

    def gather(self, x: Tensor, tokens: int) -> Tensor:
        """All tokens [tokens, …] of a stream from every rank's own, on every rank.

        What follows must be the same computation on each rank: backward takes this rank's part of the
        gradient.
        """
        if self.size == 1:
            return x
        return _Gather.apply(x, self, tokens)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel, tokens: int) -> Tensor:
        ctx.share = context.share(tokens)
        sizes = context.sizes(tokens)
        # One equal-sized message from each rank, which every backend can send: shares differ by one token.
        longest = x.new_zeros(max(sizes), *x.shape[1:])
        longest[: len(x)] = x
        parts = [torch.empty_like(longest) for _ in sizes]
        dist.all_gather(parts, longest, group=context.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.share], None, None
