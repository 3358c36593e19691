"""Checkpoints of a run in training."""

import threading
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_omni.checkpoint import distributed
from megatron_omni.checkpoint.distributed import Checkpointer
from megatron_omni.checkpoint.folder import latest_checkpoint
from megatron_omni.checkpoint.shards import write_shards
from megatron_omni.checkpoint.training_state import master_shards, model_shards
from tests.checkpoint import toy_megatron as toy
from tests.distributed import run_distributed

STATE = {"consumed_prompts": 12, "order": [3, 1, 2], "epoch": 0.5}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
OFFLOADED = DISTRIBUTED | {"optimizer_cpu_offload": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PIPELINE | {"num_virtual_stages_per_pipeline_rank": 2}
CONTEXT = {"context_parallel_size": 2}


def open_run(tensor_parallel: int, bf16: bool = False, dropout: float = 0.0, **flags):
    config = toy.config(tensor_parallel, bf16, **flags)
    run = toy.build_training(config, dropout, layers=4)
    return run, Checkpointer(run.chunks, run.optimizer, run.scheduler, config)


def save(folder: Path, tensor_parallel: int, bf16: bool, dropout: float, flags: dict):
    """Saves after three of six iterations. Returns the later gradient norms and the last weights."""
    run, checkpointer = open_run(tensor_parallel, bf16, dropout, **flags)
    toy.train(run, range(3))
    run.gather_parameters()
    checkpointer.save(folder, 3, STATE)
    norms = toy.train(run, range(3, 6))
    checkpointer.finish()
    return norms, toy.weights(run)


def resume(folder: Path, tensor_parallel: int, bf16: bool, dropout: float, flags: dict):
    run, checkpointer = open_run(tensor_parallel, bf16, dropout, **flags)
    toy.train(run, range(10, 12))  # whatever was there before is overwritten
    resumed = checkpointer.load(folder)
    assert (resumed.name, resumed.iteration, resumed.state) == ("iter_0000003", 3, STATE)
    return resumed.same_layout, toy.train(run, range(3, 6)), toy.weights(run)


@pytest.mark.parametrize(
    "bf16, tensor_parallel, flags",
    [
        (False, 2, {}),
        (True, 2, {}),
        (True, 2, {"async_save": True}),
        (False, 2, DISTRIBUTED),
        (True, 2, OVERLAPPED | {"async_save": True}),
        (True, 1, OFFLOADED),
        (True, 1, INTERLEAVED | DISTRIBUTED),
        (False, 2, CONTEXT),
    ],
    ids=str,
)
def test_same_layout_resumes_bit_equal(tmp_path, bf16, tensor_parallel, flags):
    """Weights, optimizer with its step, learning rate and the generators that dropout draws from."""
    saved = run_distributed(save, 4, tmp_path, tensor_parallel, bf16, 0.1, flags)
    resumed = run_distributed(resume, 4, tmp_path, tensor_parallel, bf16, 0.1, flags)
    for (norms, weights), (same_layout, norms_after, weights_after) in zip(saved, resumed, strict=True):
        assert same_layout
        assert norms_after == norms
        assert all(torch.equal(weights_after[name], weights[name]) for name in weights)


# World size, tensor parallelism and other settings: data parallelism is what is left.
LAYOUTS = {
    "tp2 dp2": (4, 2, {}),
    "dp2 distributed": (2, 1, DISTRIBUTED),
    "tp2 pp2 distributed": (4, 2, PIPELINE | DISTRIBUTED),
    "pp2x2 dp2": (4, 1, INTERLEAVED),
    "alone": (1, 1, {}),
    "tp4": (4, 4, {}),
    "dp4 offloaded": (4, 1, OFFLOADED),
    "cp2 tp2 overlapped": (4, 2, CONTEXT | OVERLAPPED),
}


@pytest.mark.parametrize(
    "source, to",
    [
        ("tp2 dp2", "dp4 offloaded"),
        ("tp2 dp2", "tp2 pp2 distributed"),
        ("tp2 dp2", "tp4"),
        ("dp2 distributed", "tp2 dp2"),
        ("dp2 distributed", "cp2 tp2 overlapped"),
        ("tp2 pp2 distributed", "pp2x2 dp2"),
        ("tp2 pp2 distributed", "alone"),
        ("pp2x2 dp2", "dp2 distributed"),
        ("cp2 tp2 overlapped", "pp2x2 dp2"),
        ("dp4 offloaded", "tp2 dp2"),
    ],
)
def test_other_layouts_resume_within_float_error(saved_at, source, to):
    bf16 = "offloaded" in source + to
    folder, norms, weights = saved_at(source, bf16)
    tolerance = 2e-2 if bf16 else 1e-5
    world_size, tensor_parallel, flags = LAYOUTS[to]
    for same_layout, norms_after, weights_after in run_distributed(
        resume, world_size, folder, tensor_parallel, bf16, 0.0, flags
    ):
        assert not same_layout
        assert norms_after == pytest.approx(norms, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(weights_after[name], weight, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def saved_at(tmp_path_factory):
    made = {}

    def get(layout: str, bf16: bool):
        if (layout, bf16) not in made:
            folder = tmp_path_factory.mktemp("checkpoints")
            world_size, tensor_parallel, flags = LAYOUTS[layout]
            norms, weights = run_distributed(save, world_size, folder, tensor_parallel, bf16, 0.0, flags)[0]
            made[layout, bf16] = folder, norms, weights
        return made[layout, bf16]

    return get


def test_folder_is_as_megatron_users_know_it(saved_at):
    folder, _, _ = saved_at("tp2 dp2", False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert {"common.pt", "metadata.json", ".metadata", "config.yaml"} <= {
        path.name for path in (folder / "iter_0000003").iterdir()
    }
    assert latest_checkpoint(folder) == "iter_0000003"


def read_with_megatron(checkpoint: Path) -> dict[str, torch.Tensor]:
    run, _ = open_run(1)
    toy.train(run, range(3))
    weights = parameters(run)
    loaded = dist_checkpointing.load_plain_tensors(str(checkpoint))
    others = ("optimizer.", "random.", "iteration")
    assert weights.keys() == {name for name in loaded if not name.startswith(others)}
    return {name: (loaded[name], weight) for name, weight in weights.items()}


def test_megatrons_own_reader_opens_a_checkpoint_of_several_stages(saved_at):
    folder, _, _ = saved_at("tp2 pp2 distributed", False)
    (tensors,) = run_distributed(read_with_megatron, 1, folder / "iter_0000003")
    for read, trained in tensors.values():
        torch.testing.assert_close(read, trained, rtol=1e-5, atol=1e-5)


def load_nothing(folder: Path):
    _, checkpointer = open_run(1)
    return checkpointer.load(folder)


def test_a_folder_without_checkpoints_resumes_nothing(tmp_path):
    assert run_distributed(load_nothing, 1, tmp_path / "none") == [None]


def save_while_training(folder: Path):
    """Trains three iterations while the checkpoint is not written yet."""
    writing, trained = threading.Event(), threading.Event()

    def write_late(*arguments) -> None:
        writing.set()
        assert trained.wait(60)
        write_shards(*arguments)

    distributed.write_shards = write_late
    run, checkpointer = open_run(1, True, async_save=True, **OVERLAPPED)
    toy.train(run, range(3))
    run.gather_parameters()
    checkpointer.save(folder, 3, STATE)
    assert writing.wait(60)
    norms = toy.train(run, range(3, 6))
    checkpointer.poll()  # goes on: the save has not ended
    assert latest_checkpoint(folder) is None
    trained.set()
    checkpointer.finish()
    return norms, toy.weights(run)


def test_training_goes_on_during_an_asynchronous_save_and_leaves_it_alone(tmp_path):
    saved = run_distributed(save_while_training, 2, tmp_path)
    resumed = run_distributed(resume, 2, tmp_path, 1, True, 0.0, OVERLAPPED)
    for (norms, weights), (_, norms_after, weights_after) in zip(saved, resumed, strict=True):
        assert norms_after == norms
        assert all(torch.equal(weights_after[name], weights[name]) for name in weights)


def save_twice(folder: Path) -> list[str]:
    run, checkpointer = open_run(2)
    checkpointer.save(folder, 3, {"first": True})
    toy.train(run, range(1))
    checkpointer.save(folder, 3, STATE)
    checkpointer.save(folder, 4, STATE)
    return sorted(path.name for path in folder.iterdir())


def test_an_iteration_saved_again_replaces_the_older_one(tmp_path):
    for names in run_distributed(save_twice, 2, tmp_path):
        assert names == ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]
    assert '"first"' not in (tmp_path / "iter_0000003" / "record.json").read_text()


def save_untrained(folder: Path, flags: dict):
    run, checkpointer = open_run(1, True, **flags)
    checkpointer.save(folder, 0, STATE)
    return toy.train(run, range(3))


def resume_untrained(folder: Path, flags: dict):
    run, checkpointer = open_run(1, True, **flags)
    toy.train(run, range(2))
    assert checkpointer.load(folder).state == STATE
    return toy.train(run, range(3))


@pytest.mark.parametrize("flags", [{}, DISTRIBUTED, OFFLOADED], ids=["plain", "distributed", "offloaded"])
def test_a_checkpoint_from_before_the_first_step_is_as_good_as_any(tmp_path, flags):
    saved = run_distributed(save_untrained, 2, tmp_path, flags)
    assert run_distributed(resume_untrained, 2, tmp_path, flags) == saved


def save_with_rewards(folder: Path, flags: dict, rewards: dict[int, float | None]) -> list[str]:
    """What is there after each save, with what `best` links to."""
    _, checkpointer = open_run(1, **flags)
    checkpointer.load(folder)
    names = []
    for iteration, reward in rewards.items():
        checkpointer.save(folder, iteration, STATE, reward, lambda hf: hf.mkdir())
        checkpointer.finish()
        best = (folder / "best").readlink().name if (folder / "best").is_symlink() else ""
        there = sorted(path.name.removeprefix("iter_000000") for path in folder.glob("iter_*"))
        names.append(f"{' '.join(there)} best {best.removeprefix('iter_000000')}")
    return names


@pytest.mark.parametrize("flags", [{}, {"async_save": True}], ids=["waiting", "asynchronous"])
def test_the_last_and_the_best_checkpoints_are_kept_across_resumes(tmp_path, flags):
    flags = flags | {"keep_last_checkpoints": 2}
    (names,) = run_distributed(save_with_rewards, 1, tmp_path, flags, {1: None, 2: 0.5, 3: 0.4, 4: None})
    assert names == ["1 best ", "1 2 best 2", "2 3 best 2", "2 3 4 best 2"]
    (names,) = run_distributed(save_with_rewards, 1, tmp_path, flags, {5: 0.5, 6: 0.6, 7: 0.1, 8: 0.6})
    assert names == ["2 4 5 best 2", "5 6 best 6", "6 7 best 6", "6 7 8 best 6"]
    assert (tmp_path / "best" / "hf").is_dir() and not list(tmp_path.glob(".*"))


def test_without_a_number_all_checkpoints_are_kept(tmp_path):
    (names,) = run_distributed(save_with_rewards, 1, tmp_path, {}, {1: 0.1, 2: 0.2, 3: 0.3})
    assert names[-1] == "1 2 3 best 3"


def save_release(folder: Path) -> dict[str, torch.Tensor]:
    run, _ = open_run(1)
    toy.train(run, range(2))
    write_shards(model_shards(run.chunks), folder / "release")
    (folder / "release" / "record.json").write_text('{"model": "qwen_image", "files": {}}')
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return parameters(run)


def parameters(run) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in run.chunks[0].module.named_parameters()}


def start_from_release(folder: Path, bf16: bool, flags: dict):
    """The masters, the weights, and how training goes on."""
    run, checkpointer = open_run(1, bf16, **flags)
    resumed = checkpointer.load(folder)
    assert (resumed.name, resumed.iteration, resumed.state) == ("release", 0, {})
    shards = master_shards(run.chunks, run.optimizer) if bf16 else model_shards(run.chunks)
    tensors = {name: [box.tensor.clone() for box in part.boxes] for name, part in shards.items()}
    return tensors, parameters(run), toy.train(run, range(2))


@pytest.mark.parametrize("flags", [{}, DISTRIBUTED, OFFLOADED], ids=["plain", "distributed", "offloaded"])
def test_a_release_fills_weights_and_their_masters_exactly(release, flags):
    folder, whole = release
    masters, weights, norms = run_distributed(start_from_release, 1, folder, True, flags)[0]
    assert masters.keys() == weights.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part.flatten() for part in masters[name]]), tensor.flatten())
        assert torch.equal(weights[name], tensor.bfloat16())
    assert norms[0] > 0


def test_a_release_starts_a_float32_run_on_two_stages(release):
    folder, whole = release
    ranks = run_distributed(start_from_release, 2, folder, False, PIPELINE)
    weights = {name: tensor for _, own, _ in ranks for name, tensor in own.items()}
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    return folder, run_distributed(save_release, 1, folder)[0]
