"""Tiny random models, one builder a family, and their weights in the Megatron layout."""

from collections.abc import Iterable

import torch
from diffusers import QwenImageTransformer2DModel
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_omni.checkpoint.mapping import Heads, Row, match

QWEN_IMAGE_SIZES = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}


def qwen_image(seed: int = 0, **sizes) -> QwenImageTransformer2DModel:
    """A diffusers Qwen-Image transformer in which every parameter matters: none is zero or one."""
    torch.manual_seed(seed)
    model = QwenImageTransformer2DModel(**(QWEN_IMAGE_SIZES | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def to_megatron(hf: dict[str, Tensor], model: nn.Module, mapping: Iterable[Row]) -> dict[str, Tensor]:
    """This rank's share of whole tensors (weights or gradients), under the names of `model`'s parameters."""
    rank, size = 0, 1
    if parallel_state.is_initialized():
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    heads = Heads(model.config.num_attention_heads, model.config.num_query_groups)
    left = dict(hf)
    shares = {}
    for entry in match(mapping, dict(model.named_parameters()), heads):
        whole = [left.pop(name) for name in entry.hf]
        parts = [tensor[entry.hf_slice(tensor.shape, rank, size)] for tensor in whole]
        shares[entry.megatron] = entry.to_megatron(parts, size)
    whole_model = model.pre_process and model.post_process
    assert not (left and whole_model), f"not in the table: {sorted(left)}"
    return shares
