"""Checkpoints of a run in training."""

from pathlib import Path

import pytest
import torch

from megatron_omni.checkpoint.distributed import Checkpointer, latest_iteration
from tests.checkpoint import toy_megatron as toy
from tests.distributed import run_distributed

STATE = {"consumed_prompts": 12, "order": [3, 1, 2], "epoch": 0.5}


def open_run(tensor_parallel: int, bf16: bool, dropout: float):
    config = toy.config(tensor_parallel, bf16)
    run = toy.build_training(config, dropout)
    return run, Checkpointer(run.model, run.optimizer, run.scheduler, config)


def save(folder: Path, tensor_parallel: int, bf16: bool = False, dropout: float = 0.0):
    """Saves after three of six iterations. Returns the later gradient norms and the last weights."""
    run, checkpointer = open_run(tensor_parallel, bf16, dropout)
    toy.train(run, range(3))
    checkpointer.save(folder, 3, STATE)
    return toy.train(run, range(3, 6)), toy.weights(run)


def resume(folder: Path, tensor_parallel: int, bf16: bool = False, dropout: float = 0.0):
    run, checkpointer = open_run(tensor_parallel, bf16, dropout)
    toy.train(run, range(10, 12))  # whatever was there before is overwritten
    resumed = checkpointer.load(folder)
    assert (resumed.iteration, resumed.state) == (3, STATE)
    return resumed.same_layout, toy.train(run, range(3, 6)), toy.weights(run)


@pytest.mark.parametrize("bf16", [False, True])
def test_same_layout_resumes_bit_equal(tmp_path, bf16):
    """Weights, optimizer with its step, learning rate and the generators that dropout draws from."""
    saved = run_distributed(save, 4, tmp_path, 2, bf16, 0.1)
    resumed = run_distributed(resume, 4, tmp_path, 2, bf16, 0.1)
    for (norms, weights), (same_layout, norms_after, weights_after) in zip(saved, resumed, strict=True):
        assert same_layout
        assert norms_after == norms
        assert all(torch.equal(weights_after[name], weights[name]) for name in weights)


@pytest.mark.parametrize("world_size, tensor_parallel", [(1, 1), (2, 1), (4, 4), (4, 2)])
@pytest.mark.parametrize("bf16", [False, True])
def test_other_layouts_resume_within_float_error(saved_at_tp2, bf16, world_size, tensor_parallel):
    folder, norms, weights = saved_at_tp2(bf16)
    tolerance = 2e-2 if bf16 else 1e-5
    for same_layout, norms_after, weights_after in run_distributed(
        resume, world_size, folder, tensor_parallel, bf16
    ):
        assert not same_layout
        assert norms_after == pytest.approx(norms, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(weights_after[name], weight, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def saved_at_tp2(tmp_path_factory):
    made = {}

    def get(bf16: bool):
        if bf16 not in made:
            folder = tmp_path_factory.mktemp("checkpoints")
            norms, weights = run_distributed(save, 2, folder, 2, bf16)[0]
            made[bf16] = folder, norms, weights
        return made[bf16]

    return get


def test_folder_is_as_megatron_users_know_it(saved_at_tp2):
    folder, _, _ = saved_at_tp2(False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert {"common.pt", "metadata.json", ".metadata", "config.yaml"} <= {
        path.name for path in (folder / "iter_0000003").iterdir()
    }
    assert latest_iteration(folder) == 3


def distributed_optimizer_run(folder: Path, tensor_parallel: int, is_saving: bool):
    config = toy.config(tensor_parallel, bf16=True)
    run = toy.build_distributed_optimizer(config)
    checkpointer = Checkpointer(run.model, run.optimizer, run.scheduler, config)
    if is_saving:
        toy.train(run, range(3))
        checkpointer.save(folder, 3, STATE)
    else:
        checkpointer.load(folder)
    return toy.train(run, range(3, 6)), toy.weights(run)


@pytest.mark.parametrize("world_size, tensor_parallel", [(4, 2), (2, 1)])
def test_distributed_optimizer_resumes(tmp_path, world_size, tensor_parallel):
    norms, weights = run_distributed(distributed_optimizer_run, 4, tmp_path, 2, True)[0]
    same = (world_size, tensor_parallel) == (4, 2)
    for norms_after, weights_after in run_distributed(
        distributed_optimizer_run, world_size, tmp_path, tensor_parallel, False
    ):
        assert norms_after == (norms if same else pytest.approx(norms, rel=2e-2))
        for name, weight in weights.items():
            tolerance = 0 if same else 2e-2
            torch.testing.assert_close(weights_after[name], weight, rtol=tolerance, atol=tolerance)


def load_nothing(folder: Path):
    _, checkpointer = open_run(1, False, 0.0)
    return checkpointer.load(folder)


def test_a_folder_without_checkpoints_resumes_nothing(tmp_path):
    assert run_distributed(load_nothing, 1, tmp_path / "none") == [None]


def save_twice(folder: Path) -> list[str]:
    run, checkpointer = open_run(2, False, 0.0)
    checkpointer.save(folder, 3, {"first": True})
    toy.train(run, range(1))
    checkpointer.save(folder, 3, STATE)
    checkpointer.save(folder, 4, STATE)
    return sorted(path.name for path in folder.iterdir())


def test_an_iteration_saved_again_replaces_the_older_one(tmp_path):
    for names in run_distributed(save_twice, 2, tmp_path):
        assert names == ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]
    assert '"first"' not in (tmp_path / "iter_0000003" / "record.json").read_text()
