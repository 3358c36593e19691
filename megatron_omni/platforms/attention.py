"""Attention over a part of the keys, with what it takes to merge the parts.

Query is [B, heads, q, head_dim], key and value are [B, heads, k, head_dim]; `key_mask` [B, k] is true where a
key may be seen, None: everywhere. The log-sum-exp (lse) is log Σ exp(query · key / √head_dim) over the keys,
float32 [B, heads, q].
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionKernel(ABC):
    """Scaled dot-product attention, not causal. A sample may have no query, no key, or no key to see."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output, as query, and lse. Where no key may be seen, lse is -inf and the output means nothing."""
        if not (query.numel() and key.numel()):
            return torch.zeros_like(query), query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
        if key_mask is None:
            return self._forward(query, key, value, None)
        blind = ~key_mask.any(1, keepdim=True)
        output, lse = self._forward(query, key, value, key_mask | blind)
        return output, lse.masked_fill(blind[:, None], -math.inf)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        output: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value through these keys; `output` and `lse` are over all keys."""
        if not (query.numel() and key.numel()):
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        if key_mask is None:
            return self._backward(grad_output, query, key, value, None, output, lse)
        blind = ~key_mask.any(1, keepdim=True)
        lse = lse.masked_fill(blind[:, None], math.inf)  # probabilities are exp(score - lse): zero
        return self._backward(grad_output, query, key, value, key_mask | blind, output, lse)

    @abstractmethod
    def _forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`forward` where every sample may see a key."""

    @abstractmethod
    def _backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        output: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` where every sample may see a key."""


class PlainAttention(AttentionKernel):
    """In float32, for any device. Holds all scores at once."""

    def _forward(self, query, key, value, key_mask):
        scores = _scores(query, key, key_mask)
        lse = scores.logsumexp(-1)
        probabilities = (scores - lse[..., None]).exp()
        return (probabilities @ value.float()).to(query.dtype), lse

    def _backward(self, grad_output, query, key, value, key_mask, output, lse):
        # FlashAttention-2 (arXiv 2307.08691), algorithm 2, with all keys as one block.
        grad_output = grad_output.float()
        probabilities = (_scores(query, key, key_mask) - lse[..., None]).exp()
        grad_value = probabilities.mT @ grad_output
        grad_probabilities = grad_output @ value.float().mT
        delta = (grad_output * output).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - delta) / math.sqrt(query.shape[-1])
        grad_query = grad_scores @ key.float()
        grad_key = grad_scores.mT @ query.float()
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


class CpuAttention(AttentionKernel):
    """torch's flash attention for CPUs."""

    def _forward(self, query, key, value, key_mask):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=_bias(query, key_mask)
        )

    def _backward(self, grad_output, query, key, value, key_mask, output, lse):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, output, lse, 0.0, False, attn_mask=_bias(query, key_mask)
        )


class CudaAttention(AttentionKernel):
    """torch's flash attention for 16 bits without a mask, else its memory-efficient attention.

    The backward adds in a fixed order only under `torch.use_deterministic_algorithms(True)`.
    """

    def _forward(self, query, key, value, key_mask):
        if _flash_takes(query, key_mask):
            return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[:2]
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned_bias(query, key_mask), compute_log_sumexp=True
        )
        return output, lse[..., : query.shape[2]]  # it pads

    def _backward(self, grad_output, query, key, value, key_mask, output, lse):
        random = torch.empty(0, dtype=torch.int64, device=query.device)  # dropout's seed and offset: unused
        if _flash_takes(query, key_mask):
            lengths = (None, None, query.shape[2], key.shape[2])
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_output, query, key, value, output, lse.contiguous(), *lengths, 0.0, False, random, random
            )
        # The kernel takes for granted that lse is padded to 32 queries, as its forward pads it, and that
        # the output is contiguous as [B, q, heads, head_dim].
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        bias = _aligned_bias(query, key_mask)
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_output, query, key, value, bias, output, lse, random, random, 0.0, (True, True, True, False)
        )[:3]


def _scores(query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
    scores = query.float() @ key.float().mT / math.sqrt(query.shape[-1])
    return scores if key_mask is None else scores.masked_fill(~key_mask[:, None, None], -math.inf)


def _bias(query: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """What the mask adds to the scores, [B, 1, 1, k]."""
    if key_mask is None:
        return None
    return query.new_zeros(key_mask.shape).masked_fill(~key_mask, -math.inf)[:, None, None]


def _aligned_bias(query: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """The same as [B, heads, q, k], with rows that begin at multiples of 16 elements in memory."""
    if key_mask is None:
        return None
    batch, keys = key_mask.shape
    bias = _bias(query, F.pad(key_mask, (0, -keys % 16)))[..., :keys]
    return bias.expand(batch, *query.shape[1:3], keys)


def _flash_takes(query: Tensor, key_mask: Tensor | None) -> bool:
    return query.element_size() == 2 and key_mask is None and query.shape[3] % 8 == 0
