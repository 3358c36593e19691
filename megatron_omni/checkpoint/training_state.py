"""The tensors that make up a run in training, under names that are the same at every layout.

A weight has its own name; Adam's moments and float32 master weights are `optimizer.state.<kind>.<weight>`, as
Megatron's plain optimizer calls them, whichever optimizer holds them; a master that *is* the weight is not
stored twice. Random generators are rows of `random.<kind>`, one a rank.
"""

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_omni.checkpoint.shards import Box, Shards, flat_boxes
from megatron_omni.platforms import current_platform
from megatron_omni.platforms.host_adam import HostAdam

OPTIMIZER, RANDOM = "optimizer.state.", "random."
MASTER = OPTIMIZER + "fp32_param."
MOMENTS = ("exp_avg", "exp_avg_sq")


def model_shards(chunks: Sequence[nn.Module], trainable_only: bool = False) -> dict[str, Shards]:
    """The weights of this rank's model chunks. Tensors are the parameters' own memory."""
    return {
        sharded.key: _whole(sharded, sharded.data)
        for sharded in _sharded_tensors(chunks)
        if sharded.data.requires_grad or not trainable_only
    }


def optimizer_shards(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer) -> dict[str, Shards]:
    """Adam's moments, and the masters of weights that are not float32. Tensors are the optimizer's own."""
    by_parameter = {id(sharded.data): sharded for sharded in _sharded_tensors(chunks)}
    shards = {}
    for parameter, span, main, adam in _main_parameters(chunks, optimizer):
        sharded, state = by_parameter[id(parameter)], adam_state(adam, main)
        tensors = {f"{OPTIMIZER}{moment}.": state[moment] for moment in MOMENTS}
        if parameter.dtype != torch.float32:
            tensors[MASTER] = state.get("master_param", main)
        for prefix, tensor in tensors.items():
            part = _flat_part(sharded, span, tensor) if span else _whole(sharded, tensor)
            shards[prefix + sharded.key] = part
    return shards


def master_shards(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer) -> dict[str, Shards]:
    """The master weights under the weights' own names, to be filled from weights alone."""
    shards = optimizer_shards(chunks, optimizer)
    return {name.removeprefix(MASTER): part for name, part in shards.items() if name.startswith(MASTER)}


def set_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Make Adam's bias correction go on after `steps` steps."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                state = adam_state(part.optimizer, main)
                if "step" in state:
                    state["step"].fill_(steps)
                else:  # Transformer Engine and Apex count by group
                    group["step"] = steps


def adam_state(adam: torch.optim.Optimizer, main: Tensor) -> dict[str, Tensor]:
    """The state of one parameter; made as the first step would make it, if none has been taken."""
    if isinstance(adam, HostAdam):
        return adam.host_state(main)
    state = adam.state[main]
    if not state:
        state |= {moment: torch.zeros_like(main, dtype=torch.float32) for moment in MOMENTS}
        if isinstance(adam, torch.optim.AdamW):
            state["step"] = torch.zeros(())
    return state


def random_states() -> dict[str, Tensor]:
    """Copies of this rank's generators: torch's on the host and the device, and Megatron's tracked ones."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "cpu": torch.get_rng_state(),
        "device": _device_generator().get_rng_state(),
        **{f"tracker.{name}": state.clone() for name, state in tracked.items()},
    }


def set_random_states(states: dict[str, Tensor]) -> None:
    tracked = {
        name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
    torch.set_rng_state(states["cpu"])
    _device_generator().set_rng_state(states["device"])


def random_shards(states: dict[str, Tensor]) -> dict[str, Shards]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        RANDOM + name: Shards((size, len(state)), (Box((rank, 0), state[None]),))
        for name, state in states.items()
    }


def _sharded_tensors(chunks: Sequence[nn.Module]) -> Iterator[ShardedTensor]:
    for chunk in chunks:
        for value in nested_values(unwrap_model(chunk).sharded_state_dict()):
            if isinstance(value, ShardedTensor):
                yield value


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers behind Megatron's chain of them; a rank without trainable parameters has none."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not part.is_stub_optimizer]


def _main_parameters(
    chunks: Sequence[nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[nn.Parameter, tuple[int, int] | None, Tensor, torch.optim.Optimizer]]:
    """Each parameter that this rank updates, what Adam knows it by, and that Adam.

    Between the two, the elements (first, last plus one) that are this rank's alone to update; none if its
    data-parallel replicas all update the whole.
    """
    for part in _parts(optimizer):
        adam = part.optimizer
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                span = part._get_model_param_range_map(parameter)["param"]
                yield parameter, (span.start, span.end), adam.param_groups[group]["params"][order], adam
        else:
            mains = {id(main) for group in adam.param_groups for main in group["params"]}
            for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                main = getattr(parameter, "main_param", parameter)
                if id(main) in mains:
                    yield parameter, None, main, adam


def _whole(sharded: ShardedTensor, tensor: Tensor) -> Shards:
    """`tensor` holds all elements of this rank's shard."""
    box = Box(sharded.global_offset, tensor.detach().view(_local_shape(sharded)))
    return Shards(sharded.global_shape, (box,), _writes_replicated(sharded))


def _flat_part(sharded: ShardedTensor, span: tuple[int, int], tensor: Tensor) -> Shards:
    """`tensor` holds the elements of `span` of this rank's shard."""
    flat, boxes, done = tensor.detach().view(-1), [], 0
    for offset, size in flat_boxes(_local_shape(sharded), *span):
        part = flat[done : done + prod(size)]
        done += len(part)
        start = tuple(a + b for a, b in zip(sharded.global_offset, offset, strict=True))
        boxes.append(Box(start, part.view(size)))
    return Shards(sharded.global_shape, tuple(boxes), not any(sharded.replica_id[:-1]))


def _local_shape(sharded: ShardedTensor) -> tuple[int, ...]:
    return (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)


def _writes_replicated(sharded: ShardedTensor) -> bool:
    """Data-parallel replicas share the writing, a tensor each; its name says whose it is."""
    *others, replica = sharded.replica_id
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return not any(others) and replica == zlib.crc32(sharded.key.encode()) % replicas


def _device_generator() -> Any:
    """The module whose get_rng_state and set_rng_state act on this process's device."""
    name = current_platform().name
    return torch if name == "cpu" else torch.get_device_module(name)
