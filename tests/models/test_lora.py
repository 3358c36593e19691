"""Adapters against PEFT's on diffusers' model: outputs and gradients at every layout."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_omni.checkpoint.distributed import Checkpointer
from megatron_omni.checkpoint.hf import hf_tensors, load_hf
from megatron_omni.checkpoint.mapping import Heads, match
from megatron_omni.checkpoint.shards import stored_shapes
from megatron_omni.config.schema import Config, LoraConfig, ModelConfig, ParallelConfig
from megatron_omni.errors import UserError
from megatron_omni.models.base import ImageSize
from megatron_omni.models.layers.lora import (
    adapter_mapping,
    adapters,
    adapters_disabled,
    add_adapters,
)
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import Layout, form_groups, initialize
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.training.optimizer import build_optimization
from megatron_omni.training.update import Updater
from tests.distributed import run_distributed
from tests.models import test_qwen_image_layouts as layouts
from tests.models.builders import qwen_image
from tests.models.test_qwen_image import (
    TOLERANCE,
    Batch,
    build,
    build_random,
    gradients,
    make_batch,
    relative_error,
    run,
    run_oracle,
)

EVERYTHING = ("*",)
SOME = ("to_q", "add_v_proj", "to_out", "transformer_blocks.1.*mlp*", "*_mod.1", "img_in", "proj_out")
ATTENTION = LoraConfig().lora_target_modules
CASES = [(ImageSize(3, 5), [7, 4]), (ImageSize(1, 7), [3, 3])]


def settings(targets: tuple[str, ...] = EVERYTHING, **changes) -> LoraConfig:
    return replace(LoraConfig(lora_rank=3, lora_alpha=5.0, lora_target_modules=targets), **changes)


def adapted(
    lora: LoraConfig, model: ModelConfig | None = None, parallel: ParallelConfig | None = None
) -> nn.Module:
    """The Megatron model of `qwen_image()` with this rank's share of the factors of `random_factors`."""
    megatron = build(model, parallel)
    add_adapters([megatron], MAPPING, lora, seed=0)
    fill(megatron, random_factors)
    return megatron


def entries(model: nn.Module):
    """Table lines of the adapters' parameters."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return match(adapter_mapping(MAPPING), names, Heads(4, 4))


def random_factors(name: str, shape: tuple[int, ...]) -> Tensor:
    """A whole factor: both are far from zero."""
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


@torch.no_grad()
def fill(model: nn.Module, factors) -> None:
    size = model.config.tensor_model_parallel_size
    for entry in entries(model):
        parameter = model.get_parameter(entry.megatron)
        (shape,) = entry.hf_shapes(parameter.shape, size)
        parameter.copy_(cut(entry, factors(entry.hf[0], shape), size))


def cut(entry, whole: Tensor, size: int) -> Tensor:
    rank = parallel_state.get_tensor_model_parallel_rank() if size > 1 else 0
    return whole[entry.hf_slice(whole.shape, rank, size)]


def peft_model(lora: LoraConfig, names: set[str], **sizes) -> PeftModel:
    """PEFT on diffusers' model, with adapters on the linears `names` and the values of `random_factors`."""
    config = PeftConfig(r=lora.lora_rank, lora_alpha=lora.lora_alpha, target_modules=sorted(names))
    model = get_peft_model(qwen_image(**sizes), config)
    with torch.no_grad():
        for name, parameter in peft_factors(model).items():
            parameter.copy_(random_factors(name, parameter.shape))
    return model


def peft_factors(model: PeftModel) -> dict[str, nn.Parameter]:
    """By their names in a file."""
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def oracle(lora: LoraConfig, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """PEFT's velocity and gradients, by names in a file; the linears are those that `model` has adapted."""
    names = {entry.hf[0].rsplit(".lora_", 1)[0] for entry in entries(model)}
    reference = peft_model(lora, names)
    velocity = run_oracle(reference, batch)
    (velocity * batch.weight).sum().backward()
    return velocity.detach(), {name: p.grad for name, p in peft_factors(reference).items()}


def check_gradients(model: nn.Module, grads: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for entry in entries(model):
        expected = cut(entry, truth[entry.hf[0]], model.config.tensor_model_parallel_size)
        if expected.any():
            assert relative_error(grads[entry.megatron], expected) < TOLERANCE, entry.megatron
        else:  # of the last layer's text query, which nothing asks
            assert not grads[entry.megatron].any(), entry.megatron


@pytest.mark.parametrize("targets", [EVERYTHING, SOME, ATTENTION], ids=["everything", "some", "attention"])
def test_outputs_and_gradients_equal_peft(targets: tuple[str, ...]):
    lora, batch = settings(targets), make_batch(*CASES[0])
    model = adapted(lora)
    velocity, grads = gradients(model, batch)
    expected, expected_grads = oracle(lora, model, batch)
    assert relative_error(velocity, expected) < TOLERANCE
    assert {entry.hf[0] for entry in entries(model)} == expected_grads.keys()
    check_gradients(model, grads, expected_grads)


def test_every_linear_layer_that_reaches_the_output_can_be_adapted():
    model = adapted(settings())
    found = {entry.hf[0].rsplit(".lora_", 1)[0] for entry in entries(model)}
    linears = {name for name, module in qwen_image().named_modules() if isinstance(module, nn.Linear)}
    unused = {f"transformer_blocks.2.{n}" for n in ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")}
    assert found == linears - unused


LAYOUTS = {
    "tensor": "dp4 tp2-dp2 tp2-sp-dp2 tp4 tp4-sp",
    "pipeline": "pp2-dp2 pp4 tp2-sp-pp2-interleaved",
    "context": "cp2-ring-dp2 cp4-usp",
    "mixed": "tp2-sp-cp2-ring pp2-cp2-ulysses",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYOUTS)
def test_every_layout_gives_pefts_outputs_gradients_and_norm(family: str):
    run_distributed(
        check_layouts, 4, [layouts.LAYOUTS[family][name] for name in LAYOUTS[family].split()], timeout=240
    )


def check_layouts(parallels: list[ParallelConfig]) -> None:
    dist.init_process_group("gloo")
    for parallel in parallels:
        layout = form_groups(parallel, seed=0, device=torch.device("cpu"))
        try:
            check_layout(layout, parallel, EVERYTHING, None, *layouts.CASES[0])
            check_layout(layout, parallel, SOME, "full", *layouts.CASES[2])
        except Exception as error:
            error.add_note(f"in {layout}")
            raise
        parallel_state.destroy_model_parallel()


def check_layout(
    layout: Layout,
    parallel: ParallelConfig,
    targets: tuple[str, ...],
    recompute: str | None,
    size: ImageSize,
    lengths: list[list[int]],
) -> None:
    """On each process: velocities, its share of the gradients as Megatron reduces them, and their norm."""
    lora, batches = settings(targets), layouts.make_batches(size, lengths)
    chunks = layouts.build_chunks(layout, parallel, qwen_image(num_layers=layouts.LAYERS))
    for chunk in chunks:
        chunk.config.recompute_granularity, chunk.config.recompute_num_layers = recompute, 1
    add_adapters(chunks, MAPPING, lora, seed=0)
    for chunk in chunks:
        fill(chunk, random_factors)
    own = {entry.hf[0].rsplit(".lora_", 1)[0] for chunk in chunks for entry in entries(chunk)}
    names = [own] * layout.world_size
    dist.all_gather_object(names, own)
    reference = peft_model(lora, set().union(*names), num_layers=layouts.LAYERS)
    velocities, _ = layouts.oracle(reference, batches, size)
    truth = {name: p.grad for name, p in peft_factors(reference).items()}

    guidance, algorithm = Guidance(), layouts.WeightedSum()
    config = layouts.lossless(parallel)
    config.optimizer.clip_grad = 1e9  # so that the norm is taken
    optimization = build_optimization(config, chunks)
    policy = ForwardPipeline(chunks, guidance.forward, torch.float32)
    updater = Updater(
        optimization, policy, algorithm, guidance, layouts.embeddings, "9-9-1", size, None, layout
    )
    share = len(batches) // layout.data_size
    here = slice(layout.data_rank * share, (layout.data_rank + 1) * share)
    result = updater.step(batches[here])

    for ours, theirs in zip(algorithm.velocities, velocities[here], strict=layout.stages[-1].is_last):
        assert relative_error(ours, theirs) < TOLERANCE
    for chunk in chunks:
        grads = {name: p.main_grad for name, p in chunk.named_parameters() if p.requires_grad}
        check_gradients(chunk, grads, truth)
    norm = torch.stack([grad.norm() for grad in truth.values()]).norm().item()
    assert result.means["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_new_adapters_change_nothing_and_only_they_train():
    batch = make_batch(*CASES[0])
    model = build()
    before = run(model, batch)
    names = {name for name, _ in model.named_parameters()}
    add_adapters([model], MAPPING, settings(ATTENTION), seed=0)
    assert torch.equal(run(model, batch), before)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == names
    for layer, adapter in adapters(model):
        for a in adapter.A.values():
            bound = layer.weight.shape[1] ** -0.5  # PEFT's: kaiming_uniform_(a=√5)
            assert 0.8 * bound < a.weight.abs().max() <= bound


def test_new_adapters_do_not_depend_on_the_layout_or_on_other_targets():
    whole = fresh_factors(ParallelConfig())
    model = build()
    add_adapters([model], MAPPING, settings(SOME), seed=0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, whole[name]), name
    first, second = run_distributed(fresh_shards, 2)
    for name, parameter in whole.items():
        if first[name].shape == parameter.shape:
            assert torch.equal(first[name], parameter) and torch.equal(second[name], parameter), name
        else:
            dim = next(d for d, n in enumerate(parameter.shape) if n != first[name].shape[d])
            assert torch.equal(torch.cat((first[name], second[name]), dim), parameter), name


def fresh_factors(parallel: ParallelConfig) -> dict[str, Tensor]:
    model = build(parallel=parallel)
    add_adapters([model], MAPPING, settings(), seed=0)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def fresh_shards() -> dict[str, Tensor]:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    initialize(parallel, seed=0)
    return fresh_factors(parallel)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_merged_weights_equal_weights_with_adapters(tensor_parallel: int, tmp_path: Path):
    velocity = run_distributed(save_merged, tensor_parallel, tensor_parallel, tmp_path)[0]
    merged, plain = run_distributed(run_without_adapters, 1, tmp_path)[0]
    assert relative_error(merged, velocity) < TOLERANCE < relative_error(plain, velocity)


@torch.no_grad()
def run_without_adapters(folder: Path) -> tuple[Tensor, Tensor]:
    """With the weights in `folder`, and with the initial ones."""
    initialize(ParallelConfig(), seed=0)
    batch, merged = make_batch(*CASES[0]), build()
    load_hf([merged], MAPPING, folder)
    return run(merged, batch), run(build(), batch)


@torch.no_grad()
def save_merged(tensor_parallel: int, folder: Path) -> Tensor:
    parallel = ParallelConfig(tensor_model_parallel_size=tensor_parallel)
    layout = initialize(parallel, seed=0)
    model = adapted(settings(), parallel=parallel)
    tensors = dict(hf_tensors([model], MAPPING))
    if layout.rank == 0:
        save_file(tensors, folder / "model.safetensors")
    return run(model, make_batch(*CASES[0]))


def test_disabled_adapters_give_the_model_before_training():
    batch, model = make_batch(*CASES[0]), adapted(settings())
    with adapters_disabled([model]):
        assert torch.equal(run(model, batch), run(build(), batch))
    assert relative_error(run(model, batch), run(build(), batch)) > 1e-2


@pytest.mark.parametrize("scale", [5.0, 10.0])
def test_the_output_changes_with_alpha(scale: float):
    """A scale that is dropped somewhere would go unnoticed at alpha = rank only."""
    lora, batch = settings(lora_alpha=scale), make_batch(*CASES[0])
    model = adapted(lora)
    assert relative_error(run(model, batch), oracle(lora, model, batch)[0]) < TOLERANCE


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_gives_the_same_bits(granularity: str, dropout: float):
    run_distributed(check_recomputation, 2, granularity, dropout)


def check_recomputation(granularity: str, dropout: float) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    initialize(parallel, seed=0)
    lora, batch = settings(ATTENTION, lora_dropout=dropout), make_batch(*CASES[0])
    outcomes = []
    for recompute in (None, granularity):
        model = adapted(lora, ModelConfig(recompute_granularity=recompute), parallel)
        torch.manual_seed(0)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        outcomes.append(gradients(model, batch))
    (velocity, grads), (again, grads_again) = outcomes
    assert torch.equal(velocity, again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)
    assert all(grads[name].any() for name in grads if "layers.0" in name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_alike_where_ranks_hold_the_same_and_off_in_evaluation(sequence_parallel: bool):
    outputs = run_distributed(check_dropout, 2, sequence_parallel)
    assert torch.equal(*outputs)


def check_dropout(sequence_parallel: bool) -> Tensor:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    initialize(parallel, seed=0)
    batch = make_batch(*CASES[0])
    dropped = adapted(settings(lora_dropout=0.5), parallel=parallel)
    plain = run(adapted(settings(), parallel=parallel), batch).detach()
    output = run(dropped, batch).detach()
    assert relative_error(output, plain) > 1e-3
    assert torch.equal(run(dropped.eval(), batch), plain)
    return output


def test_a_pattern_without_a_match_is_refused_with_near_names():
    with pytest.raises(UserError, match=r"add_q_prj: did you mean add_q_proj") as error:
        add_adapters([build()], MAPPING, settings(("to_q", "add_q_prj", "img_mlp")), seed=0)
    assert "transformer_blocks.*.attn.to_out.0" in str(error.value)
    assert not re.search(r"^  (to_q|img_mlp)", str(error.value), re.MULTILINE)


def test_a_pipeline_stage_without_an_adapter_is_refused_on_every_rank():
    pipeline = ParallelConfig(pipeline_model_parallel_size=2)
    for error in run_distributed(error_of_targets, 2, pipeline, ("transformer_blocks.0",)):
        assert "leave a pipeline stage with nothing to train" in error
    for error in run_distributed(error_of_targets, 2, pipeline, ("to_qq",)):
        assert "did you mean to_q" in error


def error_of_targets(parallel: ParallelConfig, targets: tuple[str, ...]) -> str:
    layout = initialize(parallel, seed=0)
    chunks = layouts.build_chunks(layout, parallel, qwen_image(num_layers=layouts.LAYERS))
    with pytest.raises(UserError) as caught:
        add_adapters(chunks, MAPPING, settings(targets), seed=0)
    return str(caught.value)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_moves_every_adapter_and_no_bit_of_the_model(bf16: bool):
    run_distributed(check_step, 1, bf16)


def check_step(bf16: bool) -> None:
    initialize(ParallelConfig(), seed=0)
    model = adapted(settings(ATTENTION), ModelConfig(bf16=bf16))
    before = {name: p.clone() for name, p in model.named_parameters()}
    config = Config(model=ModelConfig(bf16=bf16))
    config.optimizer.lr = config.optimizer.weight_decay = 0.1
    run_ = build_optimization(config, [model])
    for _ in range(2):
        run_.chunks[0].zero_grad_buffer()
        batch = make_batch(*CASES[0])
        (run(run_.chunks[0], batch) * batch.weight).sum().backward()
        finalize_model_grads(run_.chunks)
        run_.optimizer.step()
        run_.scheduler.step(increment=1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("_lora." not in name), name


def test_a_checkpoint_holds_the_adapters_alone_and_loads_at_every_layout(tmp_path: Path):
    tensor = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    run_distributed(save_checkpoint, 2, tmp_path, tensor)
    stored = stored_shapes(tmp_path / "iter_0000001")
    weights = {name: shape for name, shape in stored.items() if not name.startswith(("optimizer", "random"))}
    whole = fresh_factors(ParallelConfig())
    assert weights == {name: tuple(parameter.shape) for name, parameter in whole.items()}
    for processes, parallel in (
        (1, ParallelConfig()),
        (2, ParallelConfig(pipeline_model_parallel_size=2)),
        (4, ParallelConfig(tensor_model_parallel_size=4)),
    ):
        run_distributed(check_loaded_checkpoint, processes, tmp_path, parallel)


def checkpointer(parallel: ParallelConfig) -> tuple[Checkpointer, list[nn.Module]]:
    """Of a run with adapters that have no trained values yet."""
    config = Config(parallel=parallel, lora=settings())
    config.optimizer.lr = 0.0
    chunks = [build_random(parallel=parallel, stage=stage) for stage in initialize(parallel, seed=0).stages]
    add_adapters(chunks, MAPPING, config.lora, seed=1)
    run_ = build_optimization(config, chunks)
    run_.optimizer.step()
    return Checkpointer(run_.chunks, run_.optimizer, run_.scheduler, config), chunks


def save_checkpoint(folder: Path, parallel: ParallelConfig) -> None:
    saver, chunks = checkpointer(parallel)
    for chunk in chunks:
        fill(chunk, random_factors)
    saver.save(folder, 1, {})


def check_loaded_checkpoint(folder: Path, parallel: ParallelConfig) -> None:
    loader, chunks = checkpointer(parallel)
    loader.load(folder)
    for chunk in chunks:
        loaded = {name: p.clone() for name, p in chunk.named_parameters()}
        fill(chunk, random_factors)
        assert all(torch.equal(p, loaded[name]) for name, p in chunk.named_parameters())


@dataclass(frozen=True)
class Match:
    pattern: str
    count: int
    """Linears of the three layers."""


@pytest.mark.parametrize(
    "match_",
    [
        Match("to_q", 3),
        Match("attn.to_out.0", 3),
        Match("to_out", 3),
        Match("img_mlp", 6),
        Match("txt_mlp", 4),
        Match("transformer_blocks.1.attn.to_?", 3),
        Match("transformer_blocks.0", 14),
        Match("add_[qk]_proj", 6),
    ],
    ids=lambda m: m.pattern,
)
def test_patterns_match_runs_of_a_names_parts(match_: Match):
    model = build()
    add_adapters([model], MAPPING, settings((match_.pattern,)), seed=0)
    assert len(entries(model)) == 2 * match_.count
