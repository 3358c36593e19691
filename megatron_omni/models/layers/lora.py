"""Low-rank adapters (LoRA, arXiv:2106.09685) on a model's linear layers, at every layout.

An adapter stands beside its layer: `….linear_qkv` gets a sibling `….linear_qkv_lora`, and no parameter of the
model changes its name. A layer that fuses several Hugging Face linears (query, key and value) has factors A
and B for each of them, as PEFT and diffusers have.
"""

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_omni.checkpoint.mapping import ADAPTER_SUFFIX, Entry, Kind, Row, match, model_heads
from megatron_omni.config.schema import LoraConfig
from megatron_omni.errors import UserError
from megatron_omni.sampling.seeds import generator

Value = TypeVar("Value")


class LoRA(nn.Module):
    """Adds (alpha / rank) · B·A·dropout(x) to a linear layer's output. Matches `peft.tuners.lora.Linear`.

    `A` and `B` hold weights [rank, in] and [out, rank], one of each per adapted Hugging Face linear, under
    its position in the fused layer. They are split over tensor-parallel ranks as the layer is: a
    column-parallel layer splits B's rows, a row-parallel one A's columns. Ranks exchange the narrow product
    with A, never the layer's wide input or output.
    """

    def __init__(
        self,
        linear: nn.Module,
        layer: Entry,
        positions: Sequence[int],
        settings: LoraConfig,
        tensor_parallel_size: int,
    ):
        """An adapter of zeros for `linear`, whose weight is `layer` in the model's table."""
        super().__init__()
        self.layer = layer
        self.rank = settings.lora_rank
        self.scale = settings.lora_alpha / settings.lora_rank
        self.dropout = settings.lora_dropout
        self.enabled = True
        self.size = tensor_parallel_size
        self.sequence_parallel = getattr(linear, "sequence_parallel", False)
        self.out_is_split = layer.kind in (Kind.COLUMN, Kind.QKV)
        self.in_is_split = layer.kind is Kind.ROW
        weight = linear.weight
        shares = self.size if self.out_is_split else 1
        self.rows = [shape[0] // shares for shape in layer.hf_shapes(weight.shape, self.size)]
        """Output rows of each fused part on this rank."""

        def factor(out_features: int, in_features: int, split_dim: int | None) -> nn.Linear:
            linear = nn.utils.skip_init(
                nn.Linear, in_features, out_features, bias=False, device=weight.device, dtype=weight.dtype
            )
            nn.init.zeros_(linear.weight)
            if split_dim is not None:
                tensor_parallel.set_tensor_model_parallel_attributes(linear.weight, True, split_dim, 1)
            else:  # a rank that sees its share of the tokens only has a partial gradient
                linear.weight.sequence_parallel = self.sequence_parallel
            return linear

        self.A = nn.ModuleDict(
            {str(i): factor(self.rank, weight.shape[1], 1 if self.in_is_split else None) for i in positions}
        )
        self.B = nn.ModuleDict(
            {str(i): factor(self.rows[i], self.rank, 0 if self.out_is_split else None) for i in positions}
        )

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """`output` [..., out] of the layer for input x [..., in], with the adapter's part added."""
        narrow = self._exchange(F.linear(self._drop(x), self.joint_a()))
        rows = output.flatten(0, -2).addmm(narrow.flatten(0, -2), self.joint_b().t(), alpha=self.scale)
        return rows.view_as(output)

    def hook(self, linear: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple) -> Tensor | tuple:
        """Forward hook of the layer, which returns its output alone or, as Megatron's do, with a bias."""
        if not self.enabled:
            return output
        if isinstance(output, tuple):
            return self(args[0], output[0]), *output[1:]
        return self(args[0], output)

    def joint_a(self) -> Tensor:
        """A of the whole layer [parts · rank, in]: those of its parts, one below the other."""
        weights = [a.weight for a in self.A.values()]
        return torch.cat(weights) if len(weights) > 1 else weights[0]

    def joint_b(self) -> Tensor:
        """B of the whole layer [out, parts · rank]: a part's rows are zero but for its own rank's columns."""
        if len(self.rows) == 1:
            return self.B["0"].weight
        width = len(self.B) * self.rank
        parts = [next(iter(self.B.values())).weight.new_zeros(rows, width) for rows in self.rows]
        for column, (position, b) in enumerate(self.B.items()):
            before = column * self.rank
            parts[int(position)] = F.pad(b.weight, (before, width - before - self.rank))
        return self.layer.to_megatron(parts, self.size)

    def weight_change(self) -> Tensor:
        """What the adapter adds to this rank's weight [out, in], float32."""
        return self.scale * (self.joint_b().float() @ self.joint_a().float())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Tensors under their global names, split over tensor-parallel ranks as in `__init__`."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        split = {"A.": 1} if self.in_is_split else {"B.": 0} if self.out_is_split else {}
        axes = {name: axis for name in tensors for factor, axis in split.items() if name.startswith(factor)}
        return make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets)

    def _drop(self, x: Tensor) -> Tensor:
        """Dropout, with the same mask on every rank if all hold the same x."""
        if not (self.dropout and self.training):
            return x
        differs = self.size > 1 and (self.in_is_split or self.sequence_parallel)
        with tensor_parallel.get_cuda_rng_tracker().fork() if differs else nullcontext():
            return F.dropout(x, self.dropout)

    def _exchange(self, narrow: Tensor) -> Tensor:
        """The product with A, whole and of all tokens that the product with B is for."""
        if self.size == 1:
            return narrow
        if self.in_is_split:
            if self.sequence_parallel:
                return tensor_parallel.reduce_scatter_to_sequence_parallel_region(narrow)
            return tensor_parallel.reduce_from_tensor_model_parallel_region(narrow)
        if self.out_is_split:
            if self.sequence_parallel:
                return tensor_parallel.gather_from_sequence_parallel_region(narrow)
            return tensor_parallel.copy_to_tensor_model_parallel_region(narrow)
        return narrow


def add_adapters(
    chunks: Sequence[nn.Module], mapping: Sequence[Row], settings: LoraConfig, seed: int
) -> None:
    """Freeze the model and give each linear layer that `settings` targets an adapter. Collective.

    `chunks` are this process's parts of the model, `mapping` its table. Layers that are frozen already take
    no part in the model's output and get none. At first adapters change nothing: B is zero. A is drawn as in
    PEFT (Kaiming-uniform, a = √5), by `seed` and the layer's name, whatever the layout.

    Raises `UserError` on every rank for a pattern without a match, and for a chunk that would have none.
    """
    targets = [
        (chunk, layer)
        for chunk in chunks
        for layer in _linear_layers(chunk, mapping)
        if chunk.get_parameter(layer.megatron).requires_grad
    ]
    names = [
        [_module_name(name) for owner, layer in targets if owner is chunk for name in layer.hf]
        for chunk in chunks
    ]
    _check_patterns(settings.lora_target_modules, [each for rank in _on_all_ranks(names) for each in rank])
    for chunk in chunks:
        chunk.requires_grad_(False)
    for chunk, layer in targets:
        positions = [
            i
            for i, name in enumerate(layer.hf)
            if _is_target(_module_name(name), settings.lora_target_modules)
        ]
        if positions:
            _add_adapter(chunk, layer, positions, settings)
    for chunk in chunks:
        _draw(chunk, mapping, seed)
        if chunk.config.recompute_granularity == "full":
            chunk.register_forward_pre_hook(_let_input_require_grad)


def adapters(chunk: nn.Module) -> Iterator[tuple[nn.Module, LoRA]]:
    """Each adapted layer of a model and its adapter."""
    for name, module in chunk.named_modules():
        if isinstance(module, LoRA):
            yield chunk.get_submodule(name.removesuffix(ADAPTER_SUFFIX)), module


def adapter_mapping(mapping: Iterable[Row]) -> tuple[Row, ...]:
    """The table of the adapters' parameters, which follows from that of the model.

    Hugging Face names are PEFT's: a layer's, then `.lora_A` or `.lora_B`.
    """
    rows = []
    for row in mapping:
        a = Kind.ROW if row.kind is Kind.ROW else Kind.REPLICATED
        b = Kind.COLUMN if row.kind in (Kind.COLUMN, Kind.QKV) else Kind.REPLICATED
        for i, hf in enumerate(row.hf):
            rows.append(Row((f"{hf}.lora_A",), f"{row.megatron}{ADAPTER_SUFFIX}.A.{i}", a))
            rows.append(Row((f"{hf}.lora_B",), f"{row.megatron}{ADAPTER_SUFFIX}.B.{i}", b))
    return tuple(rows)


@contextmanager
def adapters_disabled(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """The model without its adapters: what it was before training."""
    modules = [adapter for chunk in chunks for _, adapter in adapters(chunk)]
    for adapter in modules:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in modules:
            adapter.enabled = True


def merged_weight(weight: Tensor, adapter: LoRA) -> Tensor:
    """A layer's weight with its adapter in it, rounded once, from float32 to the weight's dtype."""
    return (weight.float() + adapter.weight_change()).to(weight.dtype)


def _linear_layers(chunk: nn.Module, mapping: Sequence[Row]) -> Iterator[Entry]:
    """The model's table for the weights of its linear layers."""
    parameters = dict(chunk.named_parameters())
    for entry in match(mapping, parameters, model_heads([chunk])):
        if entry.megatron.endswith(".weight") and parameters[entry.megatron].dim() == 2:
            yield entry


def _add_adapter(chunk: nn.Module, layer: Entry, positions: Sequence[int], settings: LoraConfig) -> None:
    path = _module_name(layer.megatron)
    parent_path, _, name = path.rpartition(".")
    linear, parent = chunk.get_submodule(path), chunk.get_submodule(parent_path)
    adapter = LoRA(linear, layer, positions, settings, chunk.config.tensor_model_parallel_size)
    parent.add_module(name + ADAPTER_SUFFIX, adapter)
    linear.register_forward_hook(adapter.hook)


@torch.no_grad()
def _draw(chunk: nn.Module, mapping: Sequence[Row], seed: int) -> None:
    """The first values of A: drawn whole, then cut."""
    size = chunk.config.tensor_model_parallel_size
    rank = parallel_state.get_tensor_model_parallel_rank() if size > 1 else 0
    parameters = {name: p for name, p in chunk.named_parameters() if f"{ADAPTER_SUFFIX}.A." in name}
    for entry in match(adapter_mapping(mapping), parameters, model_heads([chunk])):
        parameter = parameters[entry.megatron]
        (shape,) = entry.hf_shapes(parameter.shape, size)
        whole = torch.empty(shape)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator(seed, "lora", *entry.hf))
        parameter.copy_(whole[entry.hf_slice(shape, rank, size)])


def _let_input_require_grad(chunk: nn.Module, args: tuple) -> tuple:
    """Full recomputation gives gradients only to layers with an input that requires one."""
    if not torch.is_grad_enabled() or not args or args[0].requires_grad:
        return args
    return args[0].detach().requires_grad_(), *args[1:]


def _is_target(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern is, as in the shell, a run of the name's parts between dots."""
    return any(fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*") for pattern in patterns)


def _check_patterns(patterns: Sequence[str], names_by_chunk: Sequence[Sequence[str]]) -> None:
    faults = []
    names = sorted({name for names in names_by_chunk for name in names})
    for pattern in patterns:
        if any(_is_target(name, [pattern]) for name in names):
            continue
        parts = [name.split(".") for name in names]
        endings = sorted({".".join(part[i:]) for part in parts for i in range(1, len(part))} | set(names))
        close = difflib.get_close_matches(pattern, endings, 3, cutoff=0.5)
        faults.append(f"  {pattern}" + (f": did you mean {', '.join(close)}?" if close else ""))
    if faults:
        general = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})
        raise UserError(
            "no linear layer matches these lora_target_modules:\n"
            + "\n".join(faults)
            + f"\nLayers of this model: {', '.join(general)}."
        )
    for names in names_by_chunk:
        if not any(_is_target(name, patterns) for name in names):
            raise UserError(
                f"lora_target_modules {' '.join(patterns)} leave a pipeline stage with nothing to train "
                f"({names[0]} to {names[-1]}): target layers of every stage, or use fewer stages."
            )


def _on_all_ranks(value: Value) -> list[Value]:
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _module_name(parameter: str) -> str:
    return parameter.removesuffix(".weight")
