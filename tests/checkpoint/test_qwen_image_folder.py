"""A diffusers Qwen-Image folder, through Megatron and back."""

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline

from megatron_omni.checkpoint.hf import export_hf, load_hf
from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.state import initialize
from tests.checkpoint.folders import hashes
from tests.distributed import run_distributed
from tests.models import builders
from tests.models.pipeline_builder import tiny_pipeline_folder


def load_and_export(source: Path, target: Path, tensor_parallel: int, bf16: bool) -> None:
    family = MODELS.get("qwen_image")
    parallel = ParallelConfig(tensor_model_parallel_size=tensor_parallel)
    initialize(parallel, seed=0)
    model = family.build_model(source, ModelConfig(bf16=bf16), parallel)
    load_hf(model, family.mapping, source / family.transformer_folder)
    export_hf(model, family.mapping, source, target, family.transformer_folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[torch.dtype, Path]:
    """A float32 folder with one weight file, and a bfloat16 one with shards."""
    folders = {}
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"max_shard_size": "200KB"})):
        folders[dtype] = tiny_pipeline_folder(tmp_path_factory.mktemp("qwen") / "source")
        for path in (folders[dtype] / "transformer").iterdir():
            path.unlink()
        builders.qwen_image().to(dtype).save_pretrained(folders[dtype] / "transformer", **options)
    return folders


@pytest.mark.parametrize("tensor_parallel, bf16", [(1, True), (2, False), (4, False)])
def test_export_is_the_folder_that_was_loaded(sources, tmp_path, tensor_parallel, bf16):
    source = sources[torch.bfloat16]
    assert len(list((source / "transformer").glob("*.safetensors"))) > 2
    run_distributed(load_and_export, tensor_parallel, source, tmp_path / "out", tensor_parallel, bf16)
    assert hashes(tmp_path / "out") == hashes(source)


def test_export_opens_in_diffusers(sources, tmp_path):
    source = sources[torch.float32]
    run_distributed(load_and_export, 2, source, tmp_path / "out", 2, False)
    assert hashes(tmp_path / "out") == hashes(source)
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "out")
    for name, weight in builders.qwen_image().state_dict().items():
        assert torch.equal(pipeline.transformer.state_dict()[name], weight)
