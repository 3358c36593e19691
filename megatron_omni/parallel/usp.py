"""USP attention: full attention over tokens that are spread over ranks, by Ulysses and a ring together.

Fang and Zhao, "USP: A Unified Sequence Parallelism Approach" (arXiv 2405.07719). Neighbours exchange heads
for tokens (DeepSpeed-Ulysses, arXiv 2309.14509); each set of neighbours is one rank of a ring.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_omni.parallel.context import ContextParallel
from megatron_omni.parallel.ring import ring_attention


def usp_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_sizes: list[int],
    key_sizes: list[int],
    context: ContextParallel,
) -> Tensor:
    """This rank's query [q, B, heads, head_dim] attends to the keys and values of all ranks, not causally.

    Key and value are [k, B, heads, head_dim]; heads are a multiple of Ulysses' size. `query_sizes` and
    `key_sizes`: tokens on each context-parallel rank, 0 or more. `key_mask` [B, sum(key_sizes)]: true where a
    key may be seen, in the order of ranks; None: everywhere. Returns [q, B, heads, head_dim].
    """
    size = context.ulysses.size()
    first = context.rank - context.ulysses.rank()
    neighbours = slice(first, first + size)
    query, key, value = gather_tokens(
        query, key, value, query_sizes[neighbours], key_sizes[neighbours], context.ulysses
    )
    if context.ring.size() == 1:
        attn_mask = None if key_mask is None else key_mask[:, None, None]
        output = F.scaled_dot_product_attention(query, key, value, attn_mask)
    else:
        block_sizes = [sum(key_sizes[i : i + size]) for i in range(0, len(key_sizes), size)]
        output = ring_attention(query, key, value, key_mask, block_sizes, context.ring)
    return gather_heads(output, query_sizes[neighbours], context.ulysses)


def gather_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_sizes: list[int],
    key_sizes: list[int],
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens [tokens, B, heads, head_dim] to those of all ranks, for its share of the heads.

    `query_sizes` and `key_sizes`: tokens on each rank of `group`. Returns query, key and value
    [B, heads / ranks, all tokens, head_dim], tokens in the order of ranks.
    """
    if group.size() == 1:
        return query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
    # One message to each rank: query, key and value of its heads.
    by_rank = [x.unflatten(2, (group.size(), -1)).movedim(2, 0) for x in (query, key, value)]
    sizes = [(q, k, k) for q, k in zip(query_sizes, key_sizes, strict=True)]
    received = all_to_all(
        group,
        torch.cat(by_rank, dim=1).flatten(0, 1),
        [sum(rank) for rank in sizes],
        [sum(sizes[group.rank()])] * group.size(),
    )
    parts = received.permute(1, 2, 0, 3).split([size for rank in sizes for size in rank], dim=2)
    query, key, value = (torch.cat(parts[i::3], dim=2) for i in range(3))
    return query, key, value


def gather_heads(x: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    """The inverse, for one tensor: this rank's tokens [tokens, B, heads, head_dim]."""
    x = x.permute(2, 0, 1, 3)
    if group.size() == 1:
        return x
    tokens = sizes[group.rank()]
    received = all_to_all(group, x, [tokens] * group.size(), sizes)
    return received.unflatten(0, (group.size(), tokens)).movedim(0, 2).flatten(2, 3)
