"""Qwen-Image's transformer against `diffusers.QwenImageTransformer2DModel`: outputs and gradients."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_omni.checkpoint.distributed import Checkpointer
from megatron_omni.config.schema import Config, ModelConfig, ParallelConfig
from megatron_omni.errors import UserError
from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.models.layers.linear import backend
from megatron_omni.models.layers.rotary import rotations
from megatron_omni.models.qwen_image.config import QwenImageConfig, transformer_config
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.models.qwen_image.model import QwenImageModel, positions
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.stages import WHOLE_MODEL, Stage
from megatron_omni.parallel.state import initialize
from megatron_omni.training.optimizer import build_optimization
from tests.distributed import run_distributed
from tests.models.builders import QWEN_IMAGE_SIZES, qwen_image, to_megatron

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Batch:
    latents: Tensor
    sigma: Tensor
    condition: TextCondition
    size: ImageSize
    weight: Tensor
    """The loss is the sum of weight · velocity."""

    def rows(self, here: slice) -> "Batch":
        condition = TextCondition(self.condition.embeddings[here], self.condition.mask[here])
        return Batch(self.latents[here], self.sigma[here], condition, self.size, self.weight[here])


def make_batch(size: ImageSize, lengths: list[int]) -> Batch:
    torch.manual_seed(1)
    batch, tokens = len(lengths), size.height * size.width
    return Batch(
        latents=torch.randn(batch, tokens, 16),
        sigma=torch.rand(batch),
        condition=TextCondition.pad([torch.randn(length, 24) for length in lengths]),
        size=size,
        weight=torch.randn(batch, tokens, 16),
    )


def run_oracle(model: torch.nn.Module, batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(
        hidden_states=batch.latents.to(dtype),
        timestep=batch.sigma.to(dtype),
        encoder_hidden_states=batch.condition.embeddings.to(dtype),
        encoder_hidden_states_mask=batch.condition.mask,
        img_shapes=[[(1, batch.size.height, batch.size.width)]] * len(batch.sigma),
        return_dict=False,
    )[0]


def oracle(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """diffusers' velocity and gradients, under diffusers' names."""
    model = qwen_image()
    velocity = run_oracle(model, batch)
    (velocity * batch.weight).sum().backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return velocity.detach(), grads


def build_random(
    model: ModelConfig | None = None,
    parallel: ParallelConfig | None = None,
    stage: Stage = WHOLE_MODEL,
    **sizes,
) -> QwenImageModel:
    qwen = QwenImageConfig(**(QWEN_IMAGE_SIZES | sizes))
    config = transformer_config(qwen, model or ModelConfig(), parallel or ParallelConfig())
    return QwenImageModel(qwen, config, backend("local"), stage)


def build(model: ModelConfig | None = None, parallel: ParallelConfig | None = None) -> QwenImageModel:
    """The Megatron model with this rank's share of the weights of `qwen_image()`."""
    megatron = build_random(model, parallel)
    megatron.load_state_dict(to_megatron(qwen_image().state_dict(), megatron, MAPPING))
    return megatron


def run(model: torch.nn.Module, batch: Batch) -> Tensor:
    return model(batch.latents, batch.sigma, batch.condition, batch.size)


def gradients(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    velocity = run(model, batch)
    (velocity * batch.weight).sum().backward()
    return velocity.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def relative_error(value: Tensor, truth: Tensor) -> float:
    return ((value - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def check_gradients(model: QwenImageModel, grads: dict[str, Tensor], hf_truth: dict[str, Tensor]) -> None:
    """Every parameter's gradient. Frozen ones, missing in `grads`, must have none in diffusers either."""
    for name, expected in to_megatron(hf_truth, model, MAPPING).items():
        if expected.any():
            assert relative_error(grads[name], expected) < TOLERANCE, name
        else:
            assert name not in grads or not grads[name].any(), name


CASES = [
    (ImageSize(4, 4), [5]),
    (ImageSize(3, 5), [7, 4]),
    (ImageSize(5, 2), [6, 6, 6]),
    (ImageSize(1, 7), [1, 9, 3]),
]


@pytest.mark.parametrize(("size", "lengths"), CASES)
def test_outputs_and_gradients_equal_diffusers(size: ImageSize, lengths: list[int]):
    batch = make_batch(size, lengths)
    velocity, grads = oracle(batch)
    model = build()
    ours, our_grads = gradients(model, batch)
    assert relative_error(ours, velocity) < TOLERANCE
    check_gradients(model, our_grads, grads)


def test_the_published_model_has_a_line_for_every_tensor_and_equal_shapes():
    with torch.device("meta"):
        published = QwenImageTransformer2DModel().state_dict()
        qwen = QwenImageConfig()
        model = QwenImageModel(
            qwen, transformer_config(qwen, ModelConfig(), ParallelConfig()), backend("local")
        )
    assert len(published) == 1933
    assert sum(p.numel() for p in model.parameters()) == 20_430_401_088
    tensors = to_megatron(published, model, MAPPING)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: t.shape for n, t in tensors.items()}


def test_batch_of_two_equals_two_singles():
    batch = make_batch(ImageSize(3, 4), [6, 3])
    model = build()
    together = run(model, batch)
    for i, length in enumerate((6, 3)):
        single = batch.rows(slice(i, i + 1))
        condition = TextCondition.pad([single.condition.embeddings[0, :length]])
        alone = model(single.latents, single.sigma, condition, single.size)
        assert relative_error(together[i : i + 1], alone) < TOLERANCE


@given(width=st.integers(5, 12), garbage=st.floats(-100, 100))
@settings(max_examples=10)
def test_padding_to_another_width_changes_nothing(width: int, garbage: float):
    batch = make_batch(ImageSize(3, 3), [5, 2])
    model = build()
    embeddings = torch.full((2, width, 24), garbage)
    mask = torch.zeros(2, width, dtype=torch.bool)
    for i, length in enumerate((5, 2)):
        embeddings[i, :length] = batch.condition.embeddings[i, :length]
        mask[i, :length] = True
    wide = model(batch.latents, batch.sigma, TextCondition(embeddings, mask), batch.size)
    assert relative_error(wide, run(model, batch)) < TOLERANCE


def test_unpadded_prompts_need_no_mask():
    batch = make_batch(ImageSize(3, 3), [4, 4])
    model = build()
    masked = TextCondition(batch.condition.embeddings, batch.condition.mask)
    assert masked.padded and not batch.condition.padded
    other = model(batch.latents, batch.sigma, masked, batch.size)
    assert relative_error(run(model, batch), other) < TOLERANCE


@pytest.mark.parametrize("stream", ["latents", "text"])
def test_a_later_token_changes_an_earlier_output(stream: str):
    batch = make_batch(ImageSize(3, 3), [4])
    model = build()
    latents, embeddings = batch.latents.clone(), batch.condition.embeddings.clone()
    (latents if stream == "latents" else embeddings)[:, -1] += 1
    changed = model(latents, batch.sigma, TextCondition.pad(list(embeddings)), batch.size)
    assert relative_error(changed[:, 0], run(model, batch)[:, 0]) > 1e-4


@given(height=st.integers(1, 12), width=st.integers(1, 12), text_tokens=st.integers(1, 12))
@settings(max_examples=30)
def test_positions_are_integers_and_give_diffusers_rotations(height: int, width: int, text_tokens: int):
    embedder = qwen_image().pos_embed
    image_table, text_table = embedder([(1, height, width)], torch.device("cpu"), max_txt_seq_len=text_tokens)
    text, image = positions(ImageSize(height, width), text_tokens, torch.device("cpu"))
    assert text.dtype == image.dtype == torch.int64
    axes = QWEN_IMAGE_SIZES["axes_dims_rope"]
    torch.testing.assert_close(rotations(text, axes), text_table, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotations(image, axes), image_table, rtol=0, atol=1e-6)


def test_position_of_a_text_token_does_not_depend_on_the_padded_width():
    narrow, _ = positions(ImageSize(4, 6), 3, torch.device("cpu"))
    wide, _ = positions(ImageSize(4, 6), 9, torch.device("cpu"))
    assert torch.equal(wide[:3], narrow)


def test_sampling_in_inference_mode_does_not_spoil_training():
    batch = make_batch(ImageSize(2, 11), [3])
    model = build()
    with torch.inference_mode():
        sampled = run(model, batch)
    velocity, _ = gradients(model, batch)
    assert torch.equal(sampled, velocity)


def test_bfloat16_is_as_close_to_float32_as_diffusers_is():
    batch = make_batch(ImageSize(4, 5), [7, 4])
    truth, truth_grads = oracle(batch)
    reference = qwen_image().bfloat16()
    theirs = run_oracle(reference, batch, torch.bfloat16).float()
    (theirs * batch.weight).sum().backward()
    model = build(ModelConfig(bf16=True))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    ours, our_grads = gradients(model, batch)
    assert ours.dtype == torch.float32
    assert relative_error(ours, truth) < 1.2 * relative_error(theirs, truth)
    assert relative_error(ours, theirs) < relative_error(theirs, truth)

    their_grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()
    }
    expected, theirs = (to_megatron(grads, model, MAPPING) for grads in (truth_grads, their_grads))
    errors = [
        (relative_error(our_grads[name].float(), truth), relative_error(theirs[name].float(), truth))
        for name, truth in expected.items()
        if truth.any()
    ]
    mean_ours, mean_theirs = (sum(e) / len(e) for e in zip(*errors, strict=True))
    assert mean_ours < 1.2 * mean_theirs


def test_a_fresh_model_predicts_zero_and_can_learn():
    model = build_random()
    velocity, grads = gradients(model, make_batch(ImageSize(2, 2), [3]))
    assert not velocity.any()
    assert grads["proj_out.weight"].any()
    assert all(layer.attention.img.linear_qkv.weight.std() > 0.01 for layer in model.layers.values())


def test_fresh_weights_do_not_depend_on_the_layout():
    whole = dict(build_seeded().named_parameters())
    parts = run_distributed(fresh_shards, 2)
    for name, parameter in whole.items():
        shards = [rank[name] for rank in parts]
        if shards[0].shape != parameter.shape:
            dim = next(d for d, n in enumerate(parameter.shape) if n != shards[0].shape[d])
            assert torch.equal(torch.cat(shards, dim), parameter), name
        else:
            assert all(torch.equal(shard, parameter) for shard in shards), name


def build_seeded(parallel: ParallelConfig | None = None) -> QwenImageModel:
    torch.manual_seed(7)
    return build_random(parallel=parallel)


def fresh_shards() -> dict[str, Tensor]:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    initialize(parallel, seed=0)
    return {name: p.detach() for name, p in build_seeded(parallel).named_parameters()}


def test_a_checkpoint_loads_at_every_tensor_parallel_size(tmp_path: Path):
    run_distributed(save_checkpoint, 2, tmp_path)
    for world_size in (1, 4):
        run_distributed(check_loaded_checkpoint, world_size, tmp_path)


def checkpointer(build_model: Callable[..., QwenImageModel]) -> Checkpointer:
    """Of a run in which all processes share the model, after a step that leaves the weights as they are."""
    config = Config(parallel=ParallelConfig(tensor_model_parallel_size=int(os.environ["WORLD_SIZE"])))
    config.optimizer.lr = 0.0
    initialize(config.parallel, seed=0)
    run = build_optimization(config, [build_model(parallel=config.parallel)])
    run.optimizer.step()
    return Checkpointer(run.chunks, run.optimizer, run.scheduler, config)


def save_checkpoint(folder: Path) -> None:
    checkpointer(build).save(folder, 1, {})


def check_loaded_checkpoint(folder: Path) -> None:
    resumed = checkpointer(build_random)
    resumed.load(folder)
    (model,) = (chunk.module for chunk in resumed.chunks)
    for name, expected in to_megatron(qwen_image().state_dict(), model, MAPPING).items():
        assert torch.equal(model.get_parameter(name), expected), name


def write_config(folder: Path, **entries) -> Path:
    (folder / "transformer").mkdir(parents=True)
    config = {"_class_name": "QwenImageTransformer2DModel"} | QWEN_IMAGE_SIZES | entries
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    return folder


def test_the_registered_family_builds_the_sizes_in_the_folder(tmp_path: Path):
    family = MODELS.get("qwen_image")
    qwen_image().save_config(tmp_path / "transformer")
    model = family.build_model(tmp_path, ModelConfig(), ParallelConfig())
    model.load_state_dict(to_megatron(qwen_image().state_dict(), model, family.mapping))


@pytest.mark.parametrize(
    "switch", ["zero_cond_t", "use_additional_t_cond", "use_layer3d_rope", "guidance_embeds"]
)
def test_variants_that_are_not_supported_are_refused_by_name(tmp_path: Path, switch: str):
    with pytest.raises(UserError, match=switch):
        QwenImageConfig.from_folder(write_config(tmp_path, **{switch: True}))


@pytest.mark.parametrize("content", [None, "{", '{"_class_name": "FluxTransformer2DModel"}', "[]"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, content: str | None):
    write_config(tmp_path)
    path = tmp_path / "transformer" / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=re.escape(str(path))):
        QwenImageConfig.from_folder(tmp_path)


def test_ranks_that_cannot_share_the_heads_are_refused():
    with pytest.raises(UserError, match=r"tensor_model_parallel_size=3 .* 4 attention heads"):
        build_random(parallel=ParallelConfig(tensor_model_parallel_size=3))


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_transformer_engine_is_refused_where_it_is_missing():
    assert backend("auto").name == "local"
    with pytest.raises(UserError, match="transformer_engine"):
        backend("transformer_engine")
