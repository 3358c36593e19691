"""megatron-core 0.16 to 0.19 on CPU and gloo, without touching its source.

Megatron's modules get their own view of `torch`, in which `torch.cuda` and `device="cuda"` mean the CPU. All
other code keeps the real torch. Two tensor methods cannot be replaced for Megatron alone; they look at their
caller.
"""

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_omni.platforms.import_hook import after_import

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "tensor", "zeros", "zeros_like")


@functools.cache
def install() -> None:
    """Make Megatron's modules, imported already or later, run on the CPU."""
    warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed")
    _scope_tensor_methods()
    after_import("megatron", _adapt)


def _adapt(module: ModuleType) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = _torch_for_megatron()
    if module.__name__ in _ADAPTERS:
        _ADAPTERS[module.__name__](module)


class _Overlay(ModuleType):
    """A module with some attributes replaced; all others are looked up in the original."""

    def __init__(self, original: ModuleType, **replaced: Any):
        super().__init__(original.__name__)
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@functools.cache
def _torch_for_megatron() -> ModuleType:
    cuda = _Overlay(
        torch.cuda,
        current_device=lambda: _CPU,  # callers pass it on as device=
        set_device=_do_nothing,
        is_available=lambda: False,
        synchronize=_do_nothing,
        empty_cache=_do_nothing,
        manual_seed=torch.default_generator.manual_seed,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        memory_allocated=lambda *args: 0,
        max_memory_allocated=lambda *args: 0,
        Stream=_Stream,
        Event=_Stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda *args: _Stream(),
        default_stream=lambda *args: _Stream(),
    )
    distributed = _Overlay(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _Overlay(torch, cuda=cuda, distributed=distributed, **factories)


def _do_nothing(*args, **kwargs) -> None:
    pass


class _Stream:
    """A CUDA stream or event on a device that runs everything in order."""

    __init__ = wait_stream = wait_event = wait = record = synchronize = _do_nothing

    def record_event(self, *args) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The factory, with device="cuda" read as the CPU."""

    @functools.wraps(factory)
    def create(*args, device=None, **kwargs) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = _CPU
        return factory(*args, device=device, **kwargs)

    return create


def _get_rng_state(*args, **kwargs) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args, **kwargs) -> None:
    torch.set_rng_state(state)


def _all_gather(outputs, tensor, group=None, async_op=False):
    """all_gather that allows unequal shapes, which gloo does not: each rank broadcasts."""
    if _same_shape(outputs):
        return dist.all_gather(outputs, tensor, group=group, async_op=async_op)
    outputs[dist.get_rank(group)].copy_(tensor)
    for source, output in enumerate(outputs):
        received = output.contiguous()
        dist.broadcast(received, group=group, group_src=source)
        output.copy_(received)


def _reduce_scatter(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """reduce_scatter that allows unequal shapes, which gloo does not: one reduction to each rank."""
    if _same_shape(inputs):
        return dist.reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
    for target, tensor in enumerate(inputs):
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        dist.reduce(reduced, op=op, group=group, group_dst=target)
        if target == dist.get_rank(group):
            output.copy_(reduced)


def _same_shape(tensors: list[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def _scope_tensor_methods() -> None:
    """For callers in Megatron, Tensor.cuda() is the identity and Tensor.type() names a CUDA type.

    Megatron's optimizers accept a parameter only if its type() is 'torch.cuda.FloatTensor' or the like.
    """
    cuda, type_ = Tensor.cuda, Tensor.type

    @functools.wraps(cuda)
    def cuda_or_identity(self, *args, **kwargs):
        return self if _called_by_megatron() else cuda(self, *args, **kwargs)

    @functools.wraps(type_)
    def type_or_cuda_type(self, *args, **kwargs):
        result = type_(self, *args, **kwargs)
        if isinstance(result, str) and _called_by_megatron():
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    Tensor.cuda, Tensor.type = cuda_or_identity, type_or_cuda_type


def _called_by_megatron() -> bool:
    """Whether the caller of the function that asks is one of Megatron's modules."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.")


def _adapt_jit(module: ModuleType) -> None:
    """Compiling the fused pointwise functions costs a C++ build and gains nothing on a CPU."""
    module.disable_jit_fuser()


def _adapt_random(module: ModuleType) -> None:
    """The tracker of CUDA generators tracks the CPU's; so its check that the CPU's stood still is void."""
    module._get_cuda_rng_state = _get_rng_state
    module._set_cuda_rng_state = _set_rng_state
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _adapt_moe(module: ModuleType) -> None:
    """all_to_all wants its split sizes as host integers; Megatron converts only those on a GPU."""

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


_ADAPTERS = {
    "megatron.core.jit": _adapt_jit,
    "megatron.core.tensor_parallel.random": _adapt_random,
    "megatron.core.transformer.moe.moe_utils": _adapt_moe,
}
