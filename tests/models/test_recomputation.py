"""Recomputed activations: every granularity and method gives the bits of none, at every layout."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.models.base import ImageSize
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import Layout, form_groups
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.training.optimizer import build_optimization
from megatron_omni.training.update import Updater
from tests.distributed import run_distributed
from tests.models.builders import qwen_image, to_megatron
from tests.models.test_qwen_image import build, build_random, gradients, make_batch
from tests.models.test_qwen_image_layouts import LAYERS, WeightedSum, embeddings, lossless, make_batches

FULL = ModelConfig(recompute_granularity="full")
RECOMPUTED = [
    FULL,
    replace(FULL, recompute_num_layers=2),
    replace(FULL, recompute_method="block"),
    replace(FULL, recompute_method="block", recompute_num_layers=2),
    replace(FULL, recompute_method="block", recompute_num_layers=99),
    ModelConfig(recompute_granularity="selective"),
]
LAYOUTS = {
    "tp2-sp": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelConfig(pipeline_model_parallel_size=2),
    "pp2-interleaved": ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    "cp2-ulysses": ParallelConfig(context_parallel_size=2),
    "cp2-ring": ParallelConfig(context_parallel_size=2, ulysses_degree_in_cp=1),
}


@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_recomputation_gives_the_same_bits(recomputed: ModelConfig):
    batch = make_batch(ImageSize(3, 4), [6, 3])
    velocity, grads = gradients(build(), batch)
    again, grads_again = gradients(build(recomputed), batch)
    assert torch.equal(velocity, again)
    assert grads.keys() == grads_again.keys()
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        (ModelConfig(), "0 1 2 3 4"),
        (ModelConfig(recompute_granularity="selective"), "0 1 2 3 4"),
        (FULL, "0* 1* 2* 3* 4*"),
        (replace(FULL, recompute_num_layers=2), "0-1* 2-3* 4*"),
        (replace(FULL, recompute_method="block"), "0* 1 2 3 4"),
        (replace(FULL, recompute_method="block", recompute_num_layers=3), "0* 1* 2* 3 4"),
    ],
)
def test_groups_are_those_of_megatrons_methods(settings: ModelConfig, groups: str):
    model = build_random(settings, num_layers=5)
    number = {layer: name for name, layer in model.layers.items()}
    described = [
        "-".join(number[layer] for layer in layers) + "*" * recomputed
        for layers, recomputed in model.layer_groups()
    ]
    assert " ".join(described) == groups


def test_recomputation_gives_the_same_bits_at_every_layout():
    run_distributed(check_layouts, 2)


def check_layouts() -> None:
    dist.init_process_group("gloo")
    for name, parallel in LAYOUTS.items():
        layout = form_groups(parallel, seed=0, device=torch.device("cpu"))
        expected = update(layout, parallel, ModelConfig())
        assert all(grad.isfinite().all() for grad in expected.values())
        assert sum(grad.any() for grad in expected.values()) > len(expected) // 2
        for recomputed in RECOMPUTED:
            again = update(layout, parallel, recomputed)
            assert all(torch.equal(expected[each], again[each]) for each in expected), (name, recomputed)
        parallel_state.destroy_model_parallel()


def update(layout: Layout, parallel: ParallelConfig, model: ModelConfig) -> dict[str, Tensor]:
    """Gradients of an update through Megatron's schedule."""
    size = ImageSize(3, 5)
    diffusers_model = qwen_image(num_layers=LAYERS)
    chunks = []
    for number, stage in enumerate(layout.stages):
        chunk = build_random(model, parallel, stage, num_layers=LAYERS)
        chunk.vp_stage = number if layout.chunks > 1 else None
        chunk.load_state_dict(to_megatron(diffusers_model.state_dict(), chunk, MAPPING))
        chunks.append(chunk)
    optimization = build_optimization(lossless(parallel), chunks)
    guidance = Guidance()
    policy = ForwardPipeline(chunks, guidance.forward, torch.float32)
    updater = Updater(optimization, policy, WeightedSum(), guidance, embeddings, "9-9-1", size, None, layout)
    updater.step(make_batches(size, [[7, 4], [2, 3], [5, 5], [6, 1]]))
    return {
        name: parameter.main_grad.clone()
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }
