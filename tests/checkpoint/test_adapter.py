"""Adapter folders: from every layout to PEFT and diffusers, and from both back to every layout."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_omni.checkpoint.adapter import load_adapter, save_adapter
from megatron_omni.checkpoint.hf import export_hf, hf_tensors, load_hf
from megatron_omni.config.schema import LoraConfig, ModelConfig, ParallelConfig
from megatron_omni.errors import UserError
from megatron_omni.models.layers.lora import adapter_mapping, add_adapters
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.state import initialize
from tests.checkpoint.folders import hashes
from tests.distributed import run_distributed
from tests.models.pipeline_builder import tiny_pipeline_folder

LORA = LoraConfig(lora_rank=3, lora_alpha=7.0, lora_target_modules=("attn", "img_mlp", "proj_out"))
ONE, TWO = ParallelConfig(), ParallelConfig(tensor_model_parallel_size=2)
LAYOUTS = {
    "one": (1, ONE),
    "tp2": (2, TWO),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
    "tp2-pp2": (4, ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tiny_pipeline_folder(tmp_path_factory.mktemp("model"))
    model = QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    run_distributed(save_random, 1, source, folder)
    return folder


def build(source: Path, parallel: ParallelConfig, lora: LoraConfig = LORA) -> list[nn.Module]:
    family = MODELS.get("qwen_image")
    stages = initialize(parallel, seed=0).stages
    chunks = [family.build_model(source, ModelConfig(), parallel, stage) for stage in stages]
    load_hf(chunks, MAPPING, source / "transformer")
    add_adapters(chunks, MAPPING, lora, seed=0)
    return chunks


def factors(chunks: list[nn.Module]) -> dict[str, Tensor]:
    return dict(hf_tensors(chunks, adapter_mapping(MAPPING), of_adapters=True))


def save_random(source: Path, folder: Path) -> None:
    """An adapter with a B that is far from zero."""
    chunks = build(source, ONE)
    torch.manual_seed(5)
    for parameter in (p for chunk in chunks for p in chunk.parameters() if p.requires_grad):
        nn.init.normal_(parameter, std=0.2)
    save_adapter(chunks, MAPPING, LORA, source, folder)


def load_and_save(source: Path, folder: Path, target: Path, parallel: ParallelConfig) -> None:
    chunks = build(source, parallel)
    load_adapter(chunks, MAPPING, LORA, folder)
    save_adapter(chunks, MAPPING, LORA, source, target)


@pytest.mark.parametrize("name", ["tp2", "pp2", "tp2-pp2"])
def test_an_adapter_loaded_and_saved_at_another_layout_is_the_same_to_the_byte(source, saved, tmp_path, name):
    processes, parallel = LAYOUTS[name]
    run_distributed(load_and_save, processes, source, saved, tmp_path / "again", parallel)
    assert hashes(tmp_path / "again") == hashes(saved)
    assert set(hashes(saved)) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
    }


def peft_model(source: Path, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(
        QwenImageTransformer2DModel.from_pretrained(source / "transformer"), folder
    )


def test_peft_loads_every_tensor_and_the_scale(source, saved):
    model = peft_model(source, saved)
    assert all(not name.endswith("lora_B") or p.any() for name, p in model.named_parameters())
    theirs = {"base_model.model." + name: tensor for name, tensor in read(saved).items()}
    ours = get_peft_model_state_dict(model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, 7)


def read(folder: Path) -> dict[str, Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def draw(pipeline: QwenImagePipeline) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    image = pipeline(
        "a cat", height=32, width=48, num_inference_steps=3, generator=generator, output_type="np"
    )
    return image.images[0]


@pytest.mark.parametrize("name", ["one", "tp2-pp2"])
def test_diffusers_draws_the_same_with_the_adapter_as_with_the_merged_export(source, saved, tmp_path, name):
    processes, parallel = LAYOUTS[name]
    run_distributed(export_merged, processes, source, saved, tmp_path / "merged", parallel)
    pipeline = QwenImagePipeline.from_pretrained(source)
    plain = draw(pipeline)
    pipeline.load_lora_weights(saved)
    adapted = draw(pipeline)
    merged = draw(QwenImagePipeline.from_pretrained(tmp_path / "merged"))
    assert np.abs(adapted - plain).max() > 0.02
    assert np.abs(adapted - merged).max() < 1e-3


def export_merged(source: Path, folder: Path, target: Path, parallel: ParallelConfig) -> None:
    chunks = build(source, parallel)
    load_adapter(chunks, MAPPING, LORA, folder)
    before = [weight.clone() for chunk in chunks for weight in chunk.parameters()]
    export_hf(chunks, MAPPING, source, target)
    after = [weight for chunk in chunks for weight in chunk.parameters()]
    assert all(map(torch.equal, before, after))


def loaded_factors(source: Path, folder: Path, lora: LoraConfig) -> dict[str, Tensor]:
    chunks = build(source, ONE, lora)
    load_adapter(chunks, MAPPING, lora, folder)
    return factors(chunks)


def test_a_folder_with_diffusers_weights_alone_loads(source, saved, tmp_path):
    shutil.copy(saved / "pytorch_lora_weights.safetensors", tmp_path)
    (loaded,) = run_distributed(loaded_factors, 1, source, tmp_path, LORA)
    expected = read(saved)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_adapters_saved_by_peft_and_by_diffusers_load(source, tmp_path):
    """Made by suffixes, so that they stand on the last layer's unused text output, too."""
    targets = ("to_q", "to_add_out")
    model = get_peft_model(
        QwenImageTransformer2DModel.from_pretrained(source / "transformer"),
        PeftConfig(r=3, lora_alpha=7, target_modules=list(targets)),
    )
    model.save_pretrained(tmp_path / "peft")
    tensors = read(tmp_path / "peft")
    assert "transformer_blocks.1.attn.to_add_out.lora_A.weight" in tensors
    QwenImagePipeline.save_lora_weights(tmp_path / "diffusers", get_peft_model_state_dict(model))
    diffusers_file = tmp_path / "diffusers" / "pytorch_lora_weights.safetensors"
    named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    assert load_file(diffusers_file).keys() == {f"transformer.base_model.model.{n}" for n in tensors}
    save_file(named, diffusers_file)  # without metadata, as older programs write it: alpha is the rank

    for folder, alpha in ((tmp_path / "peft", 7.0), (tmp_path / "diffusers", 3.0)):
        lora = replace(LORA, lora_alpha=alpha, lora_target_modules=targets)
        (loaded,) = run_distributed(loaded_factors, 1, source, folder, lora)
        assert len(loaded) == 2 * 3
        assert all(torch.equal(loaded[name], tensors[name]) for name in loaded)


def edited(folder: Path, target: Path, edit: Callable[[dict[str, Tensor], dict], None]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "adapter_model.safetensors")
    settings = json.loads((target / "adapter_config.json").read_text())
    edit(tensors, settings)
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps(settings))
    return target


def error_of(source: Path, folder: Path, parallel: ParallelConfig = ONE) -> str:
    chunks = build(source, parallel)
    before = factors(chunks)
    with pytest.raises(UserError) as caught:
        load_adapter(chunks, MAPPING, LORA, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in factors(chunks).items())
    return str(caught.value)


def break_everything(tensors: dict[str, Tensor], settings: dict) -> None:
    first = "base_model.model.transformer_blocks.0.attn."
    del tensors[first + "to_q.lora_A.weight"]
    tensors[first + "to_z.lora_A.weight"] = torch.ones(3, 32)
    tensors[first + "to_k.lora_B.weight"] = torch.ones(30, 3)
    settings["r"], settings["lora_alpha"] = 4, 5


@pytest.mark.parametrize("name", ["one", "tp2-pp2"])
def test_all_that_does_not_fit_is_listed_on_every_rank(source, saved, tmp_path, name):
    processes, parallel = LAYOUTS[name]
    folder = edited(saved, tmp_path / "broken", break_everything)
    for error in run_distributed(error_of, processes, source, folder, parallel):
        for fault in (
            "rank 4 in the folder, lora_rank is 3",
            "alpha 5 in the folder, lora_alpha is 7",
            "transformer_blocks.0.attn.to_q.lora_A.weight: missing in the folder",
            "transformer_blocks.0.attn.to_z.lora_A.weight: not in the model",
            "transformer_blocks.0.attn.to_k.lora_B.weight: [30, 3] in the folder, [32, 3] in the model",
        ):
            assert fault in error


def test_a_trained_adapter_that_this_run_would_drop_is_refused(source, saved, tmp_path):
    def add(tensors, settings):
        tensors["base_model.model.img_in.lora_A.weight"] = torch.ones(3, 16)
        tensors["base_model.model.img_in.lora_B.weight"] = torch.ones(32, 3)

    (error,) = run_distributed(error_of, 1, source, edited(saved, tmp_path / "more", add))
    assert "img_in.lora_B.weight: not in the model, or not in lora_target_modules" in error


def test_other_kinds_of_adapters_and_damaged_or_missing_files_are_refused(source, saved, tmp_path):
    def dora(tensors, settings):
        settings["use_dora"] = True

    (tmp_path / "empty").mkdir()
    truncated = shutil.copytree(saved, tmp_path / "truncated") / "adapter_model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:1000])
    (shutil.copytree(saved, tmp_path / "headless") / "adapter_config.json").write_text("{")
    (shutil.copytree(saved, tmp_path / "weightless") / "adapter_model.safetensors").unlink()
    expected = {
        edited(saved, tmp_path / "dora", dora): "use_dora=True",
        tmp_path / "empty": "holds no adapter",
        tmp_path / "absent": "holds no adapter",
        tmp_path / "truncated": "cannot be read",
        tmp_path / "headless": "is damaged",
        tmp_path / "weightless": "is missing",
    }
    (errors,) = run_distributed(errors_of, 1, source, list(expected))
    for error, part in zip(errors, expected.values(), strict=True):
        assert part in error


def errors_of(source: Path, folders: list[Path]) -> list[str]:
    chunks = build(source, ONE)
    errors = []
    for folder in folders:
        with pytest.raises(UserError) as caught:
            load_adapter(chunks, MAPPING, LORA, folder)
        errors.append(str(caught.value))
    return errors


def test_saving_replaces_an_older_adapter_and_nothing_else(source, saved, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    shutil.copytree(saved, tmp_path / "adapter")
    (error,) = run_distributed(save_twice, 1, source, saved, tmp_path / "adapter", other)
    assert "holds something else" in error
    assert hashes(tmp_path / "adapter") == hashes(saved)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]


def save_twice(source: Path, saved: Path, good: Path, bad: Path) -> str:
    chunks = build(source, ONE)
    save_adapter(chunks, MAPPING, LORA, source, good)
    load_adapter(chunks, MAPPING, LORA, saved)
    save_adapter(chunks, MAPPING, LORA, source, good)
    with pytest.raises(UserError) as caught:
        save_adapter(chunks, MAPPING, LORA, source, bad)
    return str(caught.value)
