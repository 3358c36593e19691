"""The frozen parts round Qwen-Image: text encoder, image codec and sigma schedule."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from megatron_omni.errors import UserError
from megatron_omni.models.base import ImageSize

PROMPT_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
"""Tokens of the template before the prompt; their embeddings are dropped."""
MAX_PROMPT_TOKENS = 1024

CLASS_NAME = "QwenImagePipeline"
COMPONENTS = {
    "tokenizer": Qwen2Tokenizer,
    "text_encoder": Qwen2_5_VLForConditionalGeneration,
    "vae": AutoencoderKLQwenImage,
    "scheduler": FlowMatchEulerDiscreteScheduler,
}


class QwenImagePipeline:
    """`megatron_omni.models.base.Pipeline` for a diffusers QwenImagePipeline folder, without its transformer.

    Prompt embeddings, latents, pictures and sigmas equal those of `diffusers.QwenImagePipeline`.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype):
        """Opens `folder`; raises `UserError` if it is no such folder or one of its parts is missing."""
        self.device = device
        check_folder(folder)
        self.tokenizer = open_component(folder, "tokenizer")
        self.scheduler = open_component(folder, "scheduler")
        text_encoder = open_component(folder, "text_encoder", dtype=dtype)
        # The language head would only cost time: the embeddings are the last hidden states.
        self.text_encoder = text_encoder.model.to(device).eval().requires_grad_(False)
        self.codec = (
            ImageCodec(open_component(folder, "vae", torch_dtype=dtype, low_cpu_mem_usage=False))
            .to(device)
            .eval()
        )
        self.codec.requires_grad_(False)
        self.latent_channels = 4 * self.codec.channels
        self.networks = (self.text_encoder, self.codec)

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> list[Tensor]:
        """Embeddings [T_i, D] without padding, one a prompt, of at most 1024 tokens, in the encoder's dtype.

        Prompts are encoded one by one, so that an embedding never depends on its neighbours, to the last bit.
        Matches `diffusers.QwenImagePipeline._get_qwen_prompt_embeds`.
        """
        return [self._encode_prompt(prompt) for prompt in prompts]

    def _encode_prompt(self, prompt: str) -> Tensor:
        tokens = self.tokenizer(
            PROMPT_TEMPLATE.format(prompt),
            max_length=MAX_PROMPT_TOKENS + TEMPLATE_TOKENS,
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        hidden = self.text_encoder(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
        ).last_hidden_state
        return hidden[0, TEMPLATE_TOKENS:]

    def latent_size(self, height: int, width: int) -> ImageSize:
        """Token grid of an image of height × width pixels; `UserError` if the codec cannot divide it."""
        pixels = 2 * self.codec.stride
        if height % pixels or width % pixels:
            raise UserError(f"image size {height}×{width}: height and width must be multiples of {pixels}.")
        return ImageSize(height // pixels, width // pixels)

    def sigmas(self, steps: int, size: ImageSize) -> Tensor:
        """[steps + 1] float32 on the CPU, from 1 to 0, as `diffusers.QwenImagePipeline.__call__` sets them.

        Raises `UserError` for a single step where the schedule is stretched to end at `shift_terminal`.
        """
        if steps < 2 and self.scheduler.config.shift_terminal:
            raise UserError(f"{steps} denoising step: this model's schedule needs at least 2.")
        config = self.scheduler.config
        mu = calculate_shift(
            size.height * size.width,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return self.scheduler.sigmas

    def initial_noise(self, generator: torch.Generator, size: ImageSize) -> Tensor:
        """[N, C] float32 on the CPU: the numbers `diffusers.QwenImagePipeline` draws from this generator."""
        noise = torch.randn(1, self.codec.channels, 2 * size.height, 2 * size.width, generator=generator)
        return pack(noise)[0]

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] uint8 → packed normalised latents [B, N, C] float32 (the posterior's mode)."""
        self.latent_size(*images.shape[2:])
        return pack(self.codec.encode(images.to(self.device).float() / 127.5 - 1))

    @torch.no_grad()
    def decode_latents(self, latents: Tensor, size: ImageSize) -> Tensor:
        """Packed latents [B, N, C] → [B, 3, H, W] uint8."""
        images = self.codec.decode(unpack(latents.float(), size))
        return ((images / 2 + 0.5) * 255).round().to(torch.uint8)


def check_folder(folder: Path) -> None:
    """Raises `UserError` unless `folder` holds a diffusers QwenImagePipeline."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(f"model folder {str(folder)!r} has no model_index.json: give a diffusers folder.")
    try:
        class_name = json.loads(index.read_text())["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is damaged ({error!r}): fetch the model again.") from error
    if class_name != CLASS_NAME:
        raise UserError(f"model folder {str(folder)!r} holds a {class_name}, not a {CLASS_NAME}.")


def open_component(folder: Path, name: str, **options: Any) -> Any:
    """The part `name` of a pipeline folder; raises `UserError` if it is missing or damaged."""
    if not (folder / name).is_dir():
        raise UserError(f"model folder {str(folder)!r} has no {name}/: fetch the model again.")
    transformers_logging.disable_progress_bar()  # a run has a display of its own
    try:
        return COMPONENTS[name].from_pretrained(folder / name, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} of model folder {str(folder)!r} cannot be opened: {error}") from error


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] → tokens [B, H/2·W/2, 4C]: each is a 2×2 patch, channel first."""
    return nn.functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpack(tokens: Tensor, size: ImageSize) -> Tensor:
    """The inverse of `pack`."""
    return nn.functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (size.height, size.width)), 2)


class ImageCodec(nn.Module):
    """`AutoencoderKLQwenImage` for single images, with normalised latents.

    That class is a causal video codec: before the first frame it pads with zeros, so for an image only the
    last temporal tap of each kernel counts. Two-dimensional convolutions by that tap give the same result.
    """

    def __init__(self, vae: AutoencoderKLQwenImage):
        super().__init__()
        vae = copy.deepcopy(vae)
        self.encoder, self.quant_conv = vae.encoder, vae.quant_conv
        self.decoder, self.post_quant_conv = vae.decoder, vae.post_quant_conv
        replace_causal_convolutions(self)
        self.channels = vae.config.z_dim
        self.stride = vae.spatial_compression_ratio
        self.dtype = vae.dtype
        self.register_buffer("mean", torch.tensor(vae.config.latents_mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(vae.config.latents_std).view(-1, 1, 1), persistent=False)

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] → normalised latents [B, C, H/8, W/8] float32."""
        moments = self.quant_conv(self.encoder(images.to(self.dtype).unsqueeze(2))).squeeze(2)
        mode = moments.chunk(2, dim=1)[0]
        return (mode.float() - self.mean) / self.std

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, C, h, w] → images [B, 3, 8h, 8w] in [-1, 1], float32."""
        latents = (latents * self.std + self.mean).to(self.dtype)
        return self.decoder(self.post_quant_conv(latents.unsqueeze(2))).squeeze(2).float().clamp(-1, 1)


class ImageConv(nn.Conv2d):
    """A causal video convolution on an image [B, C, 1, H, W]."""

    def __init__(self, causal: QwenImageCausalConv3d):
        # `_padding` is (left, right, top, bottom, front, back).
        padding = (causal._padding[2], causal._padding[0])
        super().__init__(
            causal.in_channels, causal.out_channels, causal.kernel_size[1:], causal.stride[1:], padding
        )
        self.weight = nn.Parameter(causal.weight.detach()[:, :, -1].contiguous())
        self.bias = causal.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.squeeze(2)).unsqueeze(2)


def replace_causal_convolutions(module: nn.Module) -> None:
    """Replaces every `QwenImageCausalConv3d` in `module` by an `ImageConv` with its weights."""
    for name, child in module.named_children():
        if isinstance(child, QwenImageCausalConv3d):
            setattr(module, name, ImageConv(child))
        else:
            replace_causal_convolutions(child)
