"""Qwen-Image's transformer (arXiv:2508.02324) as a Megatron module.

The oracle is `diffusers.QwenImageTransformer2DModel`. Inside, tensors are [tokens, B, …], as everywhere
in Megatron.
"""

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.models.layers.attention import JointAttention, JointTokens
from megatron_omni.models.layers.linear import Backend, replicated
from megatron_omni.models.layers.mlp import MLP
from megatron_omni.models.layers.modulation import Modulation, add_gated, modulate
from megatron_omni.models.layers.norm import RMSNorm
from megatron_omni.models.layers.rotary import rotations
from megatron_omni.models.layers.sequence import gather_sequence, scatter_sequence, share_length
from megatron_omni.models.layers.time_embedding import TimeEmbedding
from megatron_omni.models.qwen_image.config import QwenImageConfig
from megatron_omni.parallel.context import ContextParallel
from megatron_omni.parallel.stages import WHOLE_MODEL, Stage


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
        tokens: JointTokens,
    ) -> tuple[Tensor, Tensor]:
        """txt and img [tokens, B, hidden], modulations [B, 6 * hidden]."""
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = txt_modulation.chunk(6, dim=-1)
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = img_modulation.chunk(6, dim=-1)

        txt_attention, img_attention = self.attention(
            modulate(txt, txt_shift1, txt_scale1), modulate(img, img_shift1, img_scale1), tokens
        )
        img = add_gated(img, img_gate1, img_attention)
        img = add_gated(img, img_gate2, self.img_mlp(modulate(img, img_shift2, img_scale2)))
        if not self.is_last:
            txt = add_gated(txt, txt_gate1, txt_attention)
            txt = add_gated(txt, txt_gate2, self.txt_mlp(modulate(txt, txt_shift2, txt_scale2)))
        return txt, img


class QwenImageModel(MegatronModule):
    """`megatron_omni.models.base.DiffusionModel`: the velocity of rectified flow, or a stage of it.

    Parameters have the same names at every layout: layers go by their number in the whole model. Stages
    hand on one tensor: text tokens, image tokens and, as a last token, the time embedding.
    """

    def __init__(
        self, qwen: QwenImageConfig, config: TransformerConfig, backend: Backend, stage: Stage = WHOLE_MODEL
    ):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # asked for by Megatron's schedules
        self.vp_stage = None
        self.pre_process, self.post_process = stage.is_first, stage.is_last
        self.share_embeddings_and_output_weights = False
        self.qwen = qwen
        self.context = ContextParallel.current()
        self.input_tensor: Tensor | None = None
        if self.pre_process:
            self.img_in = replicated(config, qwen.in_channels, config.hidden_size)
            self.txt_norm = RMSNorm(config, qwen.joint_attention_dim)
            self.txt_in = replicated(config, qwen.joint_attention_dim, config.hidden_size)
            self.time_embedding = TimeEmbedding(config)
        self.layers = nn.ModuleDict(
            {
                str(number): QwenImageLayer(config, backend, is_last=number == qwen.num_layers - 1)
                for number in stage.layers(qwen.num_layers)
            }
        )
        first_layer = next(iter(self.layers.values()))
        self.implementation = f"{backend.name} layers, {first_layer.attention.core_attention.kind}"
        if self.post_process:
            self.final_modulation = Modulation(config, chunks=2, partial_grad=False)
            self.proj_out = replicated(config, config.hidden_size, qwen.output_size)
            nn.init.zeros_(self.proj_out.weight)

    def forward(self, latents: Tensor, sigma: Tensor, condition: TextCondition, size: ImageSize) -> Tensor:
        """latents [B, N, C], sigma [B] in [0, 1], N = size.height * size.width.

        Returns velocity [B, N, C] in the dtype of the latents; the computation is in the parameters' dtype.
        A stage that is not the last returns what the next one takes by `set_input_tensor`, of `hop_shape`.
        """
        text_tokens, image_tokens = condition.embeddings.shape[1], latents.shape[1]
        text, image = self.context.share(text_tokens), self.context.share(image_tokens)
        if self.pre_process:
            txt, img, silu_time = self.embed(latents[:, image], sigma, condition.embeddings[:, text])
        else:
            lengths = self.share_lengths(text_tokens, image_tokens)
            txt, img, silu_time = self.input_tensor.split((*lengths, 1))
            silu_time = silu_time[0]

        rotary = rotary_tables(size, text_tokens, self.qwen.axes_dims_rope, latents.device)
        tokens = JointTokens(
            (rotary[0][text], rotary[1][image]),
            (text_tokens, image_tokens),
            self.key_mask(condition, image_tokens),
        )
        txt, img = self.run_layers(txt, img, silu_time, tokens)
        if not self.post_process:
            return torch.cat((txt, img, silu_time[None]))

        img = gather_sequence(img, image.stop - image.start, self.config)
        scale, shift = self.final_modulation(silu_time).chunk(2, dim=-1)
        velocity = self.proj_out(modulate(img, shift, scale))
        return self.context.gather(velocity, image_tokens).transpose(0, 1).to(latents.dtype)

    def embed(self, latents: Tensor, sigma: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's text and image tokens [tokens, B, hidden], and SiLU(time embedding) [B, hidden]."""
        dtype = self.config.params_dtype
        img = self.img_in(latents.to(dtype).transpose(0, 1))
        txt = self.txt_in(self.txt_norm(embeddings.to(dtype))).transpose(0, 1)
        silu_time = F.silu(self.time_embedding(sigma))
        return scatter_sequence(txt, self.config), scatter_sequence(img, self.config), silu_time

    def key_mask(self, condition: TextCondition, image_tokens: int) -> Tensor | None:
        """[B, tokens], in the order of context-parallel ranks; None if no prompt is padded."""
        if not condition.padded:
            return None
        image = condition.mask.new_ones(len(condition.mask), image_tokens)
        return self.context.joint_mask([condition.mask, image])

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Called by Megatron's schedules: what the stage before has sent."""
        (self.input_tensor,) = input_tensor

    def hop_shape(self, latents: Tensor, condition: TextCondition) -> tuple[int, int, int]:
        """Shape of the tensor that goes from stage to stage on this rank."""
        lengths = self.share_lengths(condition.embeddings.shape[1], latents.shape[1])
        return sum(lengths) + 1, len(latents), self.config.hidden_size

    def share_lengths(self, *tokens: int) -> list[int]:
        """This rank's share of streams of `tokens`, with the padding of sequence parallelism."""
        return [share_length(self.context.sizes(each)[self.context.rank], self.config) for each in tokens]

    def run_layers(
        self, txt: Tensor, img: Tensor, silu_time: Tensor, tokens: JointTokens
    ) -> tuple[Tensor, Tensor]:
        """All layers; those of a recomputed group keep its input only, and run again backwards.

        Modulations stay outside the groups: they are small to keep, and their communication is not repeated.
        """

        def run(
            layers: list[QwenImageLayer], txt: Tensor, img: Tensor, *modulations: Tensor
        ) -> tuple[Tensor, Tensor]:
            for i, layer in enumerate(layers):
                txt, img = layer(txt, img, modulations[2 * i], modulations[2 * i + 1], tokens)
            return txt, img

        for layers, recomputed in self.layer_groups():
            tensors = [txt, img]
            for layer in layers:
                tensors += [layer.txt_modulation(silu_time), layer.img_modulation(silu_time)]
            if recomputed:
                txt, img = tensor_parallel.checkpoint(partial(run, layers), False, *tensors)
            else:
                txt, img = run(layers, *tensors)
        return txt, img

    def layer_groups(self) -> list[tuple[list[QwenImageLayer], bool]]:
        """Groups of layers in order, and whether a group's activations are recomputed."""
        layers, count = list(self.layers.values()), self.config.recompute_num_layers
        if self.config.recompute_granularity != "full" or not self.training:
            return [([layer], False) for layer in layers]
        if self.config.recompute_method == "block":
            return [([layer], number < count) for number, layer in enumerate(layers)]
        return [(layers[start : start + count], True) for start in range(0, len(layers), count)]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Tensors under their global names, so that a checkpoint loads at every layout."""
        tp_group = parallel_state.get_tensor_model_parallel_group()
        children = {name: module for name, module in self.named_children() if module is not self.layers}
        children |= {f"layers.{number}": layer for number, layer in self.layers.items()}
        sharded = {}
        for name, module in children.items():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group
            )
        return sharded
