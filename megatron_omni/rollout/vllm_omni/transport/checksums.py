"""A number by which both sides see that they hold the same weights."""

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = 8
"""Bytes."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Sum of the 64-bit words that the tensor's rows (the last dimension) consist of, modulo 2^64.

    A row that is no whole number of words ends with zeros. So the checksums of a tensor's parts add up to its
    own, if it is cut between rows or at whole words, as tensor parallelism does. Computed on its device; a
    tensor that is contiguous and has rows of whole words needs no memory beside.
    """
    if not tensor.numel():
        return 0
    per_word = WORD // tensor.element_size()
    rows = torch.atleast_1d(tensor.detach()).view(_BITS[tensor.element_size()])
    if missing := -rows.shape[-1] % per_word:
        rows = F.pad(rows, (0, missing))
    flat = rows.reshape(-1)
    if flat.storage_offset() % per_word:  # words cannot be seen in it
        flat = flat.clone()
    return int(flat.view(torch.int64).sum()) % 2**64
