"""A diffusers Qwen-Image folder, through Megatron and back."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_omni.checkpoint.hf import export_hf, load_hf
from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.errors import UserError
from megatron_omni.models.base import ModelFamily
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.state import initialize
from tests.checkpoint.folders import hashes, qwen_image_folder
from tests.distributed import run_distributed
from tests.models import builders


def build(source: Path, layout: dict[str, int], bf16: bool = False) -> tuple[ModelFamily, list[nn.Module]]:
    family, parallel = MODELS.get("qwen_image"), ParallelConfig(**layout)
    stages = initialize(parallel, seed=0).stages
    return family, [family.build_model(source, ModelConfig(bf16=bf16), parallel, stage) for stage in stages]


def load_and_export(source: Path, target: Path, layout: dict[str, int], bf16: bool) -> None:
    family, chunks = build(source, layout, bf16)
    load_hf(chunks, family.mapping, source / family.transformer_folder)
    export_hf(chunks, family.mapping, source, target, family.transformer_folder)


def error_of(source: Path, layout: dict[str, int]) -> str:
    family, chunks = build(source, layout)
    with pytest.raises(UserError) as caught:
        load_hf(chunks, family.mapping, source / family.transformer_folder)
    return str(caught.value)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[torch.dtype, Path]:
    """A float32 folder with one weight file, and a bfloat16 one with shards."""
    folder = tmp_path_factory.mktemp("qwen")
    return {
        torch.float32: qwen_image_folder(folder / "single", torch.float32),
        torch.bfloat16: qwen_image_folder(folder / "sharded", torch.bfloat16, max_shard_size="200KB"),
    }


TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
VPP2 = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}


@pytest.mark.parametrize(
    "processes, layout, bf16",
    [
        (1, {}, True),
        (2, TP2, False),
        (4, TP4, False),
        (4, TP2 | PP2, True),
        (2, VPP2, False),
        (4, PP2 | CP2, False),
    ],
    ids=["one", "TP2", "TP4", "TP2 × PP2", "PP2 interleaved", "PP2 × CP2"],
)
def test_export_is_the_folder_that_was_loaded(sources, tmp_path, processes, layout, bf16):
    source = sources[torch.bfloat16]
    assert len(list((source / "transformer").glob("*.safetensors"))) > 2
    run_distributed(load_and_export, processes, source, tmp_path / "out", layout, bf16)
    assert hashes(tmp_path / "out") == hashes(source)


def test_every_stage_names_all_faults_of_the_folder(sources, tmp_path):
    source = shutil.copytree(sources[torch.float32], tmp_path / "source")
    path = source / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["img_in.bias"], tensors["proj_out.bias"]
    save_file(tensors | {"extra.weight": torch.ones(2)}, path)
    first, last = run_distributed(error_of, 2, source, PP2)
    assert "img_in.bias: missing" in first and "proj_out.bias: missing" in first
    assert "extra.weight: not in the model" in first and first == last


def test_export_opens_in_diffusers(sources, tmp_path):
    source = sources[torch.float32]
    run_distributed(load_and_export, 2, source, tmp_path / "out", TP2, False)
    assert hashes(tmp_path / "out") == hashes(source)
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "out")
    for name, weight in builders.qwen_image(num_layers=4).state_dict().items():
        assert torch.equal(pipeline.transformer.state_dict()[name], weight)
