"""What benchmarks run: a Flow-GRPO update and sampling of Qwen-Image on random weights, prompts and noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_omni.algorithms.base import TrainingBatch
from megatron_omni.algorithms.flow_grpo import FlowGrpo
from megatron_omni.cache import BatchCache
from megatron_omni.config.schema import Config
from megatron_omni.models.base import ImageSize
from megatron_omni.models.layers.linear import backend
from megatron_omni.models.layers.lora import add_adapters
from megatron_omni.models.qwen_image.config import QwenImageConfig, transformer_config
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.models.qwen_image.model import QwenImageModel
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import Layout
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.training.optimizer import build_optimization
from megatron_omni.training.update import Updater

NEGATIVE_PROMPT = "1"


@dataclass(frozen=True)
class Workload:
    """Sizes of the model and of its micro-batches."""

    qwen: QwenImageConfig
    size: ImageSize
    text_lengths: tuple[tuple[int, ...], ...]
    """Tokens of each prompt of each micro-batch, over all data-parallel ranks."""

    @property
    def image_tokens(self) -> int:
        """Of one sample."""
        return self.size.height * self.size.width

    def batches(self, layout: Layout) -> list[TrainingBatch]:
        """This replica's micro-batches: samples at one step with what the sampler would have recorded."""
        random = torch.Generator().manual_seed(layout.data_rank)
        batches = []
        for lengths in self.text_lengths[layout.data_rank :: layout.data_size]:
            rows = len(lengths)
            latents, next_latents = (
                torch.randn(rows, self.image_tokens, self.qwen.in_channels, generator=random).to(
                    layout.device
                )
                for _ in range(2)
            )
            numbers = [
                torch.full((rows,), value, device=layout.device) for value in (0.8, 1.0, 0.5, 0.7, -1.0)
            ]
            sigma, weights, advantages, next_sigma, log_prob = numbers
            batches.append(
                TrainingBatch(
                    [str(length) for length in lengths],
                    latents,
                    sigma,
                    weights,
                    advantages,
                    next_latents,
                    next_sigma,
                    log_prob,
                )
            )
        return batches

    def embeddings(self, device: torch.device) -> BatchCache:
        """Stands for the text encoder: prompts are their numbers of tokens."""

        def encode(prompts: Sequence[str]) -> list[Tensor]:
            random = torch.Generator().manual_seed(0)
            width = self.qwen.joint_attention_dim
            return [torch.randn(int(prompt), width, generator=random).to(device) for prompt in prompts]

        return BatchCache(encode, 64)


def build_chunks(qwen: QwenImageConfig, config: Config, layout: Layout) -> list[QwenImageModel]:
    """This process's part of the model, drawn on its device; no weight is zero, adapters if asked for."""
    chunks = []
    for number, stage in enumerate(layout.stages):
        with layout.device:
            megatron = transformer_config(qwen, config.model, config.parallel)
            chunk = QwenImageModel(qwen, megatron, backend(config.model.transformer_impl), stage)
        chunk.vp_stage = number if layout.chunks > 1 else None
        chunks.append(chunk)
    if config.lora.lora_rank:
        add_adapters(chunks, MAPPING, config.lora, config.training.seed)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)
    return chunks


def build_updater(
    workload: Workload, config: Config, layout: Layout, policy: ForwardPipeline, sigmas: Tensor
) -> Updater:
    """Flow-GRPO on the model of `policy`; `sigmas` as for the sampler."""
    return Updater(
        build_optimization(config, policy.chunks),
        policy,
        FlowGrpo(config, sigmas),
        Guidance(),
        workload.embeddings(layout.device),
        NEGATIVE_PROMPT,
        workload.size,
        None,
        layout,
    )


def build_policy(config: Config, chunks: list[QwenImageModel]) -> ForwardPipeline:
    """The model for sampling. Collective."""
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    return ForwardPipeline(chunks, Guidance().forward, dtype)
