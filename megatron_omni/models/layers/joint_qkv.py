"""From two streams' projections to one joint query, key and value: RMS norm, rotation, concatenation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_omni.models.layers.rotary import rotate


class Stream(NamedTuple):
    """One stream's part of a joint sequence."""

    qkv: Tensor
    """[tokens, B, heads, 3, head_dim]: query, key and value of every head."""
    norm_weight: Tensor
    """[2, head_dim]: weights of the query's and the key's RMS norm."""
    rotation: Tensor
    """[tokens, head_dim / 2] complex: rotary angles (`megatron_omni.models.layers.rotary`)."""


def join_qkv(streams: tuple[Stream, ...], eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [all tokens, B, heads, head_dim] of the streams in their order.

    Query and key are RMS-normalised per head, then rotated, with the roundings of diffusers' `RMSNorm`
    and `apply_rotary_emb_qwen`. As one autograd node this reads and writes memory about half as often as
    the chain of operations would.
    """
    return _JoinQKV.apply(eps, *(tensor for stream in streams for tensor in stream))


class _JoinQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        streams = [Stream(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]
        tokens = sum(len(stream.qkv) for stream in streams)
        _, batch, heads, _, head_dim = streams[0].qkv.shape
        # Attention kernels are fastest on [B, heads, tokens, head_dim] in memory.
        query, key, value = (
            streams[0].qkv.new_empty(batch, heads, tokens, head_dim).permute(2, 0, 1, 3) for _ in range(3)
        )
        scales = []
        start = 0
        for qkv, norm_weight, rotation in streams:
            here = slice(start, start := start + len(qkv))
            qk = qkv[..., :2, :]
            norm = torch.linalg.vector_norm(qk, dim=-1, keepdim=True, dtype=torch.float32)
            scale = norm.square().div_(head_dim).add_(eps).rsqrt_()
            normed = (qk * scale).to(qk.dtype).mul_(norm_weight)
            rotated = rotate(normed.float(), rotation[:, None, None, None])
            query[here] = rotated[..., 0, :]
            key[here] = rotated[..., 1, :]
            value[here] = qkv[..., 2, :]
            scales.append(scale)
        ctx.save_for_backward(*tensors, *scales)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple:
        count = len(ctx.saved_tensors) // 4
        tensors, scales = ctx.saved_tensors[: 3 * count], ctx.saved_tensors[3 * count :]
        grads: list[Tensor | None] = [None]
        start = 0
        for i, scale in enumerate(scales):
            qkv, norm_weight, rotation = tensors[3 * i : 3 * i + 3]
            here = slice(start, start := start + len(qkv))
            normed = qkv[..., :2, :] * scale
            grad = torch.stack((grad_query[here], grad_key[here]), dim=-2).float()
            grad = rotate(grad, rotation[:, None, None, None].conj())
            # y = normed · weight and normed = x · scale(x), so that
            # dx = scale · (dy · weight − normed · mean(dy · weight · normed)).
            grad_normed = grad * normed
            grad_weight = grad_normed.sum((0, 1, 2))
            mean = grad_normed.mul_(norm_weight).mean(-1, keepdim=True)
            grad_qkv = torch.empty_like(qkv)
            grad_qkv[..., :2, :] = grad.mul_(norm_weight).addcmul_(normed, mean, value=-1).mul_(scale)
            grad_qkv[..., 2, :] = grad_value[here]
            grads += [grad_qkv, grad_weight.to(norm_weight.dtype), None]
        return tuple(grads)
