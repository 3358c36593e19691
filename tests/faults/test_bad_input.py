"""Bad input from the command line: one clear message, status 2, nothing lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments, launch

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model"))


def failure(line: list[str], processes: int = 1) -> str:
    """The message of a run that has to fail."""
    outcomes = launch(line, processes)
    assert any(outcome.status == 2 for outcome in outcomes), outcomes
    assert all(outcome.status != 0 for outcome in outcomes), outcomes
    text = max((outcome.errors for outcome in outcomes), key=len)
    assert "Traceback" not in text
    return text


def copy_of(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model"))


def test_a_truncated_checkpoint(model, tmp_path):
    folder = copy_of(model, tmp_path)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    assert "diffusion_pytorch_model.safetensors" in failure(arguments(folder, tmp_path))


def test_a_missing_an_extra_and_a_misshapen_tensor_are_all_named(model, tmp_path):
    folder = copy_of(model, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    del tensors["img_in.bias"]
    tensors["surplus.weight"] = torch.zeros(2)
    tensors["proj_out.bias"] = torch.zeros(3)
    save_file(tensors, folder / WEIGHTS)
    text = failure(arguments(folder, tmp_path))
    assert all(name in text for name in ("img_in.bias", "surplus.weight", "proj_out.bias"))


def test_a_model_folder_of_another_kind(model, tmp_path):
    folder = copy_of(model, tmp_path)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    assert "FluxPipeline" in failure(arguments(folder, tmp_path))


@pytest.mark.parametrize(
    ("flags", "processes", "words"),
    [
        ({"tensor_model_parallel_size": 3}, 2, ["tensor_model_parallel_size 3", "2 processes"]),
        ({"tensor_model_parallel_size": 4}, 4, ["tensor_model_parallel_size", "2 attention heads"]),
        ({"pipeline_model_parallel_size": 4}, 4, ["pipeline_model_parallel_size=4", "2 layers"]),
        ({"context_parallel_size": 4}, 4, ["2 attention heads", "set ulysses_degree_in_cp=2"]),
        ({"pipeline_model_parallel_size": 2, "batch_invariant": True}, 2, ["micro_batch_size 1"]),
        ({"lora_rank": 2, "lora_target_modules": "to_quary"}, 1, ["to_quary", "to_q"]),
        ({"lora_rank": 2, "lora_path": "/nowhere"}, 1, ["/nowhere"]),
        ({"sequence_parallel": True}, 1, ["sequence_parallel"]),
        ({"rollout_batch_size": 3}, 2, ["rollout_batch_size 3"]),
        ({"micro_batch_size": 3}, 1, ["micro_batch_size 3"]),
        ({"height": 40}, 1, ["40"]),
        ({"reward": "nonsuch"}, 1, ["nonsuch"]),
        ({"algorithm": "flow_grop"}, 1, ["flow_grop", "flow_grpo"]),
        ({"reward": "tests.faults.bad_rewards:absent"}, 1, ["absent"]),
        ({"model_path": "/nowhere"}, 1, ["/nowhere"]),
    ],
)
def test_settings_that_cannot_work_are_explained(model, tmp_path, flags, processes, words):
    text = failure(arguments(model, tmp_path, **flags), processes)
    assert all(word in text for word in words), text
    assert not (tmp_path / "runs").exists()


def test_an_unknown_flag_suggests_the_nearest(model, tmp_path):
    assert "--micro-batch-size" in failure([*arguments(model, tmp_path), "--micro-batchsize", "2"])


def test_an_empty_prompt_file(model, tmp_path):
    line = arguments(model, tmp_path)
    (tmp_path / "prompts.txt").write_text("\n\n")
    assert "prompts.txt" in failure(line)


def test_a_prompt_without_a_quoted_target_is_shown(model, tmp_path):
    line = arguments(model, tmp_path, reward="ocr")
    (tmp_path / "prompts.txt").write_text('a sign that says "CAT"\na sign that says nothing\n')
    assert "a sign that says nothing" in failure(line)


def test_a_reward_that_is_always_nan_stops_the_run(model, tmp_path):
    assert "every sample's reward failed" in failure(
        arguments(model, tmp_path, reward="tests.faults.bad_rewards:nan", eval_data="")
    )


def test_a_reward_that_is_nan_now_and_then_is_masked_and_counted(model, tmp_path):
    from tests.training.command_line import metrics

    line = arguments(model, tmp_path, reward="tests.faults.bad_rewards:sometimes_nan", train_iters=2)
    (outcome,) = launch(line)
    assert outcome.status == 0, outcome.errors
    rows = metrics(tmp_path)[1:]
    assert sum(row["reward/failed"] for row in rows) > 0
    assert all(0 <= row["train/reward_mean"] <= 1 for row in rows)


def test_resuming_with_other_settings_lists_them(model, tmp_path):
    saved = tmp_path / "runs/run/checkpoints"
    assert launch(arguments(model, tmp_path, train_iters=1))[0].status == 0
    before = sorted(saved.rglob("*"))
    text = failure(arguments(model, tmp_path, load=saved, lr=5e-4, train_iters=2))
    assert "lr" in text and "0.001" in text and "0.0005" in text
    assert sorted(saved.rglob("*")) == before


def test_a_save_folder_of_another_run_is_not_overwritten(model, tmp_path):
    saved = tmp_path / "saved"
    assert launch(arguments(model, tmp_path, train_iters=1, save=saved))[0].status == 0
    text = failure(arguments(model, tmp_path, train_iters=1, save=saved, run_name="other"))
    assert str(saved) in text


def test_diverged_training_stops_and_says_so(model, tmp_path):
    text = failure(arguments(model, tmp_path, lr=1e30, train_iters=10, clip_grad=0.0, eval_data=""))
    assert "diverged" in text


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fills_up_stops_the_run_and_keeps_the_earlier_checkpoint(
    model, tmp_path, small_disk, processes
):
    saved = small_disk / "checkpoints"
    text = failure(
        arguments(model, tmp_path, train_iters=20, save=saved, save_interval=1, eval_data=""), processes
    )
    assert str(saved) in text and "make room" in text
    latest = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert (saved / f"iter_{latest:07d}").is_dir()
    assert not list(saved.glob(".*"))
