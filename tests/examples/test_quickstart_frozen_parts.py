"""The quickstart's task, data and frozen parts."""

import json
import runpy
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from megatron_omni.models.base import ImageSize
from megatron_omni.models.qwen_image.pipeline import PROMPT_TEMPLATE, TEMPLATE_TOKENS, QwenImagePipeline
from megatron_omni.rewards.ocr import OcrReward

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL = QUICKSTART / "model"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict:
    """The names of `data.py`, which imports `render.py` from its own folder."""
    sys.path.insert(0, str(QUICKSTART))
    try:
        return runpy.run_path(str(QUICKSTART / "data.py"))
    finally:
        sys.path.remove(str(QUICKSTART))


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    return QwenImagePipeline(MODEL, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def held_out(data) -> tuple[list[str], torch.Tensor]:
    """Held-out strings and their pictures [B, 3, H, W]."""
    texts = data["held_out_strings"]()[:96]
    pictures = np.stack([data["render"](text, 10**6 + i) for i, text in enumerate(texts)])
    return texts, torch.from_numpy(pictures).unsqueeze(1).expand(-1, 3, -1, -1)


def read_score(images: torch.Tensor, prompts: list[str]) -> float:
    rows = [{"prompt": prompt} for prompt in prompts]
    return float(np.mean(OcrReward().score(images.permute(0, 2, 3, 1).numpy(), rows)))


def test_no_string_is_in_two_sets(data):
    held_out = set((QUICKSTART / "data" / "heldout.txt").read_text().splitlines())
    train = set((QUICKSTART / "data" / "train.txt").read_text().splitlines())
    supervised = {data["prompt"](text) for text in data["supervised_strings"](16000)}
    assert (len(held_out), len(train), len(supervised)) == (256, 2048, 16000)
    assert not held_out & train
    assert not held_out & supervised
    assert not train & supervised


def test_the_prompt_files_are_those_the_script_writes(data, tmp_path):
    for name, texts in (
        ("heldout.txt", data["held_out_strings"]()),
        ("train.txt", data["strings"]()[data["HELD_OUT"] :][: data["TRAIN"]]),
    ):
        data["write_prompts"](tmp_path / name, texts)
        assert (tmp_path / name).read_text() == (QUICKSTART / "data" / name).read_text()


def test_pictures_are_written_with_their_prompts_and_always_the_same(data, tmp_path):
    texts = data["supervised_strings"](3)
    for folder in ("a", "b"):
        data["write_pictures"](tmp_path / folder, texts)
    rows = [json.loads(line) for line in (tmp_path / "a" / "data.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [f'A sign that says "{text}"' for text in texts]
    for row in rows:
        with (
            Image.open(tmp_path / "a" / row["image"]) as first,
            Image.open(tmp_path / "b" / row["image"]) as second,
        ):
            assert first.size == (96, 48)
            assert np.array_equal(np.asarray(first), np.asarray(second))


def test_the_pictures_show_their_text(held_out, data):
    texts, images = held_out
    assert read_score(images, [data["prompt"](text) for text in texts]) > 0.97


def test_the_codec_keeps_the_text_readable(pipeline, held_out, data):
    texts, images = held_out
    decoded = pipeline.decode_latents(pipeline.encode_images(images), ImageSize(3, 6))
    assert read_score(decoded, [data["prompt"](text) for text in texts]) > 0.97


def test_latents_are_standardised(pipeline, held_out):
    latents = pipeline.encode_images(held_out[1])
    assert abs(latents.mean()) < 0.1
    assert abs(latents.std() - 1) < 0.1


def test_words_and_capitals_are_single_tokens(pipeline):
    before = PROMPT_TEMPLATE.split("{}")[0]
    assert len(pipeline.tokenizer(before).input_ids) == TEMPLATE_TOKENS
    tokens = pipeline.tokenizer.tokenize('A sign that says "WXYZ"')
    assert tokens == ["A", "Ġsign", "Ġthat", "Ġsays", 'Ġ"', "W", "X", "Y", "Z", '"']


def test_any_text_can_be_tokenised(pipeline):
    text = "Größe 中文 1+1"
    assert pipeline.tokenizer.decode(pipeline.tokenizer(text).input_ids) == text


def test_diffusers_opens_the_folder_as_it_is():
    pipeline = diffusers.QwenImagePipeline.from_pretrained(MODEL)
    pipeline.set_progress_bar_config(disable=True)
    (image,) = pipeline('A sign that says "WXYZ"', height=48, width=96, num_inference_steps=2).images
    assert image.size == (96, 48)
