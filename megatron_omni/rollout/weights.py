"""The weights in training, as rollout engines take them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_omni.checkpoint.hf import hf_tensors
from megatron_omni.checkpoint.mapping import Row
from megatron_omni.config.schema import LoraConfig
from megatron_omni.models.layers.lora import adapter_mapping, adapters_disabled


@dataclass(frozen=True)
class PolicyWeights:
    """Streams under Hugging Face names. Collective over the replica: all its processes take all tensors."""

    chunks: Sequence[nn.Module]
    mapping: tuple[Row, ...]
    lora: LoraConfig
    gather: Callable[[], None]
    """Makes the parameters whole after an update; of all processes. See `Optimization.gather_parameters`."""

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model, with its adapters merged into it."""
        return hf_tensors(self.chunks, self.mapping)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model without its adapters."""
        with adapters_disabled(self.chunks):
            yield from self.model()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, such as `transformer_blocks.0.attn.to_q.lora_A.weight`."""
        return hf_tensors(self.chunks, adapter_mapping(self.mapping), of_adapters=True)
