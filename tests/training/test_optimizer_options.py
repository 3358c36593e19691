"""Every way to run the optimizer gives the training of the plain one."""

from functools import partial

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_omni.parallel.state import initialize
from megatron_omni.platforms.host_adam import HostAdam
from megatron_omni.training import optimizer
from tests.checkpoint import toy_megatron as toy
from tests.distributed import run_distributed

DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True}
BOTH = DISTRIBUTED | OVERLAPPED | {"overlap_param_gather": True}
OFFLOADED = DISTRIBUTED | {"optimizer_cpu_offload": True}
UNCLIPPED = {"clip_grad": 0.0}
REDUCED_IN_BF16 = {"grad_reduce_in_bf16": True}


def build(tensor_parallel: int, bf16: bool, layout, flags: dict):
    config = toy.config(tensor_parallel, bf16, **flags)
    return optimizer.build_optimization(config, toy.build_chunks(config, layout, layers=4))


def train(tensor_parallel: int, bf16: bool, options: list[dict]):
    """Gradient norms and last weights with each. Buckets are small, so that there are several to overlap."""
    small = partial(optimizer.DistributedDataParallelConfig, bucket_size=40_000)
    optimizer.DistributedDataParallelConfig = small
    layout = initialize(toy.config(tensor_parallel).parallel, seed=0)
    results = []
    for flags in options:
        run = build(tensor_parallel, bf16, layout, flags)
        assert not flags.get("overlap_grad_reduce") or len(run.chunks[0].buffers[0].buckets) > 2
        results.append((toy.train(run, range(4)), toy.weights(run)))
    return results


def assert_equal(results: tuple, others: tuple, rel: float = 0.0, atol: float = 0.0) -> None:
    (norms, weights), (other_norms, other_weights) = results, others
    assert norms == pytest.approx(other_norms, rel=rel, abs=0)
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "world_size, tensor_parallel, bf16",
    [(1, 1, False), (2, 1, False), (2, 1, True), (4, 1, False), (4, 2, True)],
)
def test_sharing_and_overlap_change_nothing_but_the_order_of_sums(world_size, tensor_parallel, bf16):
    """Those of gradient norms: without clipping, weights are bit-equal on one or two processes."""
    rounding = 1e-3 if bf16 else 1e-6
    sums_of_two = world_size // tensor_parallel <= 2
    options = [
        {},
        OVERLAPPED,
        DISTRIBUTED,
        BOTH,
        *({**each, **UNCLIPPED} for each in ({}, DISTRIBUTED, BOTH)),
    ]
    for results in run_distributed(train, world_size, tensor_parallel, bf16, options):
        plain, overlapped, distributed, both, unclipped, *shared = results
        for each in (overlapped, distributed, both):
            assert_equal(each, plain, rel=1e-6, atol=rounding)
        for each in shared:
            assert_equal(each, unclipped, rel=1e-6, atol=0 if sums_of_two else rounding)
        if sums_of_two:
            assert_equal(overlapped, plain)


@pytest.mark.parametrize("world_size, tensor_parallel", [(1, 1), (4, 2)])
def test_state_in_host_memory_and_bfloat16_gradients_train_alike(world_size, tensor_parallel):
    options = [DISTRIBUTED, OFFLOADED, BOTH | OFFLOADED, REDUCED_IN_BF16, DISTRIBUTED | REDUCED_IN_BF16]
    for results in run_distributed(train, world_size, tensor_parallel, True, options):
        plain, offloaded, all_options, *reduced = results
        assert_equal(offloaded, plain, rel=1e-4, atol=1e-3)
        assert_equal(all_options, plain, rel=1e-4, atol=1e-3)
        for each in reduced:
            assert_equal(each, plain, rel=2e-2, atol=2e-2)
            assert each[0] != plain[0]


def states(flags: dict) -> tuple[int, int, set[str]]:
    """Elements that this process's optimizer updates, of the model's; and what holds their state."""
    layout = initialize(toy.config().parallel, seed=0)
    run = build(1, True, layout, flags)
    toy.train(run, range(1))
    (part,) = run.optimizer.chained_optimizers
    held = sum(main.numel() for group in run.optimizer.param_groups for main in group["params"])
    total = sum(parameter.numel() for parameter in run.chunks[0].parameters())
    return held, total, {type(part).__name__, type(part.optimizer).__name__}


@pytest.mark.parametrize("flags", [{}, DISTRIBUTED, OFFLOADED], ids=["plain", "distributed", "offloaded"])
def test_processes_share_the_state_that_a_setting_says_they_share(flags):
    results = run_distributed(states, 2, flags)
    held, totals, kinds = zip(*results, strict=True)
    if not flags:
        assert held == totals
        return
    assert sum(held) == totals[0] and max(held) < 0.6 * totals[0]
    assert DistributedOptimizer.__name__ in kinds[0]
    assert (HostAdam.__name__ in kinds[0]) == ("optimizer_cpu_offload" in flags)
