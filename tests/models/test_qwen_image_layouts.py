"""Qwen-Image at every layout of four processes against diffusers: sampling passes, velocities, gradients."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from megatron.core import parallel_state
from torch import Tensor

from megatron_omni.algorithms.base import Loss, TrainingBatch
from megatron_omni.config.schema import Config, ModelConfig, ParallelConfig
from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.models.qwen_image.model import QwenImageModel
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import Layout, form_groups
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.training.optimizer import build_optimization
from megatron_omni.training.update import Updater
from tests.distributed import run_distributed
from tests.models.builders import qwen_image, to_megatron
from tests.models.test_qwen_image import TOLERANCE, build_random, check_gradients, relative_error

LAYERS = 5

PLAIN = ParallelConfig()
TP2 = ParallelConfig(tensor_model_parallel_size=2)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
CP2 = ParallelConfig(context_parallel_size=2)
CP4 = ParallelConfig(context_parallel_size=4)
TWO_CHUNKS = {"num_virtual_stages_per_pipeline_rank": 2}
RING = {"ulysses_degree_in_cp": 1}

LAYOUTS = {
    "tensor": {
        "dp4": PLAIN,
        "tp2-dp2": TP2,
        "tp2-sp-dp2": replace(TP2, sequence_parallel=True),
        "tp4": replace(TP2, tensor_model_parallel_size=4),
        "tp4-sp": replace(TP2, tensor_model_parallel_size=4, sequence_parallel=True),
    },
    "pipeline": {
        "pp2-dp2": PP2,
        "pp2-interleaved-dp2": replace(PP2, **TWO_CHUNKS),
        "pp4": replace(PP2, pipeline_model_parallel_size=4),
        "tp2-pp2": replace(TP2, pipeline_model_parallel_size=2),
        "tp2-sp-pp2-interleaved": replace(
            TP2, sequence_parallel=True, pipeline_model_parallel_size=2, **TWO_CHUNKS
        ),
    },
    "context": {
        "cp2-ulysses-dp2": CP2,
        "cp2-ring-dp2": replace(CP2, **RING),
        "cp4-ulysses": CP4,
        "cp4-ring": replace(CP4, **RING),
        "cp4-usp": replace(CP4, ulysses_degree_in_cp=2),
    },
    "mixed": {
        "tp2-cp2": replace(TP2, context_parallel_size=2),
        "tp2-sp-cp2-ring": replace(TP2, sequence_parallel=True, context_parallel_size=2, **RING),
        "pp2-cp2-ulysses": replace(PP2, context_parallel_size=2),
        "pp2-interleaved-cp2-ring": replace(PP2, context_parallel_size=2, **RING, **TWO_CHUNKS),
    },
}

# Sizes that nothing divides, prompts of unequal length, fewer tokens than processes, batches of 1 to 3.
CASES = [
    (ImageSize(3, 5), [[7, 4, 9], [2, 3, 1], [5, 5, 8], [6, 1, 6]]),
    (ImageSize(3, 4), [[8, 8]] * 4),
    (ImageSize(1, 3), [[2], [1], [5], [3]]),
]


def make_batches(size: ImageSize, lengths: list[list[int]]) -> list[TrainingBatch]:
    """A prompt is called by its number and length."""
    torch.manual_seed(1)
    tokens = size.height * size.width
    return [
        TrainingBatch(
            prompts=[f"{number}-{row}-{length}" for row, length in enumerate(each)],
            latents=torch.randn(len(each), tokens, 16),
            sigma=torch.rand(len(each)),
            weights=torch.ones(len(each)),
            target=torch.randn(len(each), tokens, 16),
        )
        for number, each in enumerate(lengths)
    ]


def embeddings(prompts: list[str]) -> list[Tensor]:
    def embedding(prompt: str) -> Tensor:
        number, row, length = map(int, prompt.split("-"))
        return torch.randn(length, 24, generator=torch.Generator().manual_seed(100 * number + row))

    return [embedding(prompt) for prompt in prompts]


class WeightedSum:
    """The loss is the sum of velocity · target."""

    def __init__(self):
        self.velocities: list[Tensor] = []

    def loss(self, batch: TrainingBatch, velocity: Tensor) -> Loss:
        self.velocities.append(velocity.detach().clone())
        value = (velocity * batch.target).sum()
        return Loss(value, {"train/loss": value}, {"largest": velocity.max()})


def oracle(
    model: QwenImageTransformer2DModel, batches: list[TrainingBatch], size: ImageSize
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """diffusers' velocities, and the gradients of the mean of the batches' losses."""
    model.zero_grad()
    velocities = []
    for batch in batches:
        condition = TextCondition.pad(embeddings(batch.prompts))
        velocity = model(
            hidden_states=batch.latents,
            timestep=batch.sigma,
            encoder_hidden_states=condition.embeddings,
            encoder_hidden_states_mask=condition.mask,
            img_shapes=[[(1, size.height, size.width)]] * len(batch.sigma),
            return_dict=False,
        )[0]
        ((velocity * batch.target).sum() / len(batches)).backward()
        velocities.append(velocity.detach())
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return velocities, grads


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYOUTS)
def test_every_layout_gives_diffusers_outputs_and_gradients(family: str):
    run_distributed(check_layouts, 4, LAYOUTS[family], timeout=90)


def check_layouts(layouts: dict[str, ParallelConfig]) -> None:
    model = qwen_image(num_layers=LAYERS)
    truths = [(make_batches(*case), case[0]) for case in CASES]
    truths = [(batches, size, *oracle(model, batches, size)) for batches, size in truths]
    dist.init_process_group("gloo")
    for name, parallel in layouts.items():
        layout = form_groups(parallel, seed=0, device=torch.device("cpu"))
        try:
            for truth in truths:
                check_layout(layout, parallel, model, *truth)
        except Exception as error:
            error.add_note(f"in layout {name}")
            raise
        parallel_state.destroy_model_parallel()


def check_layout(
    layout: Layout,
    parallel: ParallelConfig,
    diffusers_model: QwenImageTransformer2DModel,
    batches: list[TrainingBatch],
    size: ImageSize,
    velocities: list[Tensor],
    grads: dict[str, Tensor],
) -> None:
    share = len(batches) // layout.data_size
    here = slice(layout.data_rank * share, (layout.data_rank + 1) * share)
    chunks = build_chunks(layout, parallel, diffusers_model)
    guidance = Guidance()
    policy = ForwardPipeline(chunks, guidance.forward, torch.float32)
    optimization = build_optimization(lossless(parallel), chunks)
    algorithm = WeightedSum()
    updater = Updater(optimization, policy, algorithm, guidance, embeddings, "9-9-1", size, None, layout)

    def lane(batch: TrainingBatch):
        return (yield updater._inputs(batch))

    sampled = list(policy.run(map(lane, batches[here])))
    result = updater.step(batches[here])

    for ours, theirs in zip(sampled, velocities[here], strict=True):
        assert relative_error(ours, theirs) < TOLERANCE
    if layout.stages[-1].is_last:
        assert all(torch.equal(*pair) for pair in zip(sampled, algorithm.velocities, strict=True))
    losses = [(v * b.target).sum() for v, b in zip(velocities[here], batches[here], strict=True)]
    assert abs(result.means["train/loss"] - sum(losses).item() / share) < 1e-3
    assert abs(result.maxima["largest"] - max(v.max() for v in velocities[here])) < 1e-5
    for chunk in chunks:
        reduced = {name: p.main_grad for name, p in chunk.named_parameters() if p.requires_grad}
        check_gradients(chunk, reduced, grads)


def build_chunks(
    layout: Layout, parallel: ParallelConfig, diffusers_model: QwenImageTransformer2DModel
) -> list[QwenImageModel]:
    chunks = []
    for number, stage in enumerate(layout.stages):
        chunk = build_random(ModelConfig(), parallel, stage, num_layers=LAYERS)
        chunk.vp_stage = number if layout.chunks > 1 else None
        chunk.load_state_dict(to_megatron(diffusers_model.state_dict(), chunk, MAPPING))
        chunks.append(chunk)
    return chunks


def lossless(parallel: ParallelConfig) -> Config:
    """A run whose optimizer leaves weights and gradients as they are."""
    config = Config(parallel=parallel)
    config.optimizer.lr = config.optimizer.clip_grad = 0.0
    return config
