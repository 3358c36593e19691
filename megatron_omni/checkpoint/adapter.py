"""Adapters as files that PEFT and diffusers load, and back.

A folder holds `adapter_config.json` and `adapter_model.safetensors` for `peft.PeftModel.from_pretrained`, and
`pytorch_lora_weights.safetensors` for a diffusers pipeline's `load_lora_weights`.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatron_omni.checkpoint.collective import together
from megatron_omni.checkpoint.hf import hf_tensors, own_parameters, whole_model
from megatron_omni.checkpoint.mapping import Row, match, model_heads
from megatron_omni.checkpoint.replace import replacing
from megatron_omni.checkpoint.safetensors_header import NAMES, Header
from megatron_omni.config.schema import LoraConfig
from megatron_omni.errors import UserError
from megatron_omni.models.layers.lora import adapter_mapping

PEFT_CONFIG, PEFT_WEIGHTS, PEFT_PREFIX = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "base_model.model.",
)
DIFFUSERS_WEIGHTS, DIFFUSERS_PREFIX = "pytorch_lora_weights.safetensors", "transformer."
DIFFUSERS_METADATA = "lora_adapter_metadata"

PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}
"""PEFT's settings of what no adapter here has."""


def save_adapter(
    chunks: Sequence[nn.Module], mapping: Sequence[Row], settings: LoraConfig, base_model: Path, folder: Path
) -> None:
    """Write the adapters to `folder` in both forms. Collective; rank 0 writes.

    `base_model` is the folder of the model they belong to. Tensors have the parameters' dtype. An older
    adapter in `folder` is replaced when the new one is complete.

    Raises `UserError` on every rank, and leaves `folder` as it was, if it cannot be written or holds
    something other than an adapter.
    """
    # Adapters are small: rank 0 holds all of them for a moment.
    writes = dist.get_rank() == 0
    tensors = {}
    for name, tensor in hf_tensors(chunks, adapter_mapping(mapping), of_adapters=True):
        if writes:
            tensors[name] = tensor.to("cpu").contiguous()
    with together():
        if writes:
            _check_target(folder)
            try:
                with replacing(folder) as partial:
                    _write(tensors, settings, base_model, partial)
            except OSError as error:
                free = shutil.disk_usage(
                    next(path for path in folder.absolute().parents if path.exists())
                ).free
                raise UserError(
                    f"cannot write the adapter to {folder}: {error}. {free / 2**30:.2f} GiB are free there; "
                    "nothing was changed."
                ) from error


@torch.no_grad()
def load_adapter(
    chunks: Sequence[nn.Module], mapping: Sequence[Row], settings: LoraConfig, folder: Path
) -> None:
    """Fill the model's adapters from `folder`, in PEFT's form or in diffusers'. Collective.

    Adapters that the folder has on other layers are ignored if they change nothing (B is zero): PEFT may have
    one on a layer that takes no part in the model's output.

    Raises `UserError` on every rank for files that are missing, damaged or of another kind of adapter, and
    for a rank, an alpha, names and shapes that do not fit; it lists all of these.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    own, whole = own_parameters(chunks, of_adapters=True), whole_model(chunks, of_adapters=True)
    with together():
        adapter = _read(folder)
        entries = match(adapter_mapping(mapping), whole, model_heads(chunks))
        wanted = {entry.hf[0]: entry.hf_shapes(whole[entry.megatron].shape, size)[0] for entry in entries}
        _check(adapter, wanted, settings, folder)
        for entry in entries:
            if entry.megatron in own:
                tensor = adapter.tensors[entry.hf[0]]
                own[entry.megatron].copy_(tensor[entry.hf_slice(tensor.shape, rank, size)])


@dataclass(frozen=True)
class _Adapter:
    """What a folder holds."""

    rank: int
    alpha: float
    tensors: dict[str, Tensor]
    """By their names without a prefix, such as `transformer_blocks.0.attn.to_q.lora_A.weight`."""


def _write(tensors: dict[str, Tensor], settings: LoraConfig, base_model: Path, folder: Path) -> None:
    alpha = settings.lora_alpha
    config = {
        "r": settings.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": settings.lora_dropout,
        # Full names: a layer that has no adapter here must get none there.
        "target_modules": sorted({name.rsplit(".lora_", 1)[0] for name in tensors}),
    }
    peft_config = config | {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": str(base_model),
        "inference_mode": True,
        **PLAIN,
    }
    (folder / PEFT_CONFIG).write_text(json.dumps(peft_config, indent=2, sort_keys=True) + "\n")
    metadata = json.dumps({DIFFUSERS_PREFIX + name: value for name, value in config.items()}, sort_keys=True)
    for file, prefix, extra in (
        (PEFT_WEIGHTS, PEFT_PREFIX, {}),
        (DIFFUSERS_WEIGHTS, DIFFUSERS_PREFIX, {DIFFUSERS_METADATA: metadata}),
    ):
        prefixed = {prefix + name: tensor for name, tensor in tensors.items()}
        _write_file(prefixed, {"format": "pt"} | extra, folder / file)


def _write_file(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """The same bytes for the same tensors; the library shuffles the metadata."""
    shapes = ((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items())
    with path.open("wb") as file:
        file.write(Header.of(shapes, metadata).raw)
        for tensor in tensors.values():
            file.write(tensor.flatten().view(torch.uint8).numpy())


def _check_target(folder: Path) -> None:
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_empty and not (folder / PEFT_CONFIG).exists():
        raise UserError(f"cannot write the adapter to {folder}: it holds something else; empty it first.")


def _read(folder: Path) -> _Adapter:
    if (folder / PEFT_CONFIG).is_file():
        settings = _json((folder / PEFT_CONFIG).read_text(), folder / PEFT_CONFIG)
        tensors, _ = _read_file(folder / PEFT_WEIGHTS, PEFT_PREFIX)
        return _adapter(settings, tensors, folder / PEFT_CONFIG)
    path = folder / DIFFUSERS_WEIGHTS
    if not path.is_file():
        raise UserError(
            f"{folder} holds no adapter: give a folder with {PEFT_CONFIG} and {PEFT_WEIGHTS}, as PEFT saves "
            f"it, or with {DIFFUSERS_WEIGHTS}, as diffusers does."
        )
    tensors, metadata = _read_file(path, DIFFUSERS_PREFIX)
    if DIFFUSERS_METADATA in metadata:
        settings = {
            name.removeprefix(DIFFUSERS_PREFIX): value
            for name, value in _json(metadata[DIFFUSERS_METADATA], path).items()
        }
    else:  # alpha is the rank then, says diffusers
        ranks = [len(tensor) for name, tensor in tensors.items() if ".lora_A." in name]
        settings = {"r": max(ranks, default=0), "lora_alpha": max(ranks, default=0)}
    return _adapter(settings, tensors, path)


def _adapter(settings: dict[str, Any], tensors: dict[str, Tensor], source: Path) -> _Adapter:
    special = [name for name, plain in PLAIN.items() if (settings.get(name) or plain) != plain]
    if special:
        values = ", ".join(f"{name}={settings[name]!r}" for name in special)
        raise UserError(f"{source} has {values}: only adapters without are supported.")
    try:
        return _Adapter(int(settings["r"]), float(settings["lora_alpha"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{source} is damaged ({error!r}): it should give r and lora_alpha.") from error


def _read_file(path: Path, prefix: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        missing = "" if path.exists() else " is missing or"
        raise UserError(f"{path}{missing} cannot be read ({error}): save the adapter anew.") from error


def _json(text: str, source: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{source} is damaged ({error!r}): save the adapter anew.") from error


def _check(adapter: _Adapter, wanted: dict[str, tuple[int, ...]], settings: LoraConfig, folder: Path) -> None:
    """All faults of the folder for this run's adapters, in one `UserError`."""
    faults = []
    if adapter.rank != settings.lora_rank:
        faults.append(f"rank {adapter.rank} in the folder, lora_rank is {settings.lora_rank}")
    if adapter.alpha != settings.lora_alpha:
        faults.append(f"alpha {adapter.alpha:g} in the folder, lora_alpha is {settings.lora_alpha:g}")
    found = adapter.tensors
    faults += [f"{name}: missing in the folder" for name in sorted(wanted.keys() - found.keys())]
    faults += [
        f"{name}: not in the model, or not in lora_target_modules"
        for name in sorted(found.keys() - wanted.keys())
        if not _changes_nothing(name, found)
    ]
    faults += [
        f"{name}: {list(found[name].shape)} in the folder, {list(shape)} in the model"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if faults:
        raise UserError(
            f"the adapter in {folder} does not fit this run:\n" + "\n".join(f"  {fault}" for fault in faults)
        )


def _changes_nothing(name: str, tensors: dict[str, Tensor]) -> bool:
    """Whether the tensor is of an adapter whose B is zero."""
    layer, is_factor, _ = name.rpartition(".lora_")
    b = tensors.get(f"{layer}.lora_B.weight")
    return bool(is_factor) and b is not None and not b.any()
