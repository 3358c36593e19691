"""Attention kernels: outputs, log-sum-exps and gradients, and that parts of the keys merge to the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_omni.platforms import current_platform
from megatron_omni.platforms.attention import AttentionKernel, PlainAttention

DEVICE = current_platform().name
KERNELS = [PlainAttention(), current_platform().attention]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)


def inputs(
    queries: int, keys: int, dtype: torch.dtype = torch.float32, head_dim: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the output's gradient, of 3 samples and 2 heads."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    lengths = (queries, keys, keys, queries)
    drawn = (torch.randn(3, 2, length, head_dim, generator=generator) for length in lengths)
    return tuple(x.to(DEVICE, dtype) for x in drawn)


def some_masked(keys: int) -> Tensor:
    """A different part of each sample's keys, never all."""
    mask = torch.arange(keys) % torch.tensor([[2], [3], [keys + 1]]) != 1
    mask[:, 0] = True
    return mask.to(DEVICE)


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Output, lse and the gradients of query, key and value, in float64."""
    query, key, value = (x.double().requires_grad_() for x in (query, key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -math.inf)
    output = scores.softmax(-1) @ value
    output.backward(grad.double())
    return [output.detach(), scores.detach().logsumexp(-1), query.grad, key.grad, value.grad]


def error(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).abs().max() / truth.abs().max()).item()


@kernels
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (33, 600), (130, 65)])
def test_output_lse_and_gradients_are_exact_up_to_rounding(
    kernel: AttentionKernel, masked: bool, dtype: torch.dtype, tolerance: float, shape: tuple[int, int]
):
    query, key, value, grad = inputs(*shape, dtype)
    mask = some_masked(shape[1]) if masked else None
    output, lse = kernel.forward(query, key, value, mask)
    grads = kernel.backward(grad, query, key, value, mask, output, lse)
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    assert {x.dtype for x in grads} == {dtype}
    for got, truth in zip([output, lse, *grads], exact(query, key, value, mask, grad), strict=True):
        assert got.shape == truth.shape
        if truth.abs().max() > 1e-9:  # with one key, scores have no gradient
            assert error(got, truth) < tolerance


@kernels
def test_a_sample_that_may_see_no_key_has_no_lse_and_no_gradient(kernel: AttentionKernel):
    query, key, value, grad = inputs(5, 7)
    mask = some_masked(7)
    mask[1] = False
    output, lse = kernel.forward(query, key, value, mask)
    assert output.isfinite().all()
    assert (lse[1] == -math.inf).all()
    grads = kernel.backward(grad, query, key, value, mask, output, lse)
    seeing = torch.tensor([0, 2], device=DEVICE)
    truth = exact(*(x[seeing] for x in (query, key, value, mask, grad)))
    for got, expected in zip([output, lse, *grads], truth, strict=True):
        assert error(got[seeing], expected) < 2e-6
    assert not any(x[1].any() for x in grads)


@kernels
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_the_layout_in_memory_does_not_matter(kernel: AttentionKernel, layout: tuple[int, ...]):
    query, key, value, grad = inputs(5, 7)
    output, lse = kernel.forward(query, key, value, None)
    truth = [output, lse, *kernel.backward(grad, query, key, value, None, output, lse)]

    def laid_out(x: Tensor) -> Tensor:
        dims = [dim for dim in layout if dim < x.dim()]
        return x.permute(dims).contiguous().permute([dims.index(dim) for dim in range(x.dim())])

    query, key, value, grad = (laid_out(x) for x in (query, key, value, grad))
    output, lse = kernel.forward(query, key, value, None)
    grads = kernel.backward(grad, query, key, value, None, laid_out(output), laid_out(lse))
    for got, expected in zip([output, lse, *grads], truth, strict=True):
        assert error(got, expected.double()) < 1e-6


@kernels
@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (0, 0)])
def test_no_query_or_no_key_is_allowed(kernel: AttentionKernel, shape: tuple[int, int]):
    query, key, value, grad = inputs(*shape)
    output, lse = kernel.forward(query, key, value, None)
    assert output.shape == query.shape
    assert (lse == -math.inf).all()
    grads = kernel.backward(grad, query, key, value, None, output, lse)
    assert [x.shape for x in grads] == [query.shape, key.shape, value.shape]
    assert not any(x.any() for x in grads)


@kernels
@settings(max_examples=30)
@given(data=st.data())
def test_gradients_of_parts_of_the_keys_add_up(kernel: AttentionKernel, data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any))
    keys = sum(sizes)
    rows = data.draw(st.lists(st.integers(0, 2**keys - 1), min_size=3, max_size=3))
    mask = torch.tensor([[bool(row >> i & 1) for i in range(keys)] for row in rows], device=DEVICE)
    mask[:, data.draw(st.integers(0, keys - 1))] = True
    query, key, value, grad = inputs(6, keys)
    output, lse, *truth = exact(query, key, value, mask, grad)
    parts = [
        kernel.backward(grad, query, *part, output.float(), lse.float())
        for part in zip(key.split(sizes, 2), value.split(sizes, 2), mask.split(sizes, 1), strict=True)
    ]
    by_tensor = list(zip(*parts, strict=True))
    grads = [sum(by_tensor[0]), torch.cat(by_tensor[1], 2), torch.cat(by_tensor[2], 2)]
    for got, expected in zip(grads, truth, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
