"""Joint attention of a text and an image stream."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from megatron_omni.models.layers.joint_qkv import Stream, join_qkv
from megatron_omni.models.layers.linear import Backend, column_parallel, row_parallel
from megatron_omni.models.layers.norm import RMSNorm
from megatron_omni.models.layers.sequence import pad_sequence
from megatron_omni.parallel.context import ContextParallel
from megatron_omni.parallel.te_attention import TEAttention, te_attention
from megatron_omni.parallel.usp import usp_attention


@dataclass(frozen=True)
class JointTokens:
    """The tokens of [text, image] that a layer works on. T text and N image tokens in all."""

    rotary: tuple[Tensor, Tensor]
    """Rotations [tokens, head_dim / 2] of this rank's text and image tokens, without padding."""
    totals: tuple[int, int]
    """(T, N), over all context-parallel ranks."""
    key_mask: Tensor | None
    """[B, T + N], true where a key may be seen, in the order of context-parallel ranks; None: everywhere."""


class CoreAttention(MegatronModule):
    """Scaled dot-product attention, not causal, over the tokens of all context-parallel ranks."""

    def __init__(self, config: TransformerConfig, backend: Backend):
        super().__init__(config)
        self.context = ContextParallel.current()
        self.te_attention: TEAttention | None = None
        if self.context.size > 1 and backend.name == "transformer_engine":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.te_attention = te_attention(heads, config.kv_channels, config.params_dtype, self.context)

    @property
    def kind(self) -> str:
        """What it runs on, for the log."""
        if self.context.size == 1:
            return "scaled-dot-product attention"
        return "Transformer Engine's context-parallel attention" if self.te_attention else "USP attention"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_sizes: list[int],
        key_sizes: list[int],
    ) -> Tensor:
        """This rank's query [tokens, B, heads, head_dim], key and value → [tokens, B, heads, head_dim].

        `query_sizes` and `key_sizes`: tokens on each context-parallel rank.
        """
        if self.te_attention and self.te_attention.takes(key_mask, query_sizes, key_sizes):
            return self.te_attention(query, key, value)
        if self.context.size > 1:
            return usp_attention(query, key, value, key_mask, query_sizes, key_sizes, self.context)
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
        self.core_attention = CoreAttention(config, backend)

    def forward(self, txt: Tensor, img: Tensor, tokens: JointTokens) -> tuple[Tensor | None, Tensor]:
        """txt and img [tokens, B, hidden]; with sequence parallelism a rank's share of the padded tokens."""
        txt_tokens, img_tokens = (len(rotation) for rotation in tokens.rotary)
        txt_sizes, img_sizes = (self.core_attention.context.sizes(total) for total in tokens.totals)
        joint_sizes = [sum(sizes) for sizes in zip(txt_sizes, img_sizes, strict=True)]
        query, key, value = join_qkv(
            (self.txt.input(txt, tokens.rotary[0]), self.img.input(img, tokens.rotary[1]))
        )
        attend = partial(self.attend, key=key, value=value, key_mask=tokens.key_mask, key_sizes=joint_sizes)
        if not self.text_output:
            return None, self.img.output(attend(query[txt_tokens:], query_sizes=img_sizes))
        txt_output, img_output = attend(query, query_sizes=joint_sizes).split((txt_tokens, img_tokens))
        return self.txt.output(txt_output), self.img.output(img_output)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_sizes: list[int],
        key_sizes: list[int],
    ) -> Tensor:
        core_attention = partial(self.core_attention, query_sizes=query_sizes, key_sizes=key_sizes)
        if self.config.recompute_granularity == "selective" and self.training:
            return tensor_parallel.checkpoint(core_attention, False, query, key, value, key_mask)
        return core_attention(query, key, value, key_mask)
