"""Packing a model's tensors into buckets and handing these over, one being packed while another is loaded."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_omni.rollout.vllm_omni.transport.background import in_background
from megatron_omni.rollout.vllm_omni.transport.base import Sender, TransportError
from megatron_omni.rollout.vllm_omni.transport.bucket import Bucket, TensorSpec, aligned
from megatron_omni.rollout.vllm_omni.transport.checksums import checksum

Deliver = Callable[[Bucket], Future]


@dataclass
class PushResult:
    nbytes: int = 0
    """That left the trainer for this engine."""
    checksum: int = 0
    """Of all tensors together, as `checksum` computes it, in the dtype they were sent in."""
    names: list[str] = field(default_factory=list)
    buckets: int = 0


@torch.no_grad()
def push(
    tensors: Iterable[tuple[str, Tensor]],
    sender: Sender,
    deliver: Deliver,
    dtype: torch.dtype | None = None,
) -> PushResult:
    """Send `tensors` to one engine, in their order; floating-point ones as `dtype` if that is given.

    `deliver` tells the engine of a bucket and returns at once a future that is done when all workers have
    loaded it, or has failed. One bucket is on its way at a time, and the next is packed meanwhile.

    `tensors` is exhausted in every case, so that a collective iterator, of which the other ranks take all
    tensors as well, leaves none of them waiting. Then raises what `deliver` raised or its future failed with,
    or `TransportError` when a worker is gone or silent for the sender's timeout. The sender
    can be used again.
    """
    tensors = iter(tensors)
    packer = _Packer(sender, deliver)
    try:
        for name, tensor in tensors:
            packer.add(name, tensor, dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        return packer.finish()
    finally:
        sender.end()
        for _ in tensors:
            pass


class _Packer:
    def __init__(self, sender: Sender, deliver: Deliver):
        self.sender, self.deliver = sender, deliver
        self.result = PushResult()
        self.slot, self.nbytes, self.specs = 0, 0, []
        self.on_its_way: tuple[Bucket, list[Future]] | None = None

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        self.raise_early()
        spec = TensorSpec(name, tuple(tensor.shape), dtype, aligned(self.nbytes))
        if spec.offset + spec.nbytes > self.sender.slot_bytes:
            self.hand_over()
            spec = replace(spec, offset=0)
        if spec.nbytes > self.sender.slot_bytes:
            self.add_alone(spec, tensor)
            return
        self.pack(spec, tensor)

    def add_alone(self, spec: TensorSpec, tensor: Tensor) -> None:
        """A tensor larger than a slot takes both, and more memory if need be."""
        self.settle()
        if spec.nbytes > self.sender.memory.numel():
            self.sender.reserve(aligned(spec.nbytes, self.sender.unit))
        self.slot = 0
        self.pack(spec, tensor)
        self.hand_over()
        self.settle()

    def pack(self, spec: TensorSpec, tensor: Tensor) -> None:
        spec.view(self.sender.memory[self.sender.start(self.slot) :]).copy_(tensor)
        self.specs.append(spec)
        self.nbytes = spec.offset + spec.nbytes

    def hand_over(self) -> None:
        """Deliver what is packed, once the bucket before it has been loaded, and go on in that one's slot."""
        if not self.specs:
            return
        bucket = self.sender.publish(Bucket(self.slot, self.nbytes, tuple(self.specs)))
        self.settle()
        work = [self.deliver(bucket), self.sender.transmit(bucket), in_background(self.sum_up, bucket)]
        self.on_its_way = bucket, [future for future in work if future]
        self.slot, self.nbytes, self.specs = 1 - self.slot, 0, []

    def sum_up(self, bucket: Bucket) -> None:
        for name, tensor in bucket.views(self.sender.bytes_of(bucket)):
            self.result.names.append(name)
            self.result.checksum = (self.result.checksum + checksum(tensor)) % 2**64
        self.result.nbytes += self.sender.sent_bytes(bucket)
        self.result.buckets += 1

    def settle(self) -> None:
        """Wait until the bucket on its way has been loaded."""
        if not self.on_its_way:
            return
        (bucket, work), self.on_its_way = self.on_its_way, None
        done, waiting = wait(work, self.sender.timeout, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if waiting:
            raise TransportError(
                f"the engine has not loaded a bucket of {bucket.nbytes} bytes of the weights within "
                f"{self.sender.timeout:g} s"
            )
        self.sender.retire(bucket)

    def raise_early(self) -> None:
        """Of the bucket on its way, what has failed already."""
        for future in self.on_its_way[1] if self.on_its_way else []:
            if future.done():
                future.result()

    def finish(self) -> PushResult:
        self.hand_over()
        self.settle()
        return self.result
