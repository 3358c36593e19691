"""When Transformer Engine's context-parallel attention is taken, with a stand-in for the package."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.context import ContextParallel
from megatron_omni.parallel.state import initialize
from megatron_omni.parallel.te_attention import TEAttention, te_attention
from megatron_omni.parallel.usp import usp_attention
from tests.distributed import run_distributed

HEADS, HEAD_DIM = 4, 8


class StandIn:
    """Takes what Transformer Engine's class takes, and computes the same but for `error`."""

    error = 0.0

    def __init__(self, heads, head_dim, attention_dropout, qkv_format, attn_mask_type):
        assert (heads, head_dim, attention_dropout) == (HEADS, HEAD_DIM, 0.0)
        assert (qkv_format, attn_mask_type) == ("sbhd", "no_mask")

    def set_context_parallel_group(self, group, ranks, stream, kind):
        assert ranks == list(range(dist.get_world_size()))
        sizes = [each.size() for each in group] if isinstance(group, list) else [group.size()]
        StandIn.seen = (kind, sizes)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask_type: str) -> Tensor:
        assert attn_mask_type == "no_mask" and query.is_contiguous()
        context = ContextParallel.current()
        sizes = [len(query)] * context.size
        output = usp_attention(query, key, value, None, sizes, sizes, context)
        return (output * (1 + self.error * (context.rank == 0))).flatten(2)


def install(error: float) -> None:
    StandIn.error = error
    package = ModuleType("transformer_engine.pytorch")
    package.DotProductAttention = StandIn
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    sys.modules["transformer_engine.pytorch"] = package


def choose(parallel: ParallelConfig, error: float, dtype: torch.dtype) -> tuple[bool, tuple | None]:
    initialize(parallel, seed=0)
    install(error)
    chosen = te_attention(HEADS, HEAD_DIM, dtype, ContextParallel.current())
    return chosen is not None, getattr(StandIn, "seen", None)


@pytest.mark.parametrize(
    ("ulysses", "kind", "sizes"), [(4, "a2a", [4]), (1, "p2p", [4]), (2, "a2a+p2p", [2, 2])]
)
def test_it_is_taken_where_it_is_equal_and_gets_the_groups_of_its_kind(ulysses, kind, sizes):
    parallel = ParallelConfig(context_parallel_size=4, ulysses_degree_in_cp=ulysses)
    assert run_distributed(choose, 4, parallel, 0.0, torch.bfloat16) == [(True, (kind, sizes))] * 4


def test_one_that_is_wrong_on_one_rank_is_taken_on_none():
    parallel = ParallelConfig(context_parallel_size=2)
    chosen = run_distributed(choose, 2, parallel, 0.1, torch.bfloat16)
    assert [taken for taken, _ in chosen] == [False, False]


def test_it_is_not_tried_in_float32():
    chosen = run_distributed(choose, 2, ParallelConfig(context_parallel_size=2), 0.0, torch.float32)
    assert chosen == [(False, None)] * 2


def test_it_takes_even_shares_without_a_mask_only():
    mask = torch.ones(1, 8, dtype=torch.bool)
    assert TEAttention.takes(None, [4, 4], [4, 4])
    assert not TEAttention.takes(mask, [4, 4], [4, 4])
    assert not TEAttention.takes(None, [5, 5], [5, 5])
    assert not TEAttention.takes(None, [4, 3], [4, 3])
    assert not TEAttention.takes(None, [2, 2], [4, 4])
