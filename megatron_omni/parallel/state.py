"""Processes and the groups they form."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.stages import Stage
from megatron_omni.platforms import current_platform

Value = TypeVar("Value")


@dataclass(frozen=True)
class Layout:
    """This process's place in the run.

    The processes of one data-parallel rank form a replica: together they hold one copy of the model and
    draw the same samples.
    """

    device: torch.device
    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    sequence_parallel: bool
    pipeline_rank: int
    pipeline_size: int
    chunks: int
    """Model chunks on this process: virtual pipeline stages."""
    context_rank: int
    context_size: int
    ulysses_size: int
    data_rank: int
    data_size: int

    def __str__(self) -> str:
        sequence = " + sequence parallel" if self.sequence_parallel else ""
        parts = [f"tensor parallel {self.tensor_size}{sequence}"]
        if self.pipeline_size > 1:
            interleaved = f" × {self.chunks} virtual stages" if self.chunks > 1 else ""
            parts.append(f"pipeline {self.pipeline_size}{interleaved}")
        if self.context_size > 1:
            ring = self.context_size // self.ulysses_size
            parts.append(f"context {self.context_size} (Ulysses {self.ulysses_size} × ring {ring})")
        parts.append(f"data parallel {self.data_size}")
        return f"{self.world_size} {self.device.type} process(es): {' × '.join(parts)}"

    @property
    def stages(self) -> list[Stage]:
        """The pipeline stages on this process, one a model chunk."""
        count = self.pipeline_size * self.chunks
        return [Stage(chunk * self.pipeline_size + self.pipeline_rank, count) for chunk in range(self.chunks)]

    @property
    def leads_replica(self) -> bool:
        """Whether this process does what one process of each replica does, such as scoring samples."""
        return self.tensor_rank == self.pipeline_rank == self.context_rank == 0

    def replica_devices(self) -> list[int]:
        """Numbers of this replica's devices on its leader's host. Collective over all processes."""
        place = (self.data_rank, socket.gethostname(), self.device.index or 0)
        places = [place] * self.world_size
        dist.all_gather_object(places, place)
        own = [(host, number) for replica, host, number in places if replica == self.data_rank]
        return [number for host, number in own if host == own[0][0]]

    def gather_data_parallel(self, tensor: Tensor) -> Tensor:
        """The tensors of all data-parallel ranks, of equal shape, joined along the last dimension."""
        if self.data_size == 1:
            return tensor
        parts = [torch.empty_like(tensor, device=self.device) for _ in range(self.data_size)]
        dist.all_gather(
            parts, tensor.to(self.device).contiguous(), group=parallel_state.get_data_parallel_group()
        )
        return torch.cat(parts, dim=-1).to(tensor.device)

    def broadcast_in_replica(self, tensor: Tensor) -> Tensor:
        """The tensor of the process that leads this replica."""
        sent = tensor.to(self.device, copy=True).contiguous()
        for group in self._replica_groups():
            dist.broadcast(sent, group=group, group_src=0)
        return sent.to(tensor.device)

    @staticmethod
    def _replica_groups() -> list[dist.ProcessGroup]:
        """Groups within a replica: what the first ranks send, in one group after the other, reaches all."""
        groups = (
            parallel_state.get_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
        )
        return [group for group in groups if group.size() > 1]

    def from_leader(self, value: Value) -> Value:
        """The value of the process that leads this replica."""
        values = [value]
        for group in self._replica_groups():
            dist.broadcast_object_list(values, group=group, group_src=0, device=self.device)
        return values[0]

    def from_last_stage(self, value: Value) -> Value:
        """The value of the last pipeline stage."""
        if self.pipeline_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(
            values,
            group=parallel_state.get_pipeline_model_parallel_group(),
            group_src=self.pipeline_size - 1,
            device=self.device,
        )
        return values[0]

    def reduce_data_parallel(self, values: dict[str, float], op: dist.ReduceOp) -> dict[str, float]:
        """Each value reduced over the data-parallel ranks, which all give the same names."""
        if self.data_size == 1 or not values:
            return values
        table = torch.tensor(list(values.values()), dtype=torch.float32, device=self.device)
        dist.all_reduce(table, op=op, group=parallel_state.get_data_parallel_group())
        return dict(zip(values, table.tolist(), strict=True))


def initialize(config: ParallelConfig, seed: int) -> Layout:
    """Joins the processes that torchrun started (or makes a world of one) and forms Megatron's groups."""
    platform = current_platform()
    device = platform.device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(platform.backend, timeout=timeout)
    else:  # a store in memory needs no port, so jobs on one host cannot collide
        dist.init_process_group(
            platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    return form_groups(config, seed, device)


def form_groups(config: ParallelConfig, seed: int, device: torch.device) -> Layout:
    """Megatron's groups of the processes that have joined.

    Seeds torch's default generators alike on every rank, and Megatron's model-parallel one by tensor rank.
    """
    chunks = config.num_virtual_stages_per_pipeline_rank
    ulysses = config.ulysses_degree_in_cp or config.context_parallel_size
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=config.context_parallel_size,
        hierarchical_context_parallel_sizes=(
            [ulysses, config.context_parallel_size // ulysses] if config.context_parallel_size > 1 else None
        ),
        distributed_timeout_minutes=config.distributed_timeout_minutes,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Layout(
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=config.sequence_parallel,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        chunks=chunks,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        ulysses_size=ulysses,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
    )


def destroy() -> None:
    """Leaves all groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
