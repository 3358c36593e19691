"""Qwen-Image, text to image. Megatron and diffusers are imported only by what needs them."""

from pathlib import Path

import torch

from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.models.base import ModelFamily, Pipeline
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.parallel.stages import WHOLE_MODEL, Stage


def build_model(
    folder: Path, model: ModelConfig, parallel: ParallelConfig, stage: Stage = WHOLE_MODEL
) -> torch.nn.Module:
    from megatron_omni.models.layers.linear import backend
    from megatron_omni.models.qwen_image.config import QwenImageConfig, transformer_config
    from megatron_omni.models.qwen_image.model import QwenImageModel

    qwen = QwenImageConfig.from_folder(folder)
    config = transformer_config(qwen, model, parallel)
    return QwenImageModel(qwen, config, backend(model.transformer_impl), stage)


def open_pipeline(folder: Path, device: torch.device, dtype: torch.dtype) -> Pipeline:
    from megatron_omni.models.qwen_image.pipeline import QwenImagePipeline

    return QwenImagePipeline(folder, device, dtype)


def check_layout(folder: Path, parallel: ParallelConfig) -> None:
    from megatron_omni.models.qwen_image import config

    config.check_layout(config.QwenImageConfig.from_folder(folder), parallel)


FAMILY = ModelFamily("qwen_image", build_model, open_pipeline, MAPPING, check_layout)
