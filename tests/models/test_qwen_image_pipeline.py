"""Qwen-Image's frozen parts against diffusers' own pipeline."""

import json
import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_omni.errors import UserError
from megatron_omni.models.base import ImageSize
from megatron_omni.models.qwen_image.pipeline import QwenImagePipeline, pack, unpack
from tests.models.pipeline_builder import tiny_pipeline_folder

CPU = torch.device("cpu")
PROMPTS = ["", "a cat", 'A sign that says "WXYZ"', "é中 longer than the other prompts, by far"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def pipeline(folder) -> QwenImagePipeline:
    return QwenImagePipeline(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def oracle(folder) -> diffusers.QwenImagePipeline:
    oracle = diffusers.QwenImagePipeline.from_pretrained(folder)
    oracle.set_progress_bar_config(disable=True)
    return oracle


def random_images(count: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def test_prompt_embeddings_equal_those_of_diffusers(pipeline, oracle):
    for prompt, embedding in zip(PROMPTS, pipeline.encode_prompts(PROMPTS), strict=True):
        expected, mask = oracle._get_qwen_prompt_embeds(prompt)
        assert mask.all()
        torch.testing.assert_close(embedding, expected[0], rtol=0, atol=0)


def test_prompt_embeddings_equal_the_padded_batch_of_diffusers(pipeline, oracle):
    expected, mask = oracle._get_qwen_prompt_embeds(PROMPTS)
    for embedding, padded, row in zip(pipeline.encode_prompts(PROMPTS), expected, mask.bool(), strict=True):
        torch.testing.assert_close(embedding, padded[row], rtol=1e-4, atol=1e-5)


@settings(max_examples=10)
@given(neighbours=st.lists(st.text(max_size=40), max_size=4), place=st.integers(0, 4))
def test_an_embedding_never_depends_on_its_neighbours(pipeline, neighbours, place):
    place = min(place, len(neighbours))
    batch = [*neighbours[:place], "a cat", *neighbours[place:]]
    assert torch.equal(pipeline.encode_prompts(batch)[place], pipeline.encode_prompts(["a cat"])[0])


def test_a_long_prompt_is_cut_where_diffusers_cuts_it(pipeline, oracle):
    prompt = "x" * 1500
    (embedding,) = pipeline.encode_prompts([prompt])
    assert len(embedding) == 1024
    torch.testing.assert_close(embedding, oracle._get_qwen_prompt_embeds(prompt)[0][0], rtol=0, atol=0)


def test_nothing_records_gradients(pipeline):
    size = ImageSize(1, 2)
    latents = torch.randn(1, 2, pipeline.latent_channels, requires_grad=True)
    results = [*pipeline.encode_prompts(["a"]), pipeline.encode_images(random_images(1, 16, 32))]
    assert not any(result.requires_grad for result in [*results, pipeline.decode_latents(latents, size)])
    parameters = [*pipeline.text_encoder.parameters(), *pipeline.codec.parameters()]
    assert not any(parameter.requires_grad for parameter in parameters)


@pytest.mark.parametrize("batch", [1, 3])
def test_decoded_pixels_equal_those_of_diffusers(pipeline, oracle, batch):
    size = pipeline.latent_size(48, 96)
    latents = torch.randn(batch, 18, pipeline.latent_channels, generator=torch.Generator().manual_seed(0))
    images = pipeline.decode_latents(latents, size)
    assert images.dtype == torch.uint8
    assert images.shape == (batch, 3, 48, 96)

    vae = oracle.vae
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    unpacked = oracle._unpack_latents(latents, 48, 96, oracle.vae_scale_factor) * std + mean
    with torch.no_grad():
        decoded = vae.decode(unpacked).sample[:, :, 0]
    expected = (oracle.image_processor.postprocess(decoded, output_type="np") * 255).round()
    difference = np.abs(images.permute(0, 2, 3, 1).numpy() - expected)
    # A value may fall on the other side of a rounding edge by float error.
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3
    assert images.float().std() > 1


def test_the_image_codec_equals_the_video_codec_on_one_frame(pipeline, oracle):
    images = random_images(2, 32, 48).float() / 127.5 - 1
    config = oracle.vae.config
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        latents = oracle.vae.encode(images.unsqueeze(2)).latent_dist.mode()
        decoded = oracle.vae.decode(latents).sample[:, :, 0]
        normalised = (latents[:, :, 0] - mean) / std
        torch.testing.assert_close(pipeline.codec.encode(images), normalised, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pipeline.codec.decode(normalised), decoded, rtol=1e-4, atol=1e-5)


def test_encoded_images_are_packed_as_diffusers_packs_them(pipeline, oracle):
    images = random_images(2, 32, 48)
    latents = pipeline.codec.encode(images.float() / 127.5 - 1)
    packed = pipeline.encode_images(images)
    assert packed.shape == (2, 6, pipeline.latent_channels)
    assert packed.dtype == torch.float32
    assert torch.equal(packed, oracle._pack_latents(latents, 2, latents.shape[1], 4, 6))


@given(batch=st.integers(1, 3), channels=st.integers(1, 5), height=st.integers(1, 6), width=st.integers(1, 6))
def test_unpacking_inverts_packing(batch, channels, height, width):
    latents = torch.randn(batch, channels, 2 * height, 2 * width)
    packed = pack(latents)
    expected = diffusers.QwenImagePipeline._pack_latents(latents, batch, channels, 2 * height, 2 * width)
    assert torch.equal(packed, expected)
    assert torch.equal(unpack(packed, ImageSize(height, width)), latents)


def test_sigmas_equal_the_reference_values(pipeline):
    sigmas = pipeline.sigmas(10, ImageSize(32, 32))
    reference = [1, 0.928970, 0.851485, 0.766624, 0.673281, 0.570117, 0.455497, 0.327400, 0.183300, 0.02, 0]
    torch.testing.assert_close(sigmas, torch.tensor(reference), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("steps", "height", "width"), [(2, 32, 64), (4, 48, 96), (10, 16, 16)])
def test_sigmas_equal_those_a_diffusers_run_uses(pipeline, oracle, steps, height, width):
    oracle("a", height=height, width=width, num_inference_steps=steps, output_type="latent")
    sigmas = pipeline.sigmas(steps, pipeline.latent_size(height, width))
    assert sigmas.dtype == torch.float32
    assert torch.equal(sigmas, oracle.scheduler.sigmas)


def test_one_step_of_a_stretched_schedule_is_refused(pipeline):
    with pytest.raises(UserError, match="at least 2"):
        pipeline.sigmas(1, ImageSize(1, 1))


def test_a_sigma_table_survives_the_next_call(pipeline):
    first = pipeline.sigmas(4, ImageSize(3, 6))
    copy = first.clone()
    pipeline.sigmas(7, ImageSize(5, 5))
    assert torch.equal(first, copy)


def test_a_size_the_codec_cannot_divide_is_refused(pipeline):
    with pytest.raises(UserError, match=r"40×96.*multiples of 16"):
        pipeline.latent_size(40, 96)
    with pytest.raises(UserError, match="multiples of 16"):
        pipeline.encode_images(random_images(1, 16, 24))


def test_bfloat16_parts_take_and_give_float32_latents(folder):
    pipeline = QwenImagePipeline(folder, CPU, torch.bfloat16)
    assert pipeline.encode_prompts(["a"])[0].dtype == torch.bfloat16
    latents = pipeline.encode_images(random_images(1, 16, 32))
    assert latents.dtype == torch.float32
    assert pipeline.decode_latents(latents, ImageSize(1, 2)).shape == (1, 3, 16, 32)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent.*model_index\.json"):
        QwenImagePipeline(tmp_path / "absent", CPU, torch.float32)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"_class_name": "FluxPipeline"}', "FluxPipeline"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
    ],
)
def test_a_folder_of_another_kind_is_refused(tmp_path, index, message):
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(UserError, match=message):
        QwenImagePipeline(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize("component", ["tokenizer", "text_encoder", "vae", "scheduler"])
def test_a_missing_component_is_named(folder, tmp_path, component):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    shutil.rmtree(broken / component)
    with pytest.raises(UserError, match=component):
        QwenImagePipeline(broken, CPU, torch.float32)


def test_a_component_without_weights_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    for weights in (broken / "vae").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UserError, match="vae of model folder"):
        QwenImagePipeline(broken, CPU, torch.float32)


def test_the_transformer_is_not_needed(folder, tmp_path):
    frozen = tmp_path / "frozen"
    shutil.copytree(folder, frozen, ignore=shutil.ignore_patterns("transformer"))
    assert "transformer" in json.loads((frozen / "model_index.json").read_text())
    assert QwenImagePipeline(frozen, CPU, torch.float32).latent_channels == 16
