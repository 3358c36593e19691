"""A small Megatron module with a table of every kind, its Hugging Face folder, and a training run on it."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_omni.checkpoint import hf
from megatron_omni.checkpoint.mapping import Kind, Row
from megatron_omni.config.schema import Config
from megatron_omni.parallel.stages import Stage
from megatron_omni.parallel.state import Layout, initialize
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
    """A pipeline stage of the model, with weights that do not depend on the layout."""

    def __init__(self, config: TransformerConfig, stage: Stage):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = stage.is_first, stage.is_last
        self.share_embeddings_and_output_weights = False
        self.input_tensor: Tensor | None = None
        torch.manual_seed(config.num_layers)
        embed = nn.Linear(3, HIDDEN, dtype=config.params_dtype)
        layers = [ToyLayer(config) for _ in range(config.num_layers)]
        self.embed = embed if stage.is_first else None
        self.layers = nn.ModuleDict({str(i): layers[i] for i in stage.layers(config.num_layers)})

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        (self.input_tensor,) = input_tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed else self.input_tensor
        for layer in self.layers.values():
            x = layer(x)
        return x

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        sharded = {}
        if self.embed:
            embed = self.embed.state_dict(prefix="", keep_vars=True)
            sharded |= make_sharded_tensors_for_checkpoint(embed, f"{prefix}embed.", {}, sharded_offsets)
        for number, layer in self.layers.items():
            sharded |= layer.sharded_state_dict(f"{prefix}layers.{number}.", sharded_offsets, metadata)
        return sharded


def build(tensor_parallel: int, bf16: bool = False, dropout: float = 0.0) -> ToyModel:
    """Joins the processes and builds the whole model."""
    settings = config(tensor_parallel, bf16)
    (model,) = build_chunks(settings, initialize(settings.parallel, seed=0), dropout)
    return model


def build_chunks(
    settings: Config, layout: Layout, dropout: float = 0.0, layers: int = LAYERS
) -> list[ToyModel]:
    """This process's chunks of the model."""
    bf16 = settings.model.bf16
    chunks = []
    for number, stage in enumerate(layout.stages):
        transformer = TransformerConfig(
            num_layers=layers,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            hidden_dropout=dropout,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=layout.tensor_size,
            pipeline_model_parallel_size=layout.pipeline_size,
            virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
            pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
            batch_p2p_comm=False,
        )
        chunks.append(ToyModel(transformer, stage))
        chunks[-1].vp_stage = number if layout.chunks > 1 else None
    torch.manual_seed(0)
    return chunks


def build_training(config: Config, dropout: float = 0.0, layers: int = LAYERS) -> Optimization:
    """Joins the processes and builds the model and its optimizer."""
    layout = initialize(config.parallel, seed=0)
    return build_optimization(config, build_chunks(config, layout, dropout, layers))


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


def config(tensor_parallel: int = 1, bf16: bool = False, seed: int = 0, **flags) -> Config:
    """`flags` are settings of any group."""
    settings = Config()
    settings.parallel.tensor_model_parallel_size = tensor_parallel
    settings.model.bf16 = bf16
    settings.training.seed = seed
    settings.optimizer.lr = 0.01
    settings.optimizer.lr_warmup_iters = 2
    settings.optimizer.lr_decay_style = "linear"
    settings.training.train_iters = 20
    settings.optimizer.weight_decay = 0.01
    for name, value in flags.items():
        group = next(each for each in vars(settings).values() if hasattr(each, name))
        setattr(group, name, value)
    return settings


def train(optimization: Optimization, iterations: range) -> list[float]:
    """Gradient norms. An iteration's batch does not depend on the layout; dropout uses the generators."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    chunks, norms = optimization.chunks, []
    for iteration in iterations:
        batch = torch.randn(8, 1, 3, generator=torch.Generator().manual_seed(iteration))[rank::size]
        batch = batch.to(chunks[0].module.config.params_dtype)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimization.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=lambda rows, chunk: (chunk(next(rows)[None]), _loss),
            data_iterator=[iter(batch) for _ in chunks],
            model=chunks,
            num_microbatches=len(batch),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = optimization.optimizer.step()
        optimization.scheduler.step(increment=1)
        norms.append(float(norm))
    return norms


def _loss(output: Tensor) -> tuple[Tensor, dict]:
    # Context-parallel ranks compute the same here, and Megatron expects each to have its tokens' part.
    return output.float().square().mean() / parallel_state.get_context_parallel_world_size(), {}


def weights(optimization: Optimization) -> dict[str, Tensor]:
    """The whole model."""
    optimization.gather_parameters()
    return dict(hf.hf_tensors([chunk.module for chunk in optimization.chunks], MAPPING))
