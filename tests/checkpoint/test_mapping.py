"""Property: a table's line loses nothing, at every tensor-parallel size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.checkpoint.mapping import Entry, Heads, Kind, Row, match
from megatron_omni.errors import UserError


@given(
    kind=st.sampled_from(Kind),
    size=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([4, 8]),
    queries_per_group=st.integers(1, 3),
    head=st.integers(1, 3),
    is_weight=st.booleans(),
)
def test_shards_of_all_ranks_make_the_original_tensors(
    kind, size, groups, queries_per_group, head, is_weight
):
    heads = Heads(groups * queries_per_group, groups)
    entry = Entry("m" + (".weight" if is_weight else ".bias"), ("hf",), kind, heads)
    tail = (8,) if is_weight else ()
    rows = [heads.queries * head, groups * head, groups * head] if kind is Kind.QKV else [8]
    tensors = [torch.randn(count, *tail) for count in rows]

    shards = []
    for rank in range(size):
        slices = [tensor[entry.hf_slice(tensor.shape, rank, size)] for tensor in tensors]
        shards.append(entry.to_megatron(slices, size))

    assert entry.hf_shapes(shards[0].shape, size) == [tuple(tensor.shape) for tensor in tensors]
    for tensor, back in zip(tensors, entry.to_hf(shards), strict=True):
        assert torch.equal(tensor, back)
    parts = 1 if entry.dim is None else size
    assert shards[0].numel() * parts == sum(tensor.numel() for tensor in tensors)


def test_qkv_is_fused_group_by_group():
    entry = Entry("qkv.weight", ("q", "k", "v"), Kind.QKV, Heads(queries=4, groups=2))
    query, key, value = torch.arange(4.0), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    assert entry.to_megatron([query, key, value], 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_layer_numbers_are_carried_over():
    mapping = [Row(("a.*.b.*.c",), "x.*.y.*", Kind.COLUMN)]
    (entry,) = match(mapping, ["x.3.y.12.bias"], Heads(1, 1))
    assert entry.hf == ("a.3.b.12.c.bias",)


def test_parameters_without_a_line_are_listed():
    mapping = [Row(("a",), "x", Kind.COLUMN)]
    with pytest.raises(UserError, match=r"x2\.weight, layers\.0\.x\.weight"):
        match(mapping, ["x.weight", "x2.weight", "layers.0.x.weight"], Heads(1, 1))
