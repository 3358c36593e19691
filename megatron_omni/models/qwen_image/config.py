"""Sizes of Qwen-Image's transformer and the Megatron configuration that follows from them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.errors import UserError

UNSUPPORTED = ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope", "guidance_embeds")
"""Switches of the edit, layered and distilled variants."""


@dataclass(frozen=True)
class QwenImageConfig:
    """Sizes, named and with defaults as in `diffusers.QwenImageTransformer2DModel`."""

    patch_size: int = 2
    in_channels: int = 64
    out_channels: int | None = 16
    num_layers: int = 60
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 3584
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def output_size(self) -> int:
        """Channels of a predicted token."""
        return self.patch_size**2 * (self.out_channels or self.in_channels)

    @staticmethod
    def from_folder(folder: Path) -> "QwenImageConfig":
        """Read `transformer/config.json` of a diffusers folder.

        Raises `UserError` if it is missing, is no Qwen-Image transformer, or is an unsupported variant.
        """
        path = folder / "transformer" / "config.json"
        try:
            entries = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read: {error}. Give a diffusers folder of Qwen-Image."
            ) from error
        name = entries.get("_class_name") if isinstance(entries, dict) else None
        if name != "QwenImageTransformer2DModel":
            raise UserError(f"{path} describes a {name}, not a QwenImageTransformer2DModel.")
        for switch in UNSUPPORTED:
            if entries.get(switch):
                raise UserError(f"{path} sets {switch}: only text-to-image Qwen-Image is supported.")
        sizes = {k: v for k, v in entries.items() if k in QwenImageConfig.__dataclass_fields__}
        if "axes_dims_rope" in sizes:
            sizes["axes_dims_rope"] = tuple(sizes["axes_dims_rope"])
        return QwenImageConfig(**sizes)


def check_layout(qwen: QwenImageConfig, parallel: ParallelConfig) -> None:
    """Raise `UserError` if the processes cannot share the model's heads and layers."""
    heads, tp = qwen.num_attention_heads, parallel.tensor_model_parallel_size
    if heads % tp:
        raise UserError(
            f"tensor_model_parallel_size={tp} does not divide the model's {heads} attention heads: "
            "choose a divisor."
        )
    cp = parallel.context_parallel_size
    ulysses = parallel.ulysses_degree_in_cp or cp
    if heads // tp % ulysses:
        fitting = max(d for d in range(1, cp + 1) if cp % d == 0 and heads // tp % d == 0)
        raise UserError(
            f"Ulysses of degree {ulysses} cannot share the {heads // tp} attention heads of a process "
            f"(tensor_model_parallel_size={tp} of {heads}): set ulysses_degree_in_cp={fitting}, and a ring "
            f"of {cp // fitting} does the rest of context_parallel_size={cp}."
        )
    stages = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    if stages > qwen.num_layers:
        raise UserError(
            f"pipeline_model_parallel_size={parallel.pipeline_model_parallel_size} × "
            f"num_virtual_stages_per_pipeline_rank={parallel.num_virtual_stages_per_pipeline_rank} makes "
            f"{stages} stages of the model's {qwen.num_layers} layers: each needs at least one."
        )


def transformer_config(
    qwen: QwenImageConfig, model_config: ModelConfig, parallel_config: ParallelConfig
) -> TransformerConfig:
    """Megatron's configuration of the layers. Raises `UserError` for a layout that does not fit the model."""
    check_layout(qwen, parallel_config)
    tp = parallel_config.tensor_model_parallel_size
    chunks = parallel_config.num_virtual_stages_per_pipeline_rank
    dtype = torch.bfloat16 if model_config.bf16 else torch.float32
    full_recompute = model_config.recompute_granularity == "full"
    return TransformerConfig(
        num_layers=qwen.num_layers,
        hidden_size=qwen.hidden_size,
        ffn_hidden_size=4 * qwen.hidden_size,
        num_attention_heads=qwen.num_attention_heads,
        kv_channels=qwen.attention_head_dim,
        normalization="RMSNorm",
        # Megatron sums the gradients of q_layernorm and k_layernorm over tensor-parallel ranks.
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=model_config.bf16,
        params_dtype=dtype,
        init_method=nn.init.xavier_uniform_,
        output_layer_init_method=nn.init.xavier_uniform_,
        # Drawn whole from the CPU generator, so that the weights do not depend on the layout.
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],  # Megatron's default warns of itself
        tensor_model_parallel_size=tp,
        sequence_parallel=parallel_config.sequence_parallel and tp > 1,
        context_parallel_size=parallel_config.context_parallel_size,
        pipeline_model_parallel_size=parallel_config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=dtype,
        # Batched exchange between two interleaved stages is silently wrong.
        batch_p2p_comm=chunks == 1,
        overlap_p2p_comm=chunks > 1,
        moe_token_dispatcher_type="alltoall",  # the default forbids variable_seq_lengths
        recompute_granularity=model_config.recompute_granularity,
        recompute_method=model_config.recompute_method if full_recompute else None,
        recompute_num_layers=model_config.recompute_num_layers if full_recompute else None,
    )
