"""Random numbers that depend on what they are for, never on who draws them or when."""

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any identifying values, such as (run seed, iteration, prompt, sample)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator of its own for what the parts name: the same numbers on every platform and rank."""
    return torch.Generator().manual_seed(derive_seed(*parts))
