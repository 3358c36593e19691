"""Speed and memory of Flow-GRPO on one large GPU, at the real sizes of Qwen-Image, with random weights.

An iteration draws a micro-batch of images in place (512 × 512 pixels, 10 steps) and trains on all stochastic
steps, without text encoder, image codec and reward. All 60 layers with LoRA, and as many as fit with full
fine-tuning; micro-batches double until memory or the time of the phase runs out, under 8 minutes in all. MFU
counts the matrix products of tokens and attention, nothing twice, against the dense bf16 peak of the device.
On a CPU everything is tiny: `python tools/benchmark/gpu.py`.
"""

import argparse
import gc
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from megatron_omni.algorithms.base import Advantages
from megatron_omni.algorithms.flow_grpo import FlowGrpo
from megatron_omni.config.schema import Config, LoraConfig, ModelConfig
from megatron_omni.models.base import ImageSize
from megatron_omni.models.qwen_image.config import QwenImageConfig
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.parallel import state
from megatron_omni.parallel.state import Layout
from megatron_omni.platforms import current_platform
from megatron_omni.rollout.megatron.engine import MegatronEngine
from megatron_omni.rollout.parts import EngineParts
from megatron_omni.rollout.weights import PolicyWeights
from tools.benchmark.workload import NEGATIVE_PROMPT, Workload, build_chunks, build_policy, build_updater

PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "H20": 148,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
}
"""Dense bf16, from the makers' data sheets. The first name that the device's has in it counts."""
TEXT_TOKENS = 64
PIXELS_PER_TOKEN = 16
"""Along each side."""
BYTES_PER_WEIGHT = 18
"""In full fine-tuning: bf16 weight, and float32 gradient, master and two moments."""
MEASURED = 2
"""Iterations after the first."""


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    qwen: QwenImageConfig
    pixels: int
    """Along each side."""
    steps: int
    """Of sampling; all but the last are trained."""
    full_layers: int
    """Layers in full fine-tuning."""
    seconds: float
    """Of each phase: micro-batches that would take longer are not begun."""


SMALL = Scale(
    QwenImageConfig(
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=24,
        joint_attention_dim=32,
        axes_dims_rope=(8, 8, 8),
    ),
    pixels=64,
    steps=3,
    full_layers=2,
    seconds=4,
)


def scale_for(device: torch.device) -> Scale:
    """Real sizes on an accelerator: half of its memory for weights and optimizer in full fine-tuning."""
    if device.type == "cpu":
        return SMALL
    qwen = QwenImageConfig()
    free, _ = torch.get_device_module(device).mem_get_info()
    layer_weights = 36 * qwen.hidden_size**2  # attention 8, MLP 16, modulation 12
    fitting = int(0.5 * free / (BYTES_PER_WEIGHT * layer_weights))
    return Scale(qwen, 512, 10, min(qwen.num_layers, max(1, fitting)), seconds=180)


# Counting


@dataclass(frozen=True)
class Flops:
    """Of one sample's forward pass."""

    linear: float
    attention: float

    @staticmethod
    def of(qwen: QwenImageConfig, text: int, image: int) -> "Flops":
        """Products of all tokens with the weights of attention and MLP, and of queries, keys and values.

        The last layer's text is only attended to. Modulations and the first and last projection, which are a
        thousandth, are left out, and so are adapters.
        """
        width, layers, tokens = qwen.hidden_size, qwen.num_layers, text + image
        text_unused = 2 * 9 * width**2 * text  # the last layer's output projection and MLP
        return Flops(
            linear=2 * 12 * width**2 * tokens * layers - text_unused,
            attention=4 * width * tokens * (tokens * layers - text),
        )

    @property
    def forward(self) -> float:
        return self.linear + self.attention

    def training(self, adapters: bool) -> float:
        """Forward and backward; with adapters the weights' own gradients are not computed."""
        return (2 if adapters else 3) * self.linear + 3 * self.attention


def peak_flops(device_name: str) -> float | None:
    """Of dense bf16, a second; None where unknown."""
    for name, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", device_name):
            return tflops * 1e12
    return None


def device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


# Running


class NoPipeline:
    """Stands for text encoder and image codec: `megatron_omni.models.base.Pipeline` as sampling uses it."""

    def __init__(self, channels: int):
        self.channels = channels

    def latent_size(self, height: int, width: int) -> ImageSize:
        return ImageSize(height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN)

    def sigmas(self, steps: int, size: ImageSize) -> Tensor:
        return torch.linspace(1, 0, steps + 1)

    def initial_noise(self, generator: torch.Generator, size: ImageSize) -> Tensor:
        return torch.randn(size.height * size.width, self.channels, generator=generator)

    def decode_latents(self, latents: Tensor, size: ImageSize) -> Tensor:
        return torch.zeros(len(latents), 3, 1, 1, dtype=torch.uint8)


class Loop:
    """A model and iterations of Flow-GRPO on it."""

    def __init__(self, scale: Scale, config: Config, layout: Layout):
        self.device = layout.device
        pipeline = NoPipeline(scale.qwen.in_channels)
        size = pipeline.latent_size(config.rollout.height, config.rollout.width)
        sigmas = pipeline.sigmas(config.rollout.num_inference_steps, size)
        workload = Workload(scale.qwen, size, ())
        chunks = build_chunks(scale.qwen, config, layout)
        policy = build_policy(config, chunks)
        self.algorithm = FlowGrpo(config, sigmas)
        self.updater = build_updater(workload, config, layout, policy, sigmas)
        weights = PolicyWeights(chunks, MAPPING, config.lora, lambda: None)
        embeddings = workload.embeddings(layout.device)
        self.engine = MegatronEngine(EngineParts(config, layout, policy, weights, pipeline, embeddings))

    def iterate(self, rows: int) -> tuple[float, float]:
        """Seconds of drawing one micro-batch of `rows` images, and of training on all its steps."""
        self.engine.micro_batch_size = rows
        requests = self.algorithm.requests(0, [{"prompt": str(TEXT_TOKENS)}] * rows, first=0)
        ones = torch.ones(rows, device=self.device)
        start = self._now()
        (trajectory,) = self.engine.generate(requests)
        drawn = self._now()
        batches = self.algorithm.micro_batches(trajectory, Advantages(ones, ones, 0.0), rows, 0)
        self.updater.step(batches)
        return drawn - start, self._now() - drawn

    def _now(self) -> float:
        current_platform().synchronize()
        return time.perf_counter()


@dataclass(frozen=True)
class Result:
    """Of one size of micro-batches."""

    phase: str
    layers: int
    rows: int
    rollout: float
    """Seconds."""
    update: float
    peak_gib: float
    rollout_flops: float
    update_flops: float

    def __str__(self) -> str:
        return (
            f"{self.phase:18s}{self.layers:7d}{self.rows:13d}{self.rollout:11.3f}{self.update:10.3f}"
            f"{self.rows / (self.rollout + self.update):10.3f}{self.peak_gib:10.1f}"
            f"{self.rollout_flops / self.rollout / 1e12:10.2f}{self.update_flops / self.update / 1e12:10.2f}"
        )

    def mfu(self, peak: float | None) -> str:
        """Of sampling and of training."""
        if peak is None:
            return ""
        shares = (self.rollout_flops / self.rollout / peak, self.update_flops / self.update / peak)
        return "".join(f"{share:10.3f}" for share in shares)


HEADER = (
    f"{'':18s}{'layers':>7s}{'micro-batch':>13s}{'rollout s':>11s}{'update s':>10s}{'images/s':>10s}"
    f"{'peak GiB':>10s}{'sampling':>10s}{'training':>10s}"
)


def results(scale: Scale, config: Config, layout: Layout) -> Iterator[Result]:
    """Of micro-batches of 1, 2, 4, … images, until memory or time runs out."""
    began = time.perf_counter()
    adapters = config.lora.lora_rank > 0
    loop = Loop(scale, config, layout)
    size = loop.engine.size
    flops = Flops.of(scale.qwen, TEXT_TOKENS, size.height * size.width)
    steps = config.rollout.num_inference_steps
    rows, last = 1, 0.0
    while rows == 1 or time.perf_counter() - began + 2 * last < scale.seconds:
        rung_began = time.perf_counter()
        current_platform().reset_peak_memory()
        try:
            loop.iterate(rows)
            rollout, update = map(median, zip(*(loop.iterate(rows) for _ in range(MEASURED)), strict=True))
        except torch.OutOfMemoryError:
            return
        yield Result(
            "LoRA" if adapters else "full fine-tuning",
            scale.qwen.num_layers,
            rows,
            rollout,
            update,
            current_platform().peak_memory_gib(),
            rollout_flops=rows * steps * flops.forward,
            update_flops=rows * (steps - 1) * flops.training(adapters),
        )
        rows, last = 2 * rows, time.perf_counter() - rung_began


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    layout = state.initialize(Config().parallel, seed=0)
    scale = scale_for(layout.device)
    name = device_name(layout.device)
    peak = peak_flops(name)
    print(f"{name}: columns sampling and training are TFLOP/s" + (", then MFU" if peak else ""))
    print(HEADER, flush=True)
    config = Config(model=ModelConfig(bf16=True))
    config.rollout.height = config.rollout.width = scale.pixels
    config.rollout.num_inference_steps = scale.steps
    config.rollout.n_samples_per_prompt = 1
    config.rollout.negative_prompt = NEGATIVE_PROMPT
    full = replace(scale, qwen=replace(scale.qwen, num_layers=scale.full_layers))
    for phase, lora in ((full, LoraConfig()), (scale, LoraConfig(lora_rank=32))):
        for result in results(phase, replace(config, lora=lora), layout):
            print(f"{result}{result.mfu(peak)}", flush=True)
        gc.collect()  # frees the model: its optimizer is part of a cycle
    state.destroy()


if __name__ == "__main__":
    main()
