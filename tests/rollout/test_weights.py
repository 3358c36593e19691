"""The streams of weights that rollout engines take."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_omni.config.schema import Config, ParallelConfig
from megatron_omni.models.layers.lora import add_adapters
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.state import initialize
from megatron_omni.rollout.weights import PolicyWeights
from megatron_omni.training.build import build_model
from tests.distributed import run_distributed
from tests.models.pipeline_builder import tiny_pipeline_folder


def streams(folder: Path, parallel: ParallelConfig) -> tuple[dict[str, Tensor], ...]:
    """Base, merged, adapters and base again, with adapters that are not zero."""
    config = Config(parallel=parallel)
    config.lora = replace(config.lora, lora_rank=2)
    layout, family = initialize(parallel, seed=0), MODELS.get("qwen_image")
    chunks = build_model(config, family, folder, layout)
    add_adapters(chunks, family.mapping, config.lora, seed=0)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".B." in name:
                torch.nn.init.ones_(parameter)
    weights = PolicyWeights(chunks, family.mapping, config.lora, lambda: None)
    return tuple(
        {name: tensor.detach().clone() for name, tensor in stream()}
        for stream in (weights.base, weights.model, weights.adapters, weights.base)
    )


def test_the_base_is_what_was_loaded_whatever_the_adapters_are(tmp_path):
    folder = tiny_pipeline_folder(tmp_path / "model")
    loaded = load_file(next((folder / "transformer").glob("*.safetensors")))
    for base, merged, adapters, again in run_distributed(
        streams, 2, folder, ParallelConfig(pipeline_model_parallel_size=2)
    ):
        assert base.keys() == merged.keys() == loaded.keys()
        for name, tensor in loaded.items():
            assert torch.equal(base[name], tensor) and torch.equal(again[name], tensor), name
        changed = {name for name, tensor in loaded.items() if not torch.equal(merged[name], tensor)}
        assert changed == {name.partition(".lora_")[0] + ".weight" for name in adapters}
