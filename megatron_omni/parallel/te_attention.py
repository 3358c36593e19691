"""Transformer Engine's context-parallel attention, where it is installed and equal to USP attention."""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_omni.parallel.context import ContextParallel
from megatron_omni.parallel.usp import usp_attention

PROBE_TOKENS = 32
"""Tokens of each rank."""


class TEAttention:
    """For tokens spread evenly over the ranks, without a mask, in 16 bits: what Transformer Engine can do."""

    def __init__(self, heads: int, head_dim: int, context: ContextParallel):
        """`heads`: of this tensor-parallel rank. Collective over the context-parallel ranks."""
        from transformer_engine.pytorch import DotProductAttention

        if context.ring.size() == 1:
            kind, group = "a2a", context.group
        elif context.ulysses.size() == 1:
            kind, group = "p2p", context.group
        else:
            kind, group = "a2a+p2p", [context.ulysses, context.ring]
        self.attention = DotProductAttention(
            heads, head_dim, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="no_mask"
        )
        self.attention.set_context_parallel_group(
            group,
            dist.get_process_group_ranks(context.group),
            torch.get_device_module(_device()).Stream(),
            kind,
        )

    @staticmethod
    def takes(key_mask: Tensor | None, query_sizes: list[int], key_sizes: list[int]) -> bool:
        """Whether it can compute `usp_attention` of these arguments."""
        even = len({*query_sizes, *key_sizes}) == 1 and query_sizes[0] % 2 == 0
        return key_mask is None and even

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[tokens, B, heads, head_dim] each, of this rank."""
        output = self.attention(*(x.contiguous() for x in (query, key, value)), attn_mask_type="no_mask")
        return output.view_as(query)


@cache
def te_attention(
    heads: int, head_dim: int, dtype: torch.dtype, context: ContextParallel
) -> TEAttention | None:
    """Transformer Engine's attention, if it is equal to ours but for rounding; else None.

    Collective over the context-parallel ranks. `heads`: of this tensor-parallel rank.
    """
    if dtype == torch.float32:
        return None
    attention = TEAttention(heads, head_dim, context)
    tolerance = 4 * torch.finfo(dtype).eps
    worst = torch.tensor(deviation(attention, heads, head_dim, dtype, context), device=_device())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=context.group)
    return attention if worst <= tolerance else None


def deviation(
    attention: TEAttention, heads: int, head_dim: int, dtype: torch.dtype, context: ContextParallel
) -> float:
    """Largest relative distance to `usp_attention` on random tensors: of the output and of the gradients."""
    random = torch.Generator().manual_seed(context.rank)
    shape = (PROBE_TOKENS, 2, heads, head_dim)
    query, key, value, grad = (
        torch.randn(shape, generator=random).to(_device(), dtype).requires_grad_(index < 3)
        for index in range(4)
    )
    sizes = [PROBE_TOKENS] * context.size
    results = []
    for output in (
        attention(query, key, value),
        usp_attention(query, key, value, None, sizes, sizes, context),
    ):
        results.append([output, *torch.autograd.grad(output, (query, key, value), grad)])
    return max(
        ((theirs.float() - ours.float()).norm() / ours.float().norm()).item()
        for theirs, ours in zip(*results, strict=True)
    )


def _device() -> torch.device:
    """This process's current one."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")
