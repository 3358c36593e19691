"""Parallel linear layers and the backend (Transformer Engine or local) that a layer is built from."""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_omni.errors import UserError


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron's; where it is not split, the bias is added inside the matrix product."""

    def forward(self, input_: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.output_size_per_partition == self.output_size:
            return F.linear(input_, self.weight, self.bias), None
        return super().forward(input_, **kwargs)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Megatron's; where it is not split, the bias is added inside the matrix product."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.input_size_per_partition == self.input_size:
            return F.linear(input_, self.weight, self.bias), None
        return super().forward(input_)


@dataclass(frozen=True)
class Backend:
    """Classes that a transformer layer is built from, with the constructors of Megatron's."""

    name: str
    column_parallel_linear: type[nn.Module]
    row_parallel_linear: type[nn.Module]


LOCAL = Backend("local", ColumnParallelLinear, RowParallelLinear)


def backend(transformer_impl: str) -> Backend:
    """Backend called "local" or "transformer_engine"; "auto" takes Transformer Engine where it is installed.

    Raises `UserError` if Transformer Engine is asked for and missing.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "local" or (transformer_impl == "auto" and not installed):
        return LOCAL
    if not installed:
        raise UserError(
            f"transformer_impl={transformer_impl!r} needs the package transformer_engine, which is not "
            "installed: install it, or use transformer_impl=local."
        )
    from megatron.core.extensions import transformer_engine as te

    return Backend("transformer_engine", te.TEColumnParallelLinear, te.TERowParallelLinear)


def column_parallel(
    backend: Backend, config: TransformerConfig, input_size: int, output_size: int
) -> nn.Module:
    """A biased linear layer split along its output, which stays split."""
    return backend.column_parallel_linear(
        input_size,
        output_size,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=True,
        skip_bias_add=False,
        is_expert=False,
    )


def row_parallel(backend: Backend, config: TransformerConfig, input_size: int, output_size: int) -> nn.Module:
    """A biased linear layer split along its input, which is split already; outputs are summed over ranks."""
    return backend.row_parallel_linear(
        input_size,
        output_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        is_expert=False,
    )


def replicated(config: TransformerConfig, input_size: int, output_size: int) -> nn.Linear:
    """A biased linear layer that every rank holds whole."""
    linear = nn.Linear(input_size, output_size, dtype=config.params_dtype)
    config.init_method(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
