"""What a worker of the engine does beyond sampling: it takes new weights and says what it holds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.lora.request import LoRARequest

from megatron_omni.platforms import current_platform
from megatron_omni.rollout.vllm_omni.transport import Bucket, Receiver, checksum

TIMEOUT = 300.0
"""Seconds a worker waits for weights that were announced."""
PEFT_PREFIX = "base_model.model."


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Methods that the server calls on every worker by `collective_rpc`; the first one's result returns."""

    receiver: Receiver | None = None

    def begin_weights(self, transport: dict[str, Any], kind: str) -> None:
        """Open `transport`, and take what comes through it as a whole model's weights or as an adapter."""
        if self.receiver:  # of an update that failed
            self.receiver.close()
        self.adapter: dict[str, Tensor] | None = {} if kind == "adapter" else None
        self.received: set[str] = set()
        self.unknown: set[str] = set()
        group = get_tp_group()
        self.receiver = Receiver.open(
            transport, group.rank_in_group, group.world_size, self.device, timeout=TIMEOUT
        )

    @torch.no_grad()
    def load_bucket(self, bucket: dict[str, Any]) -> None:
        tensors = dict(self.receiver.receive(Bucket.from_json(bucket)))
        if self.adapter is not None:
            self.adapter |= {name: tensor.cpu().clone() for name, tensor in tensors.items()}
            return
        self.received |= tensors.keys()
        self.unknown |= load_tensors(self.model_runner.pipeline.transformer, tensors)
        current_platform().synchronize()  # the trainer is about to fill the bucket anew

    def end_weights(self, names: list[str] | None) -> dict[str, Any]:
        """{"checksum", "missing", "unknown"}; missing is what the model or `names` has and did not come."""
        self.receiver.close()
        expected = self.model_runner.pipeline.transformer_names | set(names or ())
        return {
            "checksum": self.total(
                held_checksum(self.model_runner.pipeline.transformer, get_tp_group().rank_in_group)
            ),
            "missing": sorted(expected - self.received),
            "unknown": sorted(self.unknown),
        }

    def write_adapter(self, folder: str, rank: int, names: list[str] | None) -> dict[str, Any]:
        """Write the adapter that came as a PEFT folder that vLLM-Omni can load; {"missing", "unknown"}."""
        self.receiver.close()
        known = self.model_runner.pipeline.transformer_names
        adapter = {
            name: tensor for name, tensor in self.adapter.items() if f"{adapted_layer(name)}.weight" in known
        }
        if get_tp_group().rank_in_group == 0:
            write_peft_folder(adapter, rank, Path(folder))
        get_tp_group().barrier()
        return {
            "missing": sorted(set(names or ()) - self.adapter.keys()),
            "unknown": sorted(self.adapter.keys() - adapter.keys()),
        }

    def use_adapter(self, request: LoRARequest, scale: float) -> dict[str, Any]:
        """Sample with an adapter that has been added; {"checksum"} of what is held of it."""
        self.lora_manager.set_active_adapter(request, scale)
        layers = self.lora_manager._registered_adapters[request.lora_int_id].loras.values()
        tensors = (tensor for layer in layers for tensor in (layer.lora_a, layer.lora_b))
        return {"checksum": sum(map(checksum, tensors)) % 2**64}

    def total(self, value: int) -> int:
        """Sum over workers, modulo 2^64."""
        summed = torch.tensor(value - 2**64 if value >= 2**63 else value)
        dist.all_reduce(summed, group=get_tp_group().cpu_group)
        return summed.item() % 2**64


def load_tensors(transformer: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
    """Load tensors under their Hugging Face names; returns the names that the model does not have.

    A layer that has got an adapter holds its own weights in a child, `base_layer`.
    """
    for rename in (str, in_base_layer):
        loaded = transformer.load_weights((rename(name), tensor) for name, tensor in tensors.items())
        tensors = {name: tensor for name, tensor in tensors.items() if rename(name) not in loaded}
    return set(tensors)


def in_base_layer(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{module}.base_layer.{parameter}"


def held_checksum(transformer: nn.Module, worker: int) -> int:
    """Checksum of the parameters that count here: shards, and on the first worker those that all have."""
    return sum(map(checksum, counted_parameters(transformer, worker))) % 2**64


def counted_parameters(transformer: nn.Module, worker: int) -> Iterator[Tensor]:
    for module in transformer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            sharded = isinstance(module, ColumnParallelLinear) or (
                isinstance(module, RowParallelLinear) and name == "weight"
            )
            if sharded or worker == 0:
                yield parameter


def write_peft_folder(adapter: dict[str, Tensor], rank: int, folder: Path) -> None:
    """`adapter` under its PEFT names, with or without PEFT's prefix.

    Alpha stands in the request's scale instead, or loading would multiply it into the weights.
    """
    tensors = {
        engine_name(name.removeprefix(PEFT_PREFIX)): tensor.contiguous() for name, tensor in adapter.items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(set(map(adapted_layer, tensors))),
    }
    folder.mkdir()
    save_file(
        {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapted_layer(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).partition(".lora_")[0]


def engine_name(name: str) -> str:
    """vLLM-Omni's name for a layer of diffusers: there is no dropout beside the output projection."""
    return name.replace(".to_out.0.", ".to_out.")
