"""Qwen-Image's transformer (arXiv:2508.02324) as a Megatron module.

The oracle is `diffusers.QwenImageTransformer2DModel`. Inside, tensors are [tokens, B, …], as everywhere
in Megatron.
"""

from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.models.layers.attention import JointAttention
from megatron_omni.models.layers.linear import Backend, replicated
from megatron_omni.models.layers.mlp import MLP
from megatron_omni.models.layers.modulation import Modulation, add_gated, modulate
from megatron_omni.models.layers.norm import RMSNorm
from megatron_omni.models.layers.rotary import rotations
from megatron_omni.models.layers.sequence import gather_sequence, scatter_sequence
from megatron_omni.models.layers.time_embedding import TimeEmbedding
from megatron_omni.models.qwen_image.config import QwenImageConfig


def positions(size: ImageSize, text_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Integer (frame, height, width) of the text tokens [T, 3] and of the image tokens [N, 3].

    The image is centred, so that half its coordinates are negative. Text runs along the diagonal from the
    image's edge on, over the padded width: a token's position depends on the tokens before it only.
    """
    start = max(size.height // 2, size.width // 2)
    text = torch.arange(start, start + text_tokens, device=device)[:, None].expand(-1, 3)
    height = torch.arange(size.height, device=device) - (size.height - size.height // 2)
    width = torch.arange(size.width, device=device) - (size.width - size.width // 2)
    image = torch.cartesian_prod(torch.zeros(1, dtype=torch.long, device=device), height, width)
    return text, image


@lru_cache(maxsize=64)
def rotary_tables(
    size: ImageSize, text_tokens: int, axes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    # A table made in inference mode could not be used in training.
    with torch.inference_mode(False):
        text, image = positions(size, text_tokens, device)
        return rotations(text, axes), rotations(image, axes)


class QwenImageLayer(MegatronModule):
    """Double-stream block, as diffusers' `QwenImageTransformerBlock`.

    The last layer's text output is never used. There the text branch after attention is not computed, and
    its parameters, which can get no gradient, are frozen: data parallelism does not wait for them.
    """

    def __init__(self, config: TransformerConfig, backend: Backend, is_last: bool):
        super().__init__(config)
        self.is_last = is_last
        partial_grad = config.sequence_parallel
        self.img_modulation = Modulation(config, chunks=6, partial_grad=partial_grad)
        self.txt_modulation = Modulation(config, chunks=6, partial_grad=partial_grad)
        self.attention = JointAttention(config, backend, text_output=not is_last)
        self.img_mlp = MLP(config, backend)
        self.txt_mlp = MLP(config, backend)
        if is_last:
            for unused in (self.attention.txt.linear_proj, self.txt_mlp):
                unused.requires_grad_(False)

    def forward(
        self,
        txt: Tensor,
        img: Tensor,
        txt_modulation: Tensor,
        img_modulation: Tensor,
        rotary: tuple[Tensor, Tensor],
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """txt and img [tokens, B, hidden], modulations [B, 6 * hidden], key_mask [B, text + image tokens]."""
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = txt_modulation.chunk(6, dim=-1)
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = img_modulation.chunk(6, dim=-1)

        txt_attention, img_attention = self.attention(
            modulate(txt, txt_shift1, txt_scale1), modulate(img, img_shift1, img_scale1), rotary, key_mask
        )
        img = add_gated(img, img_gate1, img_attention)
        img = add_gated(img, img_gate2, self.img_mlp(modulate(img, img_shift2, img_scale2)))
        if not self.is_last:
            txt = add_gated(txt, txt_gate1, txt_attention)
            txt = add_gated(txt, txt_gate2, self.txt_mlp(modulate(txt, txt_shift2, txt_scale2)))
        return txt, img


class QwenImageModel(MegatronModule):
    """`megatron_omni.models.base.DiffusionModel`: the velocity of rectified flow."""

    def __init__(self, qwen: QwenImageConfig, config: TransformerConfig, backend: Backend):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # asked for by Megatron's schedules
        self.implementation = f"{backend.name} layers, scaled-dot-product attention"
        self.qwen = qwen
        self.img_in = replicated(config, qwen.in_channels, config.hidden_size)
        self.txt_norm = RMSNorm(config, qwen.joint_attention_dim)
        self.txt_in = replicated(config, qwen.joint_attention_dim, config.hidden_size)
        self.time_embedding = TimeEmbedding(config)
        self.layers = nn.ModuleList(
            QwenImageLayer(config, backend, is_last=number == qwen.num_layers - 1)
            for number in range(qwen.num_layers)
        )
        self.final_modulation = Modulation(config, chunks=2, partial_grad=False)
        self.proj_out = replicated(config, config.hidden_size, qwen.output_size)
        nn.init.zeros_(self.proj_out.weight)

    def forward(self, latents: Tensor, sigma: Tensor, condition: TextCondition, size: ImageSize) -> Tensor:
        """latents [B, N, C], sigma [B] in [0, 1], N = size.height * size.width.

        Returns velocity [B, N, C] in the dtype of the latents; the computation is in the parameters' dtype.
        """
        dtype = self.config.params_dtype
        text_tokens = condition.embeddings.shape[1]
        rotary = rotary_tables(size, text_tokens, self.qwen.axes_dims_rope, latents.device)
        key_mask = F.pad(condition.mask, (0, latents.shape[1]), value=True) if condition.padded else None
        silu_time = F.silu(self.time_embedding(sigma))

        img = self.img_in(latents.to(dtype).transpose(0, 1))
        txt = self.txt_in(self.txt_norm(condition.embeddings.to(dtype))).transpose(0, 1)
        txt, img = scatter_sequence(txt, self.config), scatter_sequence(img, self.config)
        txt, img = self.run_layers(txt, img, silu_time, rotary, key_mask)
        img = gather_sequence(img, latents.shape[1], self.config)

        scale, shift = self.final_modulation(silu_time).chunk(2, dim=-1)
        return self.proj_out(modulate(img, shift, scale)).transpose(0, 1).to(latents.dtype)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Called by Megatron's schedules: what an earlier pipeline stage sends. Here there is none."""

    def run_layers(
        self, txt: Tensor, img: Tensor, silu_time: Tensor, *constants: Any
    ) -> tuple[Tensor, Tensor]:
        """All layers; with full recomputation in chunks whose activations are computed again backwards.

        Modulations stay outside the chunks: they are small to keep, and their communication is not repeated.
        """
        recompute = self.config.recompute_granularity == "full" and self.training
        step = self.config.recompute_num_layers if recompute else 1

        def run(
            layers: nn.ModuleList, txt: Tensor, img: Tensor, *modulations: Tensor
        ) -> tuple[Tensor, Tensor]:
            for i, layer in enumerate(layers):
                txt, img = layer(txt, img, modulations[2 * i], modulations[2 * i + 1], *constants)
            return txt, img

        for start in range(0, len(self.layers), step):
            layers = self.layers[start : start + step]
            tensors = [txt, img]
            for layer in layers:
                tensors += [layer.txt_modulation(silu_time), layer.img_modulation(silu_time)]
            if recompute:
                txt, img = tensor_parallel.checkpoint(partial(run, layers), False, *tensors)
            else:
                txt, img = run(layers, *tensors)
        return txt, img

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Tensors under their global names, so that a checkpoint loads at every layout."""
        tp_group = parallel_state.get_tensor_model_parallel_group()
        children = {name: module for name, module in self.named_children() if module is not self.layers}
        children |= {f"layers.{number}": layer for number, layer in enumerate(self.layers)}
        sharded = {}
        for name, module in children.items():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group
            )
        return sharded
