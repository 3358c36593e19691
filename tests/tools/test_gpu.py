"""`tools/benchmark/gpu.py` at small size, and what it counts as arithmetic."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_omni.config.schema import Config, LoraConfig, ModelConfig, ParallelConfig
from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.models.layers.linear import LOCAL
from megatron_omni.models.qwen_image.config import QwenImageConfig, transformer_config
from megatron_omni.models.qwen_image.model import QwenImageModel
from megatron_omni.parallel.state import initialize
from tests.distributed import run_distributed
from tools.benchmark.gpu import SMALL, Flops, Result, peak_flops, results


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312)],
)
def test_peak_of_known_devices(name: str, tflops: int):
    assert peak_flops(name) == tflops * 1e12
    assert peak_flops(name.replace("NVIDIA ", "NVIDIA X")) is None


def test_counted_arithmetic_is_what_torch_counts_at_the_real_width():
    text, size = 64, ImageSize(32, 32)
    qwen = QwenImageConfig(num_layers=3)
    with torch.device("meta"):
        model = QwenImageModel(qwen, transformer_config(qwen, ModelConfig(), ParallelConfig()), LOCAL)
        latents, embeddings = torch.randn(1, 1024, 64), torch.randn(1, text, qwen.joint_attention_dim)
        condition = TextCondition(embeddings, torch.ones(1, text, dtype=torch.bool), padded=False)
        with FlopCounterMode(display=False) as counter:
            model(latents, torch.rand(1), condition, size)
    ours = Flops.of(qwen, text, size.height * size.width)
    assert counter.get_total_flops() == pytest.approx(ours.forward, rel=0.01)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(lora_rank=4)], ids=["full", "lora"])
def test_small_iterations_give_sane_numbers(lora: LoraConfig):
    ((first, *_),) = run_distributed(run_small, 1, lora)
    assert first.rows == 1
    assert first.phase == ("LoRA" if lora.lora_rank else "full fine-tuning")
    for number in (first.rollout, first.update, first.peak_gib, first.rollout_flops, first.update_flops):
        assert math.isfinite(number) and number > 0
    assert first.mfu(None) == ""
    assert float(first.mfu(first.rollout_flops / first.rollout).split()[0]) == 1


def run_small(lora: LoraConfig) -> list[Result]:
    layout = initialize(ParallelConfig(), seed=0)
    config = Config(model=ModelConfig(bf16=True), lora=lora)
    config.rollout.height = config.rollout.width = SMALL.pixels
    config.rollout.num_inference_steps = 3
    config.rollout.n_samples_per_prompt = 1
    config.rollout.negative_prompt = "1"
    return list(results(replace(SMALL, seconds=0), config, layout))
