"""A number by which both sides see that they hold the same weights."""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}  # wraps like unsigned


def checksum(tensor: Tensor) -> int:
    """Sum, over all elements, of the unsigned integer that their bits are, modulo 2^64.

    So the checksums of a tensor's parts add up to its own. Computed on its device, in pieces: what it needs
    beside the tensor, if that is contiguous, is half a MB on a CPU, and 128 MB elsewhere.
    """
    bits = tensor.detach().view(_BITS[tensor.element_size()]).reshape(-1)
    on_cpu = tensor.device.type == "cpu"
    piece = 2**16 if on_cpu else 2**24  # a CPU adds up what fits in its cache
    narrow = on_cpu and tensor.element_size() <= 2  # then 32 bits hold the sum of a piece
    wide = torch.int32 if narrow else torch.int64
    sums = (int(part.to(wide).sum(dtype=wide)) % 2 ** (8 * wide.itemsize) for part in bits.split(piece))
    return sum(sums) % 2**64
