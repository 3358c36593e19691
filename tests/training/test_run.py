"""Whole runs: exact replay, layouts that agree, and outputs where the manual says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from megatron_omni.rollout.megatron.engine import MegatronEngine
from megatron_omni.sampling.seeds import derive_seed, generator
from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments, assert_close, launch, metrics, reproducible
from tools.checkpoint import convert


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory) -> Path:
    """A finished run on one process."""
    folder = tmp_path_factory.mktemp("reference")
    (outcome,) = launch(arguments(model, folder, save_interval=2, export_hf=True, true_cfg_scale=2.0))
    assert outcome.status == 0, outcome.errors
    return folder


def test_replay_of_the_samples_is_exact(reference):
    rows = metrics(reference)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["consistency/log_prob_abs_diff_max"] == 0
        assert row["consistency/log_prob_abs_diff_mean"] == 0
        assert row["consistency/ratio_abs_dev_max"] == 0
        assert row["consistency/weight_version"] == row["iteration"] - 1


def test_weights_move_and_every_metric_is_there(reference):
    row = metrics(reference)[-1]
    for name in (
        "train/reward_mean train/reward_std train/loss train/grad_norm train/clip_fraction "
        "train/advantage_zero_fraction train/learning_rate reward/failed time/rollout time/reward_wait "
        "memory/estimated_gib "
        "time/update time/weight_sync time/iteration throughput/samples_per_second memory/peak_gib "
        "eval/reward_mean eval/reward_sem"
    ).split():
        assert row[name] is not None, name
    assert row["train/grad_norm"] > 0
    assert row["reward/failed"] == 0
    evaluations = [row["eval/reward_mean"] for row in metrics(reference) if "eval/reward_mean" in row]
    assert len(evaluations) == 3
    assert len(set(evaluations)) == 3


def test_the_run_folder_holds_what_the_manual_names(reference):
    folder = reference / "runs" / "run"
    for path in (
        "config.yaml metrics.jsonl report.html samples/iter_0000000/000.png samples/iter_0000003/001.png "
        "checkpoints/latest_checkpointed_iteration.txt checkpoints/iter_0000002 checkpoints/iter_0000003"
    ).split():
        assert (folder / path).exists(), path
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"


def test_diffusers_opens_the_export_and_draws_what_the_evaluation_drew(reference):
    pipeline = QwenImagePipeline.from_pretrained(reference / "runs/run/hf")
    pipeline.set_progress_bar_config(disable=True)
    seed = derive_seed(0, "evaluation", 0)
    picture = pipeline(
        'a sign that says "CAT"',
        negative_prompt=" ",
        true_cfg_scale=2.0,
        height=32,
        width=48,
        num_inference_steps=4,
        generator=generator(seed, "initial"),
    ).images[0]
    drawn = Image.open(reference / "runs/run/samples/iter_0000003/000.png")
    difference = np.asarray(picture).astype(int) - np.asarray(drawn)
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, {}),
        (2, {"tensor_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"pipeline_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}),
        (2, {"context_parallel_size": 2}),
        (4, {"context_parallel_size": 2, "ulysses_degree_in_cp": 1, "pipeline_model_parallel_size": 2}),
    ],
)
def test_every_layout_gives_the_run_of_one_process(reference, model, tmp_path, processes, flags):
    outcomes = launch(arguments(model, tmp_path, true_cfg_scale=2.0, **flags), processes)
    assert [outcome.status for outcome in outcomes] == [0] * processes, outcomes
    rows = reproducible(metrics(tmp_path))
    for row in rows[1:]:
        assert row["consistency/log_prob_abs_diff_max"] == 0
    # Three updates at a high rate let rounding grow, but not far.
    assert_close(rows, reproducible(metrics(reference)), tolerance=2e-3)


class InexactEngine(MegatronEngine):
    """Its log-probabilities are as far off as another engine's could be."""

    def draw(self, micro_batches):
        for trajectory in super().draw(micro_batches):
            error = torch.randn(trajectory.log_probs.shape, generator=generator(0, "error")) / 10
            yield replace(trajectory, log_probs=trajectory.log_probs + error, old_log_probs=None)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, {}),
        (1, {"updates_per_iteration": 4, "lora_rank": 2, "kl_coefficient": 0.1}),
        (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ],
)
def test_an_engines_inexact_log_probabilities_are_measured_and_change_nothing(
    model, tmp_path, processes, flags
):
    flags = {"updates_per_iteration": 2, "train_iters": 2, "clip_range": 1e-6} | flags
    exact, inexact = [], []
    for rows, engine in ((exact, "megatron"), (inexact, f"{__name__}:InexactEngine")):
        folder = tmp_path / str(len(exact))
        outcomes = launch(arguments(model, folder, rollout_engine=engine, **flags), processes)
        assert [outcome.status for outcome in outcomes] == [0] * processes, outcomes
        rows += reproducible(metrics(folder))
    for one, other in zip(exact[1:], inexact[1:], strict=True):
        assert one["train/clip_fraction"] > 0  # of the later updates: ratios do count
        assert one.pop("consistency/log_prob_abs_diff_max") == 0
        assert 0.05 < other.pop("consistency/log_prob_abs_diff_max") < 1
        for name in ("consistency/log_prob_abs_diff_mean", "consistency/ratio_abs_dev_max"):
            assert one.pop(name) == 0 < other.pop(name)
    assert exact == inexact


@pytest.mark.parametrize("flags", [{"recompute_granularity": "full"}, {"recompute_granularity": "selective"}])
def test_recomputation_changes_no_bit(reference, model, tmp_path, flags):
    (outcome,) = launch(arguments(model, tmp_path, true_cfg_scale=2.0, **flags))
    assert outcome.status == 0, outcome.errors
    assert reproducible(metrics(tmp_path)) == reproducible(metrics(reference))


def test_bfloat16_with_master_weights_and_a_reference_policy(model, tmp_path):
    (outcome,) = launch(arguments(model, tmp_path, bf16=True, kl_coefficient=0.1, updates_per_iteration=2))
    assert outcome.status == 0, outcome.errors
    rows = metrics(tmp_path)
    assert rows[1]["consistency/log_prob_abs_diff_max"] == 0
    assert rows[-1]["train/kl"] > 0


@pytest.fixture(scope="module")
def release(reference, tmp_path_factory) -> Path:
    """Trained weights as a `release` checkpoint."""
    folder = tmp_path_factory.mktemp("release") / "out"
    source = reference / "runs/run/hf"
    assert convert.main(["hf-to-megatron", "--load-dir", str(source), "--save-dir", str(folder)]) == 0
    return folder


def test_the_reference_of_a_run_from_a_release_is_that_release(model, release, tmp_path):
    flags = {"kl_coefficient": 0.1, "load": release, "train_iters": 1}
    (refused,) = launch(arguments(model, tmp_path, **flags))
    assert refused.status == 2 and f"--ref-load {release}" in refused.errors
    (refused,) = launch(arguments(model, tmp_path, **flags, ref_load=model))
    assert refused.status == 2 and "holds no release/" in refused.errors
    (outcome,) = launch(arguments(model, tmp_path, **flags, ref_load=release))
    assert outcome.status == 0, outcome.errors
    assert metrics(tmp_path)[-1]["train/kl"] == 0


def test_batch_invariant_rows_make_the_run_independent_of_the_micro_batch(model, tmp_path):
    flags = {"batch_invariant": True, "true_cfg_scale": 2.0, "train_iters": 1}
    runs = []
    for size in (1, 4):
        folder = tmp_path / str(size)
        (outcome,) = launch(arguments(model, folder, micro_batch_size=size, **flags))
        assert outcome.status == 0, outcome.errors
        runs.append(reproducible(metrics(folder)))
    assert runs[0][0] == runs[1][0]
    sampled = ("train/reward_mean", "train/reward_std", "consistency/log_prob_abs_diff_max")
    assert [runs[0][1][name] for name in sampled] == [runs[1][1][name] for name in sampled]


@pytest.mark.parametrize(
    ("processes", "flags"),
    [(1, {}), (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})],
)
def test_adapters_train_resume_and_leave_the_model_alone(model, tmp_path, processes, flags):
    lora = {"lora_rank": 2, "kl_coefficient": 0.1, "export_hf": True, "save_interval": 2} | flags
    outcomes = launch(arguments(model, tmp_path / "whole", **lora), processes)
    assert [outcome.status for outcome in outcomes] == [0] * processes, outcomes
    rows = metrics(tmp_path / "whole")
    assert rows[1]["consistency/log_prob_abs_diff_max"] == 0
    assert rows[1]["train/kl"] == 0 < rows[-1]["train/kl"]  # the reference is the model without adapters

    for iterations in (2, 3):
        load = {"load": tmp_path / "parts/runs/run/checkpoints", "train_iters": iterations}
        outcomes = launch(arguments(model, tmp_path / "parts", **(lora | load)), processes)
        assert [outcome.status for outcome in outcomes] == [0] * processes, outcomes
    assert reproducible(metrics(tmp_path / "parts")) == reproducible(rows)

    folder = tmp_path / "whole/runs/run"
    merged, adapted = (QwenImagePipeline.from_pretrained(path) for path in (folder / "hf", model))
    adapted.load_lora_weights(folder / "adapter")
    pictures = [draw(pipeline) for pipeline in (merged, adapted)]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
    adapted.unload_lora_weights()
    assert np.abs(pictures[0] - draw(adapted)).max() > 1


def draw(pipeline: QwenImagePipeline) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    seeded = torch.Generator().manual_seed(0)
    picture = pipeline('a sign that says "CAT"', height=32, width=48, num_inference_steps=4, generator=seeded)
    return np.asarray(picture.images[0]).astype(int)


def test_a_second_run_of_the_same_name_moves_the_first_aside(model, tmp_path):
    line = arguments(model, tmp_path, train_iters=1)
    assert launch(line)[0].status == launch(line)[0].status == 0
    assert metrics(tmp_path, "run-1")[0] == metrics(tmp_path, "run")[0] | {
        "time/eval": metrics(tmp_path, "run-1")[0]["time/eval"]
    }
    assert (tmp_path / "runs/run-1/checkpoints/iter_0000001").is_dir()


def test_supervised_training_learns_the_pictures(model, tmp_path):
    rows = []
    for number in range(4):
        Image.new("RGB", (48, 32), (40 * number, 20, 200)).save(tmp_path / f"{number}.png")
        rows.append({"prompt": f"colour {number}", "image": f"{number}.png"})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = arguments(
        model,
        tmp_path,
        algorithm="flow_matching",
        rollout_engine="images",
        train_data=data,
        rollout_batch_size=8,
        n_samples_per_prompt=1,
        train_iters=60,
        eval_interval=60,
        lr=3e-3,
    )
    (outcome,) = launch(line)
    assert outcome.status == 0, outcome.errors
    losses = [row["train/loss"] for row in metrics(tmp_path)[1:]]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
