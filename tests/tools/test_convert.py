"""`tools/checkpoint/convert.py` as its user runs it, on a tiny Qwen-Image folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from safetensors.torch import load_file, save_file

from megatron_omni.checkpoint.hf import hf_tensors, load_hf
from megatron_omni.checkpoint.shards import read_shards
from megatron_omni.checkpoint.training_state import model_shards
from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.state import initialize
from tests.checkpoint.folders import hashes, qwen_image_folder
from tests.distributed import run_distributed
from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments, assert_close, launch, metrics, reproducible
from tools.checkpoint.convert import main

ROOT = Path(__file__).parents[2]
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def convert(command: str, source: Path, target: Path, *flags: str, tensor: int = 1, pipeline: int = 1) -> int:
    layout = [f"--{TP.replace('_', '-')}", str(tensor), f"--{PP.replace('_', '-')}", str(pipeline)]
    if command in ("megatron-to-hf", "check"):
        layout = []
    return main([command, "--load-dir", str(source), "--save-dir", str(target), *layout, *flags])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = (folder / "transformer").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    """float32, in one file."""
    return qwen_image_folder(tmp_path_factory.mktemp("single") / "hf", torch.float32)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """bfloat16, in several files with an index."""
    return qwen_image_folder(
        tmp_path_factory.mktemp("sharded") / "hf", torch.bfloat16, max_shard_size="200KB"
    )


@pytest.fixture(scope="module")
def release(single, tmp_path_factory) -> Path:
    """A conversion of `single` for TP 2 × PP 2."""
    folder = tmp_path_factory.mktemp("release") / "megatron"
    assert convert("hf-to-megatron", single, folder, tensor=2, pipeline=2) == 0
    return folder


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("source", ["single", "sharded"])
def test_there_and_back_is_byte_identical(source, tensor, pipeline, tmp_path, request):
    source = request.getfixturevalue(source)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert convert("hf-to-megatron", source, megatron, tensor=tensor, pipeline=pipeline) == 0
    files = {path.name for path in (megatron / "release").glob("*.distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(tensor * pipeline)}
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not [
        path for path in hashes(megatron / "hf") if path.startswith("transformer/") and path.endswith("rs")
    ]
    assert convert("megatron-to-hf", megatron, back) == 0
    assert hashes(back) == hashes(source)
    assert {path.name for path in tmp_path.iterdir()} == {"megatron", "back"}


def test_from_layout_to_layout_is_as_from_hugging_face(single, release, tmp_path):
    assert convert("megatron-to-megatron", release, tmp_path / "moved", tensor=4) == 0
    assert convert("hf-to-megatron", single, tmp_path / "direct", tensor=4) == 0
    moved, direct = hashes(tmp_path / "moved"), hashes(tmp_path / "direct")
    assert moved.keys() == direct.keys()
    tensors_and_rest = [name for name in moved if name.endswith(".distcp") or name.startswith("hf/")]
    assert len(tensors_and_rest) > 10
    assert all(moved[name] == direct[name] for name in tensors_and_rest)


def test_the_program_runs_from_the_checkout_without_torchrun(single, tmp_path):
    command = [sys.executable, "tools/checkpoint/convert.py", "hf-to-megatron", "--load-dir", single]
    command += ["--save-dir", tmp_path / "out", "--check"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "equal: " in done.stdout


# What reads the checkpoint


def loaded(folder: Path, source: Path, layout: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    """The whole model that this layout's ranks load from a release, and from the Hugging Face folder."""
    family, parallel = MODELS.get("qwen_image"), ParallelConfig(**layout)
    stages = initialize(parallel, seed=0).stages
    chunks = [family.build_model(source, ModelConfig(), parallel, stage) for stage in stages]
    read_shards(model_shards(chunks), folder / "release")
    from_release = dict(hf_tensors(chunks, family.mapping))
    load_hf(chunks, family.mapping, source / "transformer")
    return [from_release, dict(hf_tensors(chunks, family.mapping))]


@pytest.mark.parametrize(
    "processes, layout",
    [(1, {}), (2, {TP: 2}), (2, {PP: 2}), (4, {TP: 2, PP: 2})],
    ids=["one", "TP2", "PP2", "both"],
)
def test_every_layout_loads_a_release(single, release, processes, layout):
    for from_release, from_hf in run_distributed(loaded, processes, release, single, layout):
        assert from_release.keys() == from_hf.keys()
        assert all(torch.equal(tensor, from_hf[name]) for name, tensor in from_release.items())


def loaded_by_megatron(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    family, parallel = MODELS.get("qwen_image"), ParallelConfig()
    stages = initialize(parallel, seed=0).stages
    (model,) = [family.build_model(source, ModelConfig(), parallel, stage) for stage in stages]
    wanted = {
        name: part for name, part in model.sharded_state_dict().items() if isinstance(part, ShardedTensor)
    }
    model.load_state_dict(dist_checkpointing.load(wanted, str(folder / "release")), strict=False)
    return dict(hf_tensors([model], family.mapping))


def test_megatrons_own_reader_loads_a_release(single, release):
    (tensors,) = run_distributed(loaded_by_megatron, 1, release, single)
    stored = weights(single)
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two models that a run can train; they differ in the transformer's weights only."""
    one = tiny_pipeline_folder(tmp_path_factory.mktemp("models") / "one")
    other = shutil.copytree(one, one.with_name("other"))
    path = other / "transformer" / "diffusion_pytorch_model.safetensors"
    changed = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in load_file(path).items()}
    save_file(changed, path, {"format": "pt"})
    return one, other


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> Path:
    """A run's folder, trained from the other model."""
    folder = tmp_path_factory.mktemp("trained")
    (outcome,) = launch(arguments(folders[1], folder, train_iters=2, export_hf=True))
    assert outcome.status == 0, outcome.errors
    return folder


@pytest.mark.parametrize("processes, layout", [(1, {}), (4, {TP: 2, PP: 2})], ids=["one", "TP2 × PP2"])
def test_training_starts_from_a_release(folders, trained, tmp_path, processes, layout):
    one, other = folders
    assert convert("hf-to-megatron", other, tmp_path / "megatron", tensor=2, pipeline=2) == 0
    line = arguments(one, tmp_path, train_iters=2, load=tmp_path / "megatron", **layout)
    for outcome in launch(line, processes):
        assert outcome.status == 0, outcome.errors
    rows = [reproducible(metrics(folder)) for folder in (trained, tmp_path)]
    if processes == 1:
        assert rows[0] == rows[1]
    else:
        assert_close(rows[0][:1], rows[1][:1], 1e-3)  # of the initial weights


def test_a_training_checkpoint_is_exported_as_the_run_itself_does(folders, trained, tmp_path):
    run = trained / "runs" / "run"
    assert convert("megatron-to-hf", run / "checkpoints", tmp_path / "out") == 0
    assert hashes(tmp_path / "out") == hashes(run / "hf")
    assert hashes(tmp_path / "out") != hashes(folders[1])
    # … also one of several checkpoints, by way of another layout, completed by another folder
    (checkpoint,) = (run / "checkpoints").glob("iter_*")
    assert convert("megatron-to-megatron", checkpoint, tmp_path / "megatron", tensor=2) == 0
    assert convert("megatron-to-hf", checkpoint, tmp_path / "direct", "--source", str(folders[0])) == 0
    assert convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back") == 0
    assert hashes(tmp_path / "back") == hashes(tmp_path / "direct") == hashes(tmp_path / "out")


# Output


def test_another_dtype_goes_into_checkpoint_and_folder(single, tmp_path):
    assert (
        convert("hf-to-megatron", single, tmp_path / "megatron", "--dtype", "bf16", "--check", tensor=2) == 0
    )
    assert convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", "--check") == 0
    before, after = weights(single), weights(tmp_path / "back")
    assert list(before) == list(after)
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)


def test_dtype_changes_on_the_way_back_too(sharded, tmp_path):
    """bfloat16 → float32 → bfloat16 loses nothing."""
    assert convert("hf-to-megatron", sharded, tmp_path / "megatron") == 0
    assert convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "wide", "--dtype", "fp32") == 0
    assert convert("hf-to-megatron", tmp_path / "wide", tmp_path / "again", "--dtype", "bf16") == 0
    assert convert("megatron-to-hf", tmp_path / "again", tmp_path / "narrow") == 0
    one, other = weights(sharded), weights(tmp_path / "narrow")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    index = "transformer/diffusion_pytorch_model.safetensors.index.json"
    sizes = [
        json.loads((folder / index).read_text())
        for folder in (sharded, tmp_path / "wide", tmp_path / "narrow")
    ]
    assert sizes[0] == sizes[2]
    assert sizes[1]["metadata"]["total_size"] == 2 * sizes[0]["metadata"]["total_size"]
    assert sizes[1]["weight_map"] == sizes[0]["weight_map"]


def test_weights_are_cut_to_the_size_asked_for(release, single, tmp_path):
    from diffusers import QwenImageTransformer2DModel

    assert convert("megatron-to-hf", release, tmp_path / "out", "--max-shard-size", "200KB") == 0
    files = list((tmp_path / "out" / "transformer").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 220_000 for file in files)
    model = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")
    stored = weights(single)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())


def test_a_dry_run_prints_the_plan_and_writes_nothing(single, release, tmp_path, capsys):
    flags = {"tensor": 2, "pipeline": 2}
    assert convert("hf-to-megatron", single, tmp_path / "out", "--dry-run", **flags) == 0
    assert convert("megatron-to-hf", release, tmp_path / "out", "--dry-run") == 0
    printed = capsys.readouterr().out
    for rank in range(4):
        assert f"release/__{rank}_0.distcp" in printed
    assert "transformer/diffusion_pytorch_model.safetensors" in printed
    assert not list(tmp_path.iterdir())


def test_an_older_conversion_is_replaced(single, sharded, tmp_path):
    for source in (single, sharded):
        assert convert("hf-to-megatron", source, tmp_path / "megatron") == 0
        assert convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back") == 0
    assert hashes(tmp_path / "back") == hashes(sharded)


# Checking


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_check_passes_for_equal_models_in_either_form(single, release, capsys):
    assert convert("check", single, release) == 0
    assert convert("check", release, single) == 0
    assert convert("check", release, release) == 0
    assert capsys.readouterr().out.count("equal: ") == 3


def test_check_names_what_differs(single, release, tmp_path, capsys):
    copy = shutil.copytree(single, tmp_path / "copy")
    flip(copy / "transformer" / "diffusion_pytorch_model.safetensors", -1)
    flip(copy / "vae" / "diffusion_pytorch_model.safetensors", -1)
    (copy / "extra.txt").write_text("")
    assert convert("check", release, copy) == 2
    assert re.search(r"differ in 3 .*\n  \S+\.\S+\n  extra\.txt\n  vae/diffusion", capsys.readouterr().err)


def test_check_names_what_differs_in_a_checkpoint(single, release, tmp_path, capsys):
    copy = shutil.copytree(release, tmp_path / "copy")
    path = copy / "release" / "__3_0.distcp"
    value = weights(single)["transformer_blocks.3.img_mod.1.weight"][-1].numpy().tobytes()
    flip(path, path.read_bytes().index(value))
    assert convert("check", single, copy) == 2
    assert "differ in 1 tensors or files:\n  layers.3.img_modulation.linear.weight" in capsys.readouterr().err


def test_check_after_a_conversion_reads_what_was_written(single, tmp_path, monkeypatch, capsys):
    from megatron_omni.checkpoint import conversion

    write = conversion.write_hf

    def damaging(plan, progress):
        write(plan, progress)
        flip(plan.folder / "transformer" / "diffusion_pytorch_model.safetensors", -1)

    monkeypatch.setattr(conversion, "write_hf", damaging)
    assert convert("hf-to-megatron", single, tmp_path / "megatron", "--check") == 0
    assert convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "out", "--check") == 2
    assert "differ in 1 tensors" in capsys.readouterr().err


# Bad input: one message, and nothing is written


def changed(source: Path, folder: Path, change) -> Path:
    """A copy of a Hugging Face folder with its tensors changed in place."""
    copy = shutil.copytree(source, folder)
    path = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return copy


def refused(capsys, *args, **layout) -> str:
    """The message; the target must be as it was."""
    target = args[2]
    before = hashes(target) if target.is_dir() else None
    assert convert(*args, **layout) == 2
    assert (hashes(target) if target.is_dir() else None) == before
    assert not list(target.parent.glob(".*"))
    (message,) = re.findall(r"^error: (.*)", capsys.readouterr().err, re.DOTALL)
    return message


def test_tensors_that_do_not_fit_are_all_named(single, tmp_path, capsys):
    def change(tensors):
        del tensors["proj_out.bias"]
        tensors["img_in.weight"] = torch.ones(2, 3)
        tensors["extra"] = torch.ones(1)

    message = refused(capsys, "hf-to-megatron", changed(single, tmp_path / "hf", change), tmp_path / "out")
    assert "proj_out.bias: missing in the folder" in message
    assert "img_in.weight: [2, 3] in the folder, [64, 16] in the model" in message
    assert "extra: not in the model" in message


def test_a_truncated_file_is_named(single, tmp_path, capsys):
    copy = shutil.copytree(single, tmp_path / "hf")
    path = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    assert f"{path} cannot be read" in refused(capsys, "hf-to-megatron", copy, tmp_path / "out")


def test_what_is_no_model_folder_is_refused(single, tmp_path, capsys):
    absent, other = tmp_path / "absent", shutil.copytree(single, tmp_path / "other")
    (other / "transformer" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    assert "absent does not exist" in refused(capsys, "hf-to-megatron", absent, tmp_path / "out")
    assert "describes a FluxTransformer2DModel" in refused(capsys, "hf-to-megatron", other, tmp_path / "out")
    assert "Give a diffusers folder" in refused(capsys, "hf-to-megatron", single / "vae", tmp_path / "out")
    assert "holds no Megatron checkpoint" in refused(capsys, "megatron-to-hf", single, tmp_path / "out")


def test_an_unknown_model_is_refused_with_the_nearest(single, tmp_path, capsys):
    message = refused(capsys, "hf-to-megatron", single, tmp_path / "out", "--model", "qwen_imag")
    assert "unknown model 'qwen_imag'" in message and "'qwen_image'" in message


def test_a_layout_that_does_not_fit_is_refused(single, release, tmp_path, capsys):
    for command, source in (("hf-to-megatron", single), ("megatron-to-megatron", release)):
        message = refused(capsys, command, source, tmp_path / "out", tensor=3)
        assert "tensor_model_parallel_size=3 does not divide the model's 4 attention heads" in message
        message = refused(capsys, command, source, tmp_path / "out", pipeline=5)
        assert "5 stages of the model's 4 layers" in message


def test_a_damaged_checkpoint_is_refused(release, tmp_path, capsys):
    def damaged(name: str, damage) -> str:
        copy = shutil.copytree(release, tmp_path / name)
        damage(copy)
        return refused(capsys, "megatron-to-hf", copy, tmp_path / "out")

    file = "release/__1_0.distcp"
    assert "__1_0.distcp (missing" in damaged("missing", lambda folder: (folder / file).unlink())
    assert "__1_0.distcp (100, should" in damaged("truncated", lambda folder: os.truncate(folder / file, 100))
    assert "is damaged" in damaged("record", lambda folder: (folder / "release/record.json").write_text("{}"))
    assert "is missing" in damaged("empty", lambda folder: shutil.rmtree(folder / "release"))
    headers = "hf/transformer/diffusion_pytorch_model.safetensors.header"
    assert "damaged" in damaged("headers", lambda folder: (folder / headers).write_bytes(b"12345678{"))


def test_a_checkpoint_of_another_model_is_refused(release, tmp_path, capsys):
    copy = shutil.copytree(release, tmp_path / "copy")
    config = copy / "hf" / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 5}))
    message = refused(capsys, "megatron-to-hf", copy, tmp_path / "out")
    assert "layers.4.attention.img.linear_qkv.weight: missing in the checkpoint" in message


def test_a_target_that_is_something_else_is_refused(single, release, tmp_path, capsys):
    target = tmp_path / "target"
    target.mkdir()
    (target / "diary.txt").write_text("mine")
    for command, source in (("hf-to-megatron", single), ("megatron-to-hf", release)):
        assert "something other than an older" in refused(capsys, command, source, target)
    target = tmp_path / "file"
    target.write_text("mine")
    for command, source in (("hf-to-megatron", single), ("megatron-to-hf", release)):
        assert "something other than an older" in refused(capsys, command, source, target)
    assert target.read_text() == "mine"


def test_a_target_within_the_source_is_refused(single, release, capsys):
    assert "overlaps" in refused(capsys, "hf-to-megatron", single, single / "megatron")
    assert "overlaps" in refused(capsys, "megatron-to-megatron", release, release)
    assert "overlaps" in refused(capsys, "megatron-to-hf", release, release / "hf")


def test_a_size_of_files_that_is_none_is_refused(release, tmp_path, capsys):
    message = refused(capsys, "megatron-to-hf", release, tmp_path / "out", "--max-shard-size", "5XB")
    assert "'5XB' is not understood" in message


def test_a_training_checkpoint_whose_model_folder_is_gone_asks_for_one(folders, trained, tmp_path, capsys):
    copy = shutil.copytree(trained / "runs" / "run" / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    (config,) = copy.glob("iter_*/config.yaml")
    settings = config.read_text().replace(str(folders[1]), str(tmp_path / "absent"))
    config.write_text(settings)
    (record,) = copy.glob("iter_*/record.json")
    sizes = json.loads(record.read_text())
    sizes["files"]["config.yaml"] = config.stat().st_size
    record.write_text(json.dumps(sizes))
    assert "--source" in refused(capsys, "megatron-to-hf", copy, tmp_path / "out")
