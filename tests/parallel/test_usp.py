"""USP attention over real processes equals attention in one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.context import ContextParallel
from megatron_omni.parallel.state import initialize
from megatron_omni.parallel.usp import usp_attention
from megatron_omni.platforms import current_platform
from tests.distributed import run_distributed

layouts = pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)])


def join(ulysses: int, ring: int) -> ContextParallel:
    size = ulysses * ring
    initialize(ParallelConfig(context_parallel_size=size, ulysses_degree_in_cp=ulysses), seed=0)
    return ContextParallel.current()


@dataclass(frozen=True)
class Case:
    """Joint attention of a batch of prompts, to be shared between ranks."""

    prompts: tuple[int, ...]
    """Each sample's tokens; the batch is padded to the longest."""
    image: int
    text_output: bool = True
    """Whether text tokens are queries too."""
    dtype: torch.dtype = torch.float32

    @property
    def text(self) -> int:
        return max(self.prompts)

    @property
    def asking(self) -> slice:
        """The tokens that are queries."""
        return slice(0 if self.text_output else self.text, None)

    def masks(self) -> list[Tensor]:
        text = torch.arange(self.text) < torch.tensor(self.prompts)[:, None]
        return [text, torch.ones(len(self.prompts), self.image, dtype=torch.bool)]

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the output's gradient [tokens, B, heads, head_dim], the same on all ranks."""
        generator = torch.Generator().manual_seed(hash((self.prompts, self.image)))
        shape = (self.text + self.image, len(self.prompts), 4, 8)
        query, key, value, grad = (torch.randn(shape, generator=generator).to(self.dtype) for _ in range(4))
        return [query[self.asking], key, value, grad[self.asking]]


UNEVEN = Case(prompts=(5, 2, 9), image=14)
PROMPTS = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)
CASES = st.builds(Case, PROMPTS, st.integers(1, 23), st.booleans())


def attend_alone(case: Case) -> list[Tensor]:
    """Output and the gradients of query, key and value in one process, in float64."""
    query, key, value, grad = (x.double() for x in case.tensors())
    leaves = [x.requires_grad_() for x in (query, key, value)]
    mask = torch.cat(case.masks(), dim=1)[:, None, None]
    output = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in leaves), mask)
    output = output.permute(2, 0, 1, 3)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def own_tokens(case: Case, context: ContextParallel) -> tuple[Tensor, Tensor]:
    """This rank's queries among the queries, and its keys among the keys."""
    text, image = (torch.arange(total)[context.share(total)] for total in (case.text, case.image))
    keys = torch.cat((text, case.text + image))
    return keys if case.text_output else image, keys


def attend_together(
    case: Case, context: ContextParallel, attention: Callable[..., Tensor] = usp_attention
) -> list[Tensor]:
    """This rank's share of what `attend_alone` returns."""
    queries, keys = own_tokens(case, context)
    tensors = zip(case.tensors(), (queries, keys, keys, queries), strict=True)
    query, key, value, grad = (x[own] for x, own in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    image_sizes = context.sizes(case.image)
    joint_sizes = [sum(sizes) for sizes in zip(context.sizes(case.text), image_sizes, strict=True)]
    mask = None if len(set(case.prompts)) == 1 else context.joint_mask(case.masks())
    query_sizes = joint_sizes if case.text_output else image_sizes
    output = attention(query, key, value, mask, query_sizes, joint_sizes, context)
    output.backward(grad)
    return [output.detach(), *(x.grad for x in leaves)]


def largest_error(case: Case, context: ContextParallel) -> float:
    """Over output, gradients and all ranks, relative to the largest element of each tensor."""
    queries, keys = own_tokens(case, context)
    worst = torch.zeros((), dtype=torch.float64)
    pairs = zip(
        attend_together(case, context), attend_alone(case), (queries, queries, keys, keys), strict=True
    )
    for got, alone, own in pairs:
        assert (got.shape, got.dtype) == (alone[own].shape, case.dtype)
        # Scores with one key have no gradient: rounding is not measured by that.
        errors = (got - alone[own]).abs() / alone.abs().max().clamp_min(0.1)
        worst = torch.cat((errors.flatten(), worst[None])).nan_to_num(nan=torch.inf).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def compare_many(ulysses: int, ring: int) -> None:
    context = join(ulysses, ring)

    # All ranks see the same error, so all go on to the same case.
    @settings(
        max_examples=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @example(UNEVEN)
    @example(Case(prompts=(7,), image=13))
    @example(Case(prompts=(1, 1), image=1))
    @example(Case(prompts=(0, 3), image=2, text_output=False))
    @example(Case(prompts=(0, 3), image=0))
    @given(CASES)
    def equals_one_process(case: Case) -> None:
        assert largest_error(case, context) < 4e-6
        assert largest_error(replace(case, dtype=torch.bfloat16), context) < 1.5e-2

    equals_one_process()


@layouts
def test_outputs_and_gradients_equal_one_process(ulysses: int, ring: int):
    run_distributed(compare_many, ulysses * ring, ulysses, ring)


def repeat(ulysses: int, ring: int) -> list[list[Tensor]]:
    context = join(ulysses, ring)
    sampled = []

    def sample_first(*args) -> Tensor:
        with torch.inference_mode():
            sampled.append(usp_attention(*args))
        return usp_attention(*args)

    def recompute(query: Tensor, key: Tensor, value: Tensor, *args) -> Tensor:
        return tensor_parallel.checkpoint(lambda *qkv: usp_attention(*qkv, *args), False, query, key, value)

    results = [attend_together(UNEVEN, context, way) for way in (usp_attention, sample_first, recompute)]
    return [*results, [sampled[0], *results[0][1:]]]


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (1, 2)])
def test_repeated_recomputed_and_without_gradients_the_same_bits(ulysses: int, ring: int):
    for first, *others in run_distributed(repeat, ulysses * ring, ulysses, ring):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


Event = tuple[str, int]


def record(ulysses: int, ring: int) -> list[Event]:
    """What happens in a forward and a backward: calls of the kernel, and elements sent to other ranks."""
    context = join(ulysses, ring)
    events: list[Event] = []

    def spy(owner: object, name: str, elements: Callable[..., int]) -> None:
        function = getattr(owner, name)

        def spied(*args, **kwargs):
            events.append((name, elements(*args, **kwargs)))
            return function(*args, **kwargs)

        setattr(owner, name, spied)

    def to_others(output: Tensor, x: Tensor, *, input_split_sizes, group, **_) -> int:
        return x.numel() - input_split_sizes[group.rank()] * x[0].numel()

    spy(dist, "all_to_all_single", to_others)
    spy(dist, "batch_isend_irecv", lambda ops: sum(op.tensor.numel() for op in ops if op.op is dist.isend))
    for name in ("forward", "backward"):
        spy(current_platform().attention, name, lambda *_: 0)
    attend_together(UNEVEN, context)
    return events


def least(rank: int, ulysses: int, ring: int) -> list[Event]:
    """The same by arithmetic; an exchange in the ring begins before the computation it overlaps with."""
    context = ContextParallel(rank, ulysses * ring)
    sizes = [sum(pair) for pair in zip(context.sizes(UNEVEN.text), context.sizes(UNEVEN.image), strict=True)]
    blocks = [sum(sizes[i : i + ulysses]) for i in range(0, len(sizes), ulysses)]
    block = rank // ulysses
    token = len(UNEVEN.prompts) * 4 * 8 // ulysses  # elements of a token in one rank's heads

    def swap(tensors: int, tokens: int) -> list[Event]:
        return [("all_to_all_single", tensors * tokens * token)] if ulysses > 1 else []

    def send(owner: int) -> list[Event]:
        return [("batch_isend_irecv", 2 * blocks[owner] * token)]

    own_tokens, neighbours_tokens = (ulysses - 1) * sizes[rank], blocks[block] - sizes[rank]
    forward, backward = [], []
    for step in range(ring) if ring > 1 else ():
        owner = (block - step) % ring
        pass_on = send(owner) if step < ring - 1 else []
        return_gradients = send(owner) if step > 0 else []
        forward += [*pass_on, ("forward", 0)]
        backward += [*pass_on, ("backward", 0), *return_gradients]
    return [
        *swap(3, own_tokens),
        *forward,
        *swap(1, neighbours_tokens),
        *swap(1, own_tokens),
        *backward,
        *swap(3, neighbours_tokens),
    ]


@layouts
def test_each_rank_sends_the_least_and_before_it_computes(ulysses: int, ring: int):
    for rank, events in enumerate(run_distributed(record, ulysses * ring, ulysses, ring)):
        assert events == least(rank, ulysses, ring)
