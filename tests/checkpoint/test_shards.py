"""Parts of tensors as boxes."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.checkpoint.shards import flat_boxes


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_boxes_of_a_flat_range_hold_just_its_elements_in_order(shape, data):
    elements = prod(shape)
    start = data.draw(st.integers(0, elements))
    stop = data.draw(st.integers(start, elements))
    tensor = torch.arange(elements).view(shape)
    found = []
    for offset, size in flat_boxes(shape, start, stop):
        assert len(offset) == len(size) == len(shape)
        where = tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))
        found += tensor[where].flatten().tolist()
    assert found == list(range(start, stop))
