"""The two ends of a transport."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_omni.errors import UserError
from megatron_omni.platforms import current_platform
from megatron_omni.rollout.vllm_omni.transport.bucket import ALIGNMENT, Bucket


class TransportError(Exception):
    """The other side died, hangs or is out of reach. A new sender and new receivers may work."""


class Sender(ABC):
    """The trainer's end: memory of two slots, and a way for the engine's workers to get at them."""

    description: dict[str, Any]
    """What the receivers open from, JSON values."""
    memory: Tensor
    """Both slots, uint8. At least one `unit` each."""

    def __init__(self, bucket_bytes: int, timeout: float, workers: int = 1):
        self.timeout = timeout
        self.unit = ALIGNMENT * workers
        """Slots are multiples of it, in bytes: parts for all workers, each aligned."""
        self.reserve(2 * max(bucket_bytes // 2 // self.unit, 1) * self.unit)

    @property
    def slot_bytes(self) -> int:
        return self.memory.numel() // 2 // self.unit * self.unit

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Replace `memory`, whose content is no longer needed, by `nbytes` of it."""

    def publish(self, bucket: Bucket) -> Bucket:
        """Make a bucket that has been packed ready to be received. Called before the engine is told of it."""
        if self.memory.device.type != "cpu":
            current_platform().synchronize()
        return bucket

    def transmit(self, bucket: Bucket) -> Future | None:
        """Begin to send it; the future is done when all has left. Called after the engine has been told."""
        return None

    def sent_bytes(self, bucket: Bucket) -> int:
        """Bytes that leave the trainer."""
        return bucket.nbytes

    def retire(self, bucket: Bucket) -> None:  # noqa: B027
        """Remove what was made for it; all workers have loaded it."""

    def end(self) -> None:  # noqa: B027
        """Give up the connections of this `push`, which is over, well or not."""

    def close(self) -> None:
        """Free everything. Receivers can still read what they have been told of, if anything."""
        self.memory = torch.empty(0, dtype=torch.uint8)

    def bytes_of(self, bucket: Bucket) -> Tensor:
        """[slot or more] uint8, where a bucket lies."""
        return self.memory[self.start(bucket.slot) :]

    def start(self, slot: int) -> int:
        return slot * self.slot_bytes

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Receiver(ABC):
    """A worker's end."""

    _kinds: ClassVar[dict[str, type["Receiver"]]] = {}

    def __init_subclass__(cls, kind: str):
        Receiver._kinds[kind] = cls

    @staticmethod
    def open(
        description: dict[str, Any], worker: int, workers: int, device: torch.device, timeout: float
    ) -> "Receiver":
        """For worker `worker` of an engine of `workers`, on its `device`, from the sender's description.

        `timeout` in seconds bounds every wait. Raises `UserError` where the sender cannot be reached
        from here by this transport, `TransportError` where it does not answer, and `ValueError` for a
        description of something else.
        """
        try:
            kind = Receiver._kinds[description["kind"]]
            return kind(description, worker, workers, device, timeout)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a weight transport: {description!r}") from error

    @abstractmethod
    def __init__(
        self, description: dict[str, Any], worker: int, workers: int, device: torch.device, timeout: float
    ): ...

    @abstractmethod
    def receive(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """The bucket's tensors, in its order, valid until the next call. Not to be written to.

        Copies from them must have ended before the trainer is told that the bucket has been loaded: on a
        device, synchronise. All workers must call it for the same buckets in the same order, since they may
        exchange parts. Raises `TransportError` where the sender or another worker is gone, or silent for the
        timeout, and `UserError` where new memory is out of reach.
        """

    def close(self) -> None:  # noqa: B027
        """Free everything but tensors that are still held."""


def require_same_hardware(ours: str, theirs: str) -> None:
    if ours != theirs:
        raise UserError(
            f"the trainer runs on {theirs} and this engine's worker on {ours}, which share no fast way for "
            "weights; run both on the same kind of device, or set the transport to folder"
        )
