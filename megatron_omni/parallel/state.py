"""Processes and the groups they form."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.platforms import current_platform


@dataclass(frozen=True)
class Layout:
    """This process's place in the run."""

    device: torch.device
    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    sequence_parallel: bool
    data_rank: int
    data_size: int

    def __str__(self) -> str:
        sequence = " + sequence parallel" if self.sequence_parallel else ""
        return (
            f"{self.world_size} {self.device.type} process(es): "
            f"tensor parallel {self.tensor_size}{sequence} × data parallel {self.data_size}"
        )

    def gather_data_parallel(self, tensor: Tensor) -> Tensor:
        """The tensors of all data-parallel ranks, of equal shape, joined along the last dimension."""
        if self.data_size == 1:
            return tensor
        parts = [torch.empty_like(tensor, device=self.device) for _ in range(self.data_size)]
        dist.all_gather(
            parts, tensor.to(self.device).contiguous(), group=parallel_state.get_data_parallel_group()
        )
        return torch.cat(parts, dim=-1).to(tensor.device)

    def broadcast_tensor_parallel(self, tensor: Tensor) -> Tensor:
        """The tensor of the first rank of this tensor-parallel group."""
        if self.tensor_size == 1:
            return tensor
        sent = tensor.to(self.device, copy=True).contiguous()
        dist.broadcast(
            sent,
            src=parallel_state.get_tensor_model_parallel_src_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return sent.to(tensor.device)

    def reduce_data_parallel(self, values: dict[str, float], op: dist.ReduceOp) -> dict[str, float]:
        """Each value reduced over the data-parallel ranks, which all give the same names."""
        if self.data_size == 1:
            return values
        table = torch.tensor(list(values.values()), dtype=torch.float32, device=self.device)
        dist.all_reduce(table, op=op, group=parallel_state.get_data_parallel_group())
        return dict(zip(values, table.tolist(), strict=True))


def initialize(config: ParallelConfig, seed: int) -> Layout:
    """Joins the processes that torchrun started (or makes a world of one) and forms Megatron's groups.

    Seeds torch's default generators alike on every rank, and Megatron's model-parallel one by tensor rank.
    """
    platform = current_platform()
    device = platform.device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(platform.backend, timeout=timeout)
    else:  # a store in memory needs no port, so jobs on one host cannot collide
        dist.init_process_group(
            platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size,
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
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
    )


def destroy() -> None:
    """Leaves all groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
