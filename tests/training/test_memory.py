"""The estimate of memory against real tensors: counted, and seen by autograd through Megatron's schedules."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_omni.algorithms.base import TrainingBatch
from megatron_omni.config.schema import Config, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_omni.models.base import ImageSize
from megatron_omni.models.layers.lora import add_adapters
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import Layout, form_groups
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.training.memory import SavedTensors, Workload, estimate, peak_in_flight
from megatron_omni.training.optimizer import Optimization, build_optimization
from megatron_omni.training.update import Updater
from tests.distributed import run_distributed
from tests.models.test_qwen_image import build_random
from tests.models.test_qwen_image_layouts import WeightedSum

FULL = ModelConfig(recompute_granularity="full")
BLOCK = replace(FULL, recompute_method="block")
RECOMPUTED = [
    ModelConfig(),
    ModelConfig(recompute_granularity="selective"),
    FULL,
    replace(FULL, recompute_num_layers=2),
    BLOCK,
    replace(BLOCK, recompute_num_layers=3),
]
TP2 = ParallelConfig(tensor_model_parallel_size=2)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
CP2 = ParallelConfig(context_parallel_size=2)
BF16 = ModelConfig(bf16=True)
LAYERS, CHANNELS = 4, 16


def sizes(hidden: int) -> dict[str, object]:
    return {
        "num_layers": LAYERS,
        "attention_head_dim": 32,
        "num_attention_heads": hidden // 32,
        "joint_attention_dim": hidden,
        "axes_dims_rope": (8, 12, 12),
    }


def build(layout: Layout, config: Config, hidden: int) -> list[nn.Module]:
    chunks = []
    for number, stage in enumerate(layout.stages):
        chunk = build_random(config.model, config.parallel, stage, **sizes(hidden))
        chunk.vp_stage = number if layout.chunks > 1 else None
        chunks.append(chunk)
    if config.lora.lora_rank:
        add_adapters(chunks, MAPPING, config.lora, seed=0)
    return chunks


def train(layout: Layout, config: Config, optimization: Optimization, workload: Workload, hidden: int) -> int:
    """One update of the workload's size; returns the bytes of activations held at most."""
    torch.manual_seed(0)
    rows, size = workload.rows, ImageSize(1, workload.image_tokens)
    batches = [
        TrainingBatch(
            prompts=["prompt"] * rows,
            latents=torch.randn(rows, workload.image_tokens, CHANNELS),
            sigma=torch.rand(rows),
            weights=torch.ones(rows),
            target=torch.randn(rows, workload.image_tokens, CHANNELS),
        )
        for _ in range(workload.micro_batches)
    ]

    def embeddings(prompts: list[str]) -> list[Tensor]:
        return [torch.zeros(workload.text_tokens, hidden) for _ in prompts]

    guidance = Guidance()
    policy = ForwardPipeline(optimization.chunks, guidance.forward, torch.float32)
    updater = Updater(optimization, policy, WeightedSum(), guidance, embeddings, "", size, None, layout)
    weights = [weight for chunk in optimization.chunks for weight in chunk.parameters()]
    with SavedTensors(weights) as saved:
        for chunk in optimization.chunks:
            if not chunk.module.post_process:  # the schedule holds what a stage hands on
                chunk.module.register_forward_hook(lambda chunk, args, output: hold(saved, output))
        updater.step(batches)
    assert saved.now == 0
    return saved.peak


def hold(saved: SavedTensors, output: Tensor) -> None:
    size = output.numel() * output.element_size()
    saved._count(id(output), size, 1)
    weakref.finalize(output, saved._count, id(output), size, -1)


def compare(layout: Layout, config: Config, hidden: int, workload: Workload) -> tuple[int, int]:
    """Bytes of activations: estimated, and held in an update."""
    config.optimizer.lr = 0.0
    chunks = build(layout, config, hidden)
    estimated = estimate(config, layout, chunks, workload).activations
    optimization = build_optimization(config, chunks)
    return estimated, train(layout, config, optimization, workload, hidden)


def workload(hidden: int, rows: int, text: int, image: int, micro_batches: int = 2) -> Workload:
    return Workload(rows, text, image, hidden, CHANNELS, micro_batches)


def check_activations(cases: list[tuple[ParallelConfig, ModelConfig, LoraConfig, int, Workload]]) -> None:
    dist.init_process_group("gloo")
    for parallel, model, lora, hidden, work in cases:
        layout = form_groups(parallel, seed=0, device=torch.device("cpu"))
        config = Config(model=model, parallel=parallel, lora=lora)
        estimated, held = compare(layout, config, hidden, work)
        assert estimated == pytest.approx(held, rel=0.1), (parallel, model, lora, hidden, work)
        parallel_state.destroy_model_parallel()


def test_activations_are_what_autograd_holds():
    small, wide = (128, workload(128, 3, 17, 60)), (512, workload(512, 1, 40, 500))
    much_text = (256, workload(256, 1, 300, 40))
    none, lora = LoraConfig(), LoraConfig(lora_rank=4)
    cases = [(ParallelConfig(), model, none, *small) for model in RECOMPUTED]
    cases += [(ParallelConfig(), model, none, *much_text) for model in (ModelConfig(), FULL)]
    cases += [(ParallelConfig(), model, none, *wide) for model in (ModelConfig(), RECOMPUTED[-1])]
    cases += [(ParallelConfig(), model, lora, *small) for model in (ModelConfig(), FULL, BF16)]
    run_distributed(check_activations, 1, cases)


def test_activations_are_what_autograd_holds_at_every_layout():
    shape = (128, workload(128, 2, 45, 150, micro_batches=4))
    layouts = [
        TP2,
        replace(TP2, sequence_parallel=True),
        CP2,
        replace(CP2, ulysses_degree_in_cp=1),
        PP2,
        replace(PP2, num_virtual_stages_per_pipeline_rank=2),
    ]
    cases = [(layout, model, LoraConfig(), *shape) for layout in layouts for model in (ModelConfig(), FULL)]
    cases += [(layout, RECOMPUTED[1], LoraConfig(), *shape) for layout in (TP2, CP2)]
    run_distributed(check_activations, 2, cases)
    pp4 = ParallelConfig(pipeline_model_parallel_size=4)
    run_distributed(
        check_activations, 4, [(pp4, model, LoraConfig(), *shape) for model in (ModelConfig(), FULL)]
    )


def test_saved_tensors_count_while_autograd_holds_them_and_each_storage_once():
    weight, x = torch.ones(5, requires_grad=True), torch.ones(3, 5, requires_grad=True)
    with SavedTensors([weight]) as saved:
        y = (x * weight).exp()  # x, and the result
        z = y[:1] * y[1:2]  # two views of the result
        assert saved.now == 2 * 15 * 4
        z.sum().backward()
        assert saved.now == 0
    assert saved.peak == 2 * 15 * 4


@dataclass(frozen=True)
class Place:
    """What `peak_in_flight` takes of a layout."""

    pipeline_size: int
    pipeline_rank: int


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_a_stage_holds_a_micro_batch_for_each_stage_from_it_on(stages: int, micro_batches: int):
    for rank in range(stages):
        held = peak_in_flight([10], Place(stages, rank), micro_batches)
        assert held == 10 * min(stages - rank, micro_batches)


DISTRIBUTED = OptimizerConfig(use_distributed_optimizer=True)
COUNTED = [
    (ParallelConfig(), ModelConfig(), OptimizerConfig(), 0),
    (ParallelConfig(), BF16, OptimizerConfig(), 0),
    (ParallelConfig(), BF16, OptimizerConfig(grad_reduce_in_bf16=True), 0),
    (ParallelConfig(), ModelConfig(), DISTRIBUTED, 0),
    (ParallelConfig(), BF16, DISTRIBUTED, 0),
    (ParallelConfig(), BF16, DISTRIBUTED, 4),
    (ParallelConfig(), BF16, replace(DISTRIBUTED, optimizer_cpu_offload=True), 0),
    (ParallelConfig(), BF16, OptimizerConfig(), 4),
    (TP2, BF16, OptimizerConfig(), 0),
    (PP2, ModelConfig(), OptimizerConfig(), 4),
    (CP2, BF16, DISTRIBUTED, 0),
]


def test_weights_gradients_and_optimizer_state_are_counted_exactly():
    """A share of the distributed optimizer's state is even but for padding; all shares together are exact."""
    run_distributed(check_counted, 2, COUNTED)


def check_counted(cases: list[tuple[ParallelConfig, ModelConfig, OptimizerConfig, int]]) -> None:
    dist.init_process_group("gloo")
    for parallel, model, optimizer, rank in cases:
        layout = form_groups(parallel, seed=0, device=torch.device("cpu"))
        config = Config(model=model, parallel=parallel, optimizer=optimizer, lora=LoraConfig(lora_rank=rank))
        work = workload(128, 1, 8, 8)
        chunks = build(layout, config, hidden=128)
        estimated = estimate(config, layout, chunks, work)
        optimization = build_optimization(config, chunks)
        train(layout, config, optimization, work, hidden=128)
        weights = [weight for chunk in chunks for weight in chunk.parameters()]
        assert estimated.parameters == size(weights)
        assert estimated.gradients == size(w.main_grad for w in weights if w.requires_grad)
        counted = estimated.optimizer + estimated.host
        real = size(optimizer_state(optimization, weights))
        total = torch.tensor(real)
        dist.all_reduce(total)
        if optimizer.use_distributed_optimizer:
            assert counted == pytest.approx(real, rel=0.05)
            assert 2 * counted == pytest.approx(total.item(), abs=32)
        else:
            assert counted == real
        assert bool(estimated.host) == optimizer.optimizer_cpu_offload
        parallel_state.destroy_model_parallel()


def optimizer_state(optimization: Optimization, weights: list[Tensor]) -> Iterator[Tensor]:
    """Moments, and masters that are not the model's own weights; no step counts."""
    own = {weight.untyped_storage()._cdata for weight in weights}
    for megatron_optimizer in optimization.optimizer.chained_optimizers:
        adam = megatron_optimizer.optimizer
        for state in adam.state.values():
            yield from (tensor for tensor in state.values() if tensor.dim())
        yield from getattr(adam, "staging", {}).values()
        for group in adam.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage()._cdata not in own)


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
