"""Arrays and JSON values in one message, as a safetensors file: what travels between processes and hosts."""

import json
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

CONTENT_TYPE = "application/vnd.safetensors"
_METADATA = "json"


def pack(metadata: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """A message from JSON values and named arrays."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(contiguous, metadata={_METADATA: json.dumps(metadata)})


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The inverse of `pack`. Raises `ValueError` for anything else."""
    try:
        arrays = load(message)
        length = int.from_bytes(message[:8], "little")
        header = json.loads(message[8 : 8 + length])
        return json.loads(header["__metadata__"][_METADATA]), arrays
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a message of this program: {error!r}") from error
