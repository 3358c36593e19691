"""Forward passes of many samples through pipeline stages that are kept busy, without gradients."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import ProcessGroup

Result = TypeVar("Result")


class PassInput(Protocol):
    """What one forward pass takes; its output has the shape and dtype of `latents`."""

    latents: Tensor
    condition: Any


Lane = Generator[PassInput, Tensor, Result]
"""A computation of several forward passes: yields the input of each, is sent its output, returns a result."""


@dataclass
class _Pass:
    """A lane's pass on its way through the stages."""

    lane: Lane
    input: PassInput
    chunks_done: int = 0
    """Of this process's chunks."""
    output: Tensor | None = None
    """On the process of the last stage."""


class ForwardPipeline:
    """Runs lanes through a model's stages, at least as many at a time as there are stages.

    Every process of the pipeline runs every lane and gets the same results. While one lane's pass is in a
    later stage, the next lane's is in an earlier one; a lane's next pass sets out when its output has come
    back from the last stage. So no stage waits, but at the very beginning and end.
    """

    def __init__(
        self, chunks: list[nn.Module], forward: Callable[[nn.Module, PassInput], Tensor], dtype: torch.dtype
    ):
        """Collective over all processes of the run.

        `chunks`: this process's part of the model; `forward(chunk, input)`: its part of a pass; `dtype`: of
        what stages hand on.
        """
        self.chunks = chunks
        self.forward = forward
        self.dtype = dtype
        self.onward = parallel_state.get_pipeline_model_parallel_group()
        self.rank, self.size = self.onward.rank(), self.onward.size()
        # What comes back goes by a group of its own: with one for both directions, two processes could each
        # wait for the other to receive.
        self.back = _same_processes(self.onward) if self.size > 1 else self.onward
        self.sent: deque[tuple[dist.Work, Tensor]] = deque()

    @torch.no_grad()
    def run(self, lanes: Iterable[Lane[Result]]) -> Iterator[Result]:
        """The lanes' results as they finish: in order, if all take equally many passes.

        Meanwhile the chunks are in evaluation mode.
        """
        modes = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            yield from self._run(list(lanes))
        finally:
            for chunk, mode in zip(self.chunks, modes, strict=True):
                chunk.train(mode)

    def _at_a_time(self, lanes: int) -> int:
        """Lanes go in equal rounds that fill the stages: a last round of fewer would leave some idle."""
        rounds = max(1, lanes // self.size)
        return -(-lanes // rounds)

    def _run(self, lanes: list[Lane[Result]]) -> Iterator[Result]:
        fresh = (_Pass(lane, next(lane)) for lane in lanes)
        on_their_way = deque(islice(fresh, self._at_a_time(len(lanes))))
        while on_their_way:
            current = on_their_way.popleft()
            finished = []
            if current.chunks_done == len(self.chunks):
                try:
                    current = _Pass(current.lane, current.lane.send(self._take_output(current)))
                except StopIteration as end:
                    finished = [end.value]
                    current = next(fresh, None)
            if current:
                self._run_chunk(current)
                on_their_way.append(current)
            yield from finished
        while self.sent:
            self.sent.popleft()[0].wait()

    def _run_chunk(self, current: _Pass) -> None:
        """The next of this process's chunks, on what the stage before sends, for the stage after."""
        chunk = self.chunks[current.chunks_done]
        last_chunk = current.chunks_done == len(self.chunks) - 1
        latents = current.input.latents
        if self.rank > 0 or current.chunks_done > 0:
            hop = latents.new_empty(chunk.hop_shape(latents, current.input.condition), dtype=self.dtype)
            previous = (self.rank - 1) % self.size
            dist.recv(hop, group=self.onward if self.rank > 0 else self.back, group_src=previous)
            chunk.set_input_tensor([hop])
        output = self.forward(chunk, current.input)
        chunk.set_input_tensor([None])
        current.chunks_done += 1
        if self.rank < self.size - 1:
            self._send(output, self.rank + 1, self.onward)
        elif not last_chunk:
            self._send(output, 0, self.back)
        else:
            current.output = output
            for rank in range(self.size - 1):
                self._send(output, rank, self.back)

    def _take_output(self, current: _Pass) -> Tensor:
        if self.rank < self.size - 1:
            current.output = torch.empty_like(current.input.latents)
            dist.recv(current.output, group=self.back, group_src=self.size - 1)
        return current.output

    def _send(self, tensor: Tensor, rank: int, group: ProcessGroup) -> None:
        """Without waiting; a tensor is kept until it has been sent."""
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, group=group, group_dst=rank), tensor))
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()


def _same_processes(group: ProcessGroup) -> ProcessGroup:
    """Another group of the same processes. Collective over all processes of the run."""
    groups: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(groups, dist.get_process_group_ranks(group))
    distinct = [ranks for number, ranks in enumerate(groups) if ranks[0] == number]
    return dist.new_subgroups_by_enumeration(distinct)[0]
