"""Joint attention of a text and an image stream."""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from megatron_omni.models.layers.joint_qkv import Stream, join_qkv
from megatron_omni.models.layers.linear import Backend, column_parallel, row_parallel
from megatron_omni.models.layers.norm import RMSNorm
from megatron_omni.models.layers.sequence import pad_sequence


class CoreAttention(MegatronModule):
    """Scaled dot-product attention, not causal."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        """query [tokens, B, heads, head_dim], key and value the same with their own number of tokens.

        `key_mask` [B, keys] is true where a key may be seen; None means everywhere. Returns
        [tokens, B, heads, head_dim].
        """
        output = F.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
            attn_mask=None if key_mask is None else key_mask[:, None, None],
        )
        return output.permute(2, 0, 1, 3)


class StreamProjections(MegatronModule):
    """One stream's way into attention and out of it."""

    def __init__(self, config: TransformerConfig, backend: Backend):
        super().__init__(config)
        head_dim = config.kv_channels
        width = config.num_attention_heads * head_dim
        self.linear_qkv = column_parallel(backend, config, config.hidden_size, 3 * width)
        self.q_layernorm = RMSNorm(config, head_dim)
        self.k_layernorm = RMSNorm(config, head_dim)
        self.linear_proj = row_parallel(backend, config, width, config.hidden_size)

    def input(self, x: Tensor, rotation: Tensor) -> Stream:
        """x [tokens, B, hidden], perhaps with padding behind the tokens that `rotation` has angles for."""
        qkv = self.linear_qkv(x)[0][: len(rotation)].unflatten(-1, (-1, 3, self.config.kv_channels))
        return Stream(qkv, torch.stack((self.q_layernorm.weight, self.k_layernorm.weight)), rotation)

    def output(self, x: Tensor) -> Tensor:
        """x [tokens, B, heads, head_dim] → [tokens, B, hidden], with the padding of the input."""
        return self.linear_proj(pad_sequence(x.flatten(-2), self.config))[0]


class JointAttention(MegatronModule):
    """Attention over [text, image], each with projections of its own.

    Matches `diffusers.models.transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0`. With
    `text_output=False` the text is only attended to.
    """

    def __init__(self, config: TransformerConfig, backend: Backend, text_output: bool):
        super().__init__(config)
        self.text_output = text_output
        self.txt = StreamProjections(config, backend)
        self.img = StreamProjections(config, backend)
        self.core_attention = CoreAttention(config)

    def forward(
        self, txt: Tensor, img: Tensor, rotary: tuple[Tensor, Tensor], key_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """txt and img [tokens, B, hidden]; with sequence parallelism this rank's share of the padded tokens.

        `rotary` are the rotations of the text and of the image tokens, without padding.
        """
        txt_tokens, img_tokens = (len(rotation) for rotation in rotary)
        query, key, value = join_qkv((self.txt.input(txt, rotary[0]), self.img.input(img, rotary[1])))
        if not self.text_output:
            return None, self.img.output(self.attend(query[txt_tokens:], key, value, key_mask))
        output = self.attend(query, key, value, key_mask)
        txt_output, img_output = output.split((txt_tokens, img_tokens))
        return self.txt.output(txt_output), self.img.output(img_output)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        if self.config.recompute_granularity == "selective" and self.training:
            return tensor_parallel.checkpoint(self.core_attention, False, query, key, value, key_mask)
        return self.core_attention(query, key, value, key_mask)
