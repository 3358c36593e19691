"""What a diffusion model owes the rest of the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.parallel.stages import WHOLE_MODEL, Stage


@dataclass(frozen=True)
class TextCondition:
    """Prompt embeddings of a batch, padded on the right. B prompts, T tokens, D channels."""

    embeddings: Tensor
    """[B, T, D]."""
    mask: Tensor
    """[B, T] bool, true where a token is real."""
    padded: bool = True
    """False promises that all tokens are real, so that attention needs no mask."""

    @staticmethod
    def pad(embeddings: Sequence[Tensor]) -> "TextCondition":
        """A batch from embeddings [T_i, D] of unequal length."""
        lengths = [len(e) for e in embeddings]
        batch = torch.nn.utils.rnn.pad_sequence(list(embeddings), batch_first=True)
        positions = torch.arange(batch.shape[1], device=batch.device)
        mask = positions[None] < torch.tensor(lengths, device=batch.device)[:, None]
        return TextCondition(batch, mask, padded=len(set(lengths)) > 1)


@dataclass(frozen=True)
class ImageSize:
    """Height and width of an image's grid of packed latent tokens; they number `height * width`."""

    height: int
    width: int


class DiffusionModel(Protocol):
    """A Megatron module that predicts the velocity ε − x0 of rectified flow, or one pipeline stage of it.

    Parameters have the same names at every layout. A stage that is not the first computes on what
    `set_input_tensor` gave it; one that is not the last returns what the next stage takes.
    """

    implementation: str
    """What its layers and its attention really run on, for the log."""
    pre_process: bool
    """Whether this is the first stage."""
    post_process: bool
    """Whether this is the last stage."""

    def forward(self, latents: Tensor, sigma: Tensor, condition: TextCondition, size: ImageSize) -> Tensor:
        """latents [B, N, C], sigma [B] in [0, 1], N = size.height * size.width.

        Returns velocity [B, N, C] in the dtype of the latents.
        """
        ...

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """What the stage before has returned; called by Megatron's schedules too."""
        ...

    def hop_shape(self, latents: Tensor, condition: TextCondition) -> tuple[int, int, int]:
        """Shape of what goes from stage to stage on this rank, for these inputs."""
        ...


class Pipeline(Protocol):
    """The frozen parts round a diffusion model: prompts → conditions, latents ↔ pixels, the sigma table.

    Opened from a Hugging Face folder; all calls run without gradients.
    """

    latent_channels: int
    """C, channels of a packed token."""
    networks: Sequence[torch.nn.Module]
    """Those it keeps on the device."""

    def encode_prompts(self, prompts: Sequence[str]) -> list[Tensor]:
        """Embeddings [T_i, D] without padding, one a prompt."""
        ...

    def latent_size(self, height: int, width: int) -> ImageSize:
        """Token grid of an image of height × width pixels; `UserError` if the codec cannot divide it."""
        ...

    def sigmas(self, steps: int, size: ImageSize) -> Tensor:
        """[steps + 1] float32 on the CPU, from 1 down to 0: the folder's scheduler at this size."""
        ...

    def initial_noise(self, generator: torch.Generator, size: ImageSize) -> Tensor:
        """[N, C] float32 standard normal on the CPU, as the published pipeline draws it."""
        ...

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] uint8 → packed normalised latents [B, N, C] float32 (the posterior's mode)."""
        ...

    def decode_latents(self, latents: Tensor, size: ImageSize) -> Tensor:
        """Packed latents [B, N, C] → [B, 3, H, W] uint8."""
        ...


@dataclass(frozen=True)
class ModelFamily:
    """The entry of a model in the registry: how to build, load and export it.

    `build_model(folder, model, parallel, stage)` builds the Megatron module of a pipeline stage with random
    weights, of the sizes in the folder's config; `open_pipeline(folder, device, dtype)` opens the frozen
    parts; `mapping` is the table that drives load, export and weight transfer
    (`megatron_omni.checkpoint.mapping`); `check_layout(folder, parallel)` raises `UserError` if the processes
    cannot share the model.
    """

    name: str
    build_model: "ModelBuilder"
    open_pipeline: "PipelineOpener"
    mapping: tuple
    check_layout: "LayoutCheck"
    transformer_folder: str = "transformer"


class ModelBuilder(Protocol):
    def __call__(
        self, folder: Path, model: ModelConfig, parallel: ParallelConfig, stage: Stage = WHOLE_MODEL
    ) -> torch.nn.Module: ...


class LayoutCheck(Protocol):
    def __call__(self, folder: Path, parallel: ParallelConfig) -> None: ...


class PipelineOpener(Protocol):
    def __call__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> Pipeline: ...


NamedTensors = Iterator[tuple[str, Tensor]]
