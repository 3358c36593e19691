"""Entering and leaving the region where sequence parallelism splits the tokens over ranks."""

import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor


def share_length(tokens: int, config: TransformerConfig) -> int:
    """How many of `tokens` one rank has between `scatter_sequence` and `gather_sequence`, with padding."""
    return -(-tokens // config.tensor_model_parallel_size) if config.sequence_parallel else tokens


def pad_sequence(x: Tensor, config: TransformerConfig) -> Tensor:
    """x [tokens, B, channels] with zero tokens at the end, so that ranks have equal shares."""
    padding = -len(x) % config.tensor_model_parallel_size if config.sequence_parallel else 0
    return F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x


def scatter_sequence(x: Tensor, config: TransformerConfig) -> Tensor:
    """This rank's share of x [tokens, B, channels], which every rank holds; all of it without splitting."""
    if not config.sequence_parallel:
        return x
    return scatter_to_sequence_parallel_region(pad_sequence(x, config))


def gather_sequence(x: Tensor, tokens: int, config: TransformerConfig) -> Tensor:
    """The inverse: all `tokens` on every rank. What follows must be the same computation on each rank."""
    if not config.sequence_parallel:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)[:tokens]
