"""How new weights travel from the trainer to the workers of an engine.

The trainer packs tensors into buckets (`push`) in the memory of a `Sender`, and tells the engine of each over
HTTP. The engine's workers read it through a `Receiver` that they open from the sender's description. Used on
both sides, which are different processes and often different environments. Three ways:

- "shared_memory": on one host. Workers read the sender's memory: of the device where that can be shared, else
  of the host.
- "process_group": between hosts. Each byte crosses once: every worker gets a part, then the workers exchange
  their parts.
- "folder": safetensors files in a folder that both sides see.
"""

from pathlib import Path

import torch

from megatron_omni.errors import UserError
from megatron_omni.rollout.vllm_omni.transport.base import Receiver, Sender, TransportError
from megatron_omni.rollout.vllm_omni.transport.bucket import Bucket, TensorSpec
from megatron_omni.rollout.vllm_omni.transport.checksums import checksum
from megatron_omni.rollout.vllm_omni.transport.folder import FolderSender
from megatron_omni.rollout.vllm_omni.transport.packing import PushResult, push
from megatron_omni.rollout.vllm_omni.transport.process_group import ProcessGroupSender
from megatron_omni.rollout.vllm_omni.transport.shared_memory import SharedMemorySender

__all__ = [
    "Bucket",
    "PushResult",
    "Receiver",
    "Sender",
    "TensorSpec",
    "TransportError",
    "checksum",
    "open_sender",
    "push",
]


def open_sender(
    kind: str,
    bucket_bytes: int,
    workers: int,
    device: torch.device,
    folder: Path | None = None,
    timeout: float = 300,
    engine_host: str = "127.0.0.1",
) -> Sender:
    """What sends to one engine of `workers` workers. It may be kept for many updates; close it at the end.

    The sender holds `bucket_bytes` of memory, or as much as the largest tensor if that is more. `device` is
    the trainer's. `folder` is for "folder" alone. `timeout` in seconds bounds every wait. With
    "process_group" this process listens on the address of the route to `engine_host`, and nowhere else.

    Raises `UserError` for a kind, size or folder that cannot be.
    """
    if bucket_bytes < 1:
        raise UserError(f"a weight bucket of {bucket_bytes} bytes holds nothing; give a positive size")
    match kind:
        case "shared_memory":
            return SharedMemorySender(bucket_bytes, device, timeout)
        case "process_group":
            return ProcessGroupSender(bucket_bytes, workers, device, timeout, engine_host)
        case "folder" if folder is not None:
            return FolderSender(bucket_bytes, folder, timeout)
        case "folder":
            raise UserError(
                "weights travel through a folder, and none is set; name one that the engine sees, too"
            )
    raise UserError(f"unknown weight transport {kind!r}; known: shared_memory, process_group, folder")
