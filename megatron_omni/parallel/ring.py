"""Ring attention: keys and values travel round a ring of ranks, each of which keeps its queries.

Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_omni.platforms import current_platform


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    key_sizes: list[int],
    group: ProcessGroup,
) -> Tensor:
    """This rank's query [B, heads, q, head_dim] attends to the keys and values of all ranks.

    `key_sizes`: tokens of key and value [B, heads, k, head_dim] on each rank of `group`. `key_mask`
    [B, sum(key_sizes)]: true where a key may be seen; None: everywhere. Returns [B, heads, q, head_dim],
    zero for a sample that may see no key.
    """
    return _RingAttention.apply(query, key.contiguous(), value.contiguous(), key_mask, key_sizes, group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        key_sizes: list[int],
        group: ProcessGroup,
    ) -> Tensor:
        attention = current_platform().attention
        masks = _block_masks(key_mask, key_sizes)
        output = torch.zeros_like(query, dtype=torch.float32)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
        for owner, *block in _blocks(key, value, key_sizes, group):
            lse = _merge(output, lse, *attention.forward(query, *block, masks[owner]))
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, key_mask, output, lse)
        ctx.key_sizes, ctx.group = key_sizes, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        query, key, value, key_mask, output, lse = ctx.saved_tensors
        group: ProcessGroup = ctx.group
        attention = current_platform().attention
        masks = _block_masks(key_mask, ctx.key_sizes)
        grad_output = grad_output.contiguous()
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
        arriving = None
        for owner, *block in _blocks(key, value, ctx.key_sizes, group):
            grad_query, *grad_block = attention.backward(
                grad_output, query, *block, masks[owner], output, lse
            )
            grads[0] += grad_query
            if arriving:
                _add(grads[1:], arriving.wait())
            if owner == group.rank():
                _add(grads[1:], grad_block)
            else:
                # Straight to the owner, which adds in float32, while the next block is computed. The
                # rank as far ahead as the owner is behind has just worked on this rank's block.
                ahead = (2 * group.rank() - owner) % group.size()
                blank = [torch.empty_like(key), torch.empty_like(value)]
                arriving = _Exchange.start(grad_block, owner, blank, ahead, group)
        _add(grads[1:], arriving.wait())
        grads = [grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True)]
        return *grads, None, None, None


def _block_masks(key_mask: Tensor | None, key_sizes: list[int]) -> list[Tensor | None]:
    return [None] * len(key_sizes) if key_mask is None else list(key_mask.split(key_sizes, dim=1))


def _blocks(
    key: Tensor, value: Tensor, key_sizes: list[int], group: ProcessGroup
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank with its key and value; this rank first, then those behind it.

    The next block is on its way while the caller works on one.
    """
    rank, ranks = group.rank(), group.size()
    for step in range(ranks):
        owner = (rank - step) % ranks
        if step == ranks - 1:
            yield owner, key, value
            return
        shape = (*key.shape[:2], key_sizes[owner - 1], key.shape[3])
        blank = [key.new_empty(shape), value.new_empty(shape)]
        arriving = _Exchange.start([key, value], (rank + 1) % ranks, blank, (rank - 1) % ranks, group)
        yield owner, key, value
        key, value = arriving.wait()


def _merge(output: Tensor, lse: Tensor, block_output: Tensor, block_lse: Tensor) -> Tensor:
    """Merges a block's result into the float32 `output` in place; returns the new lse."""
    merged = torch.logaddexp(lse, block_lse)
    reference = merged.masked_fill(merged == -math.inf, 0)  # -inf - -inf is no number
    output.mul_((lse - reference).exp_()[..., None])
    output.add_(block_output * (block_lse - reference).exp_()[..., None])
    return merged


def _add(totals: list[Tensor], parts: list[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part


@dataclass(frozen=True)
class _Exchange:
    """Tensors on their way to one rank, and as many from another."""

    sent: list[Tensor]
    received: list[Tensor]
    works: list[dist.Work]

    @staticmethod
    def start(
        sent: list[Tensor], target: int, received: list[Tensor], source: int, group: ProcessGroup
    ) -> "_Exchange":
        """Begins to send `sent` to `target` and to fill `received` with what `source` sends."""
        sent = [tensor.contiguous() for tensor in sent]
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=target) for x in sent]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=source) for x in received]
        return _Exchange(sent, received, dist.batch_isend_irecv(sends + receives))

    def wait(self) -> list[Tensor]:
        """What was received."""
        for work in self.works:
            work.wait()
        return self.received
