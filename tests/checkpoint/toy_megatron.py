"""A small Megatron module with a table of every kind, its Hugging Face folder, and a training run on it."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_omni.checkpoint import hf
from megatron_omni.checkpoint.mapping import Kind, Row
from megatron_omni.config.schema import Config, ParallelConfig
from megatron_omni.parallel.state import initialize
from megatron_omni.training.optimizer import Optimization, build_optimization

HIDDEN, HEADS, GROUPS, LAYERS = 64, 8, 4, 2

MAPPING = (
    Row(("embed",), "embed", Kind.REPLICATED),
    Row(("blocks.*.to_q", "blocks.*.to_k", "blocks.*.to_v"), "layers.*.linear_qkv", Kind.QKV),
    Row(("blocks.*.up",), "layers.*.linear_fc1", Kind.COLUMN),
    Row(("blocks.*.down",), "layers.*.linear_fc2", Kind.ROW),
)

HF_SHAPES = {"embed.weight": (HIDDEN, 3), "embed.bias": (HIDDEN,)}
for _layer in range(LAYERS):
    for _name, _out, _in in [
        ("to_q", HIDDEN, HIDDEN),
        ("to_k", HIDDEN * GROUPS // HEADS, HIDDEN),
        ("to_v", HIDDEN * GROUPS // HEADS, HIDDEN),
        ("up", 4 * HIDDEN, HIDDEN),
        ("down", HIDDEN, 4 * HIDDEN),
    ]:
        HF_SHAPES[f"blocks.{_layer}.{_name}.weight"] = (_out, _in)
        HF_SHAPES[f"blocks.{_layer}.{_name}.bias"] = (_out,)


class ToyLayer(MegatronModule):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        qkv = HIDDEN * (HEADS + 2 * GROUPS) // HEADS
        options = {"config": config, "init_method": config.init_method, "bias": True}
        self.linear_qkv = ColumnParallelLinear(HIDDEN, qkv, gather_output=True, **options)
        self.linear_fc1 = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **options)
        self.linear_fc2 = RowParallelLinear(
            4 * HIDDEN, HIDDEN, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.linear_qkv(x)[0].unflatten(-1, (-1, HIDDEN))
        x = x + F.dropout(torch.tanh(qkv).sum(-2), self.config.hidden_dropout)
        return x + self.linear_fc2(F.gelu(self.linear_fc1(x)[0]))[0]


class ToyModel(MegatronModule):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.embed = nn.Linear(3, HIDDEN, dtype=config.params_dtype)
        self.layers = nn.ModuleList(ToyLayer(config) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        embed = self.embed.state_dict(prefix="", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(embed, f"{prefix}embed.", {}, sharded_offsets)
        for number, layer in enumerate(self.layers):
            sharded |= layer.sharded_state_dict(f"{prefix}layers.{number}.", sharded_offsets, metadata)
        return sharded


def build(tensor_parallel: int, bf16: bool = False, dropout: float = 0.0) -> ToyModel:
    """Joins the processes and builds the model, with weights that do not depend on the layout."""
    initialize(ParallelConfig(tensor_model_parallel_size=tensor_parallel), seed=0)
    return ToyModel(
        TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            hidden_dropout=dropout,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=tensor_parallel,
        )
    )


def build_training(config: Config, dropout: float = 0.0) -> Optimization:
    model = build(config.parallel.tensor_model_parallel_size, config.model.bf16, dropout)
    return build_optimization(config, model)


def build_distributed_optimizer(config: Config) -> Optimization:
    """As `build_training`, with the optimizer's state spread over data-parallel ranks."""
    model = build(config.parallel.tensor_model_parallel_size, config.model.bf16)
    plain = build_optimization(config, model)
    model = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        model,
    )
    settings = replace(plain.optimizer.config, use_distributed_optimizer=True)
    return Optimization(model, get_megatron_optimizer(settings, [model]), plain.scheduler)


def hf_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in HF_SHAPES.items()}


def hf_folder(path: Path, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """A diffusers-like folder: weights in `transformer`, and other parts."""
    transformer = path / "transformer"
    transformer.mkdir(parents=True)
    (transformer / "config.json").write_text('{"_class_name": "Toy"}\n')
    (path / "model_index.json").write_text('{"_class_name": "ToyPipeline"}\n')
    (path / "vae").mkdir()
    save_file({"weight": torch.ones(3)}, path / "vae" / "diffusion_pytorch_model.safetensors")
    stem, metadata = "diffusion_pytorch_model", {"format": "pt"}
    if shards == 1:
        save_file(tensors, transformer / f"{stem}.safetensors", metadata)
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, transformer / file, metadata)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (transformer / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def config(tensor_parallel: int = 1, bf16: bool = False, seed: int = 0) -> Config:
    settings = Config()
    settings.parallel.tensor_model_parallel_size = tensor_parallel
    settings.model.bf16 = bf16
    settings.training.seed = seed
    settings.optimizer.lr = 0.01
    settings.optimizer.lr_warmup_iters = 2
    settings.optimizer.lr_decay_style = "linear"
    settings.training.train_iters = 20
    settings.optimizer.weight_decay = 0.01
    return settings


def train(optimization: Optimization, iterations: range) -> list[float]:
    """Gradient norms. An iteration's batch does not depend on the layout; dropout uses the generators."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    norms = []
    for iteration in iterations:
        batch = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(iteration))[rank::size]
        dtype = optimization.model.config.params_dtype
        optimization.model.zero_grad_buffer()
        optimization.optimizer.zero_grad()
        optimization.model(batch.to(dtype)).float().square().mean().backward()
        finalize_model_grads([optimization.model])
        _, norm, _ = optimization.optimizer.step()
        optimization.scheduler.step(increment=1)
        norms.append(float(norm))
    return norms


def weights(optimization: Optimization) -> dict[str, Tensor]:
    """The whole model."""
    return dict(hf.hf_tensors(optimization.model.module, MAPPING))
