"""Killed with SIGKILL at any moment and resumed, a run gives the metrics of one that was left alone."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from diffusers import QwenImageTransformer2DModel

from tests.distributed import run_distributed
from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments, assert_close, launch, main, metrics, reproducible

ITERATIONS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model"))


def resumable(model: Path, folder: Path, **flags) -> list[str]:
    """Saves at every iteration and goes on from there; warm-up makes the rate depend on the step count."""
    return arguments(
        model,
        folder,
        **{
            "train_iters": ITERATIONS,
            "updates_per_iteration": 2,
            "lr_warmup_iters": 3,
            "lr_decay_iters": ITERATIONS,
            "save_interval": 1,
            "load": folder / "runs/run/checkpoints",
            "eval_samples": 2,
            **flags,
        },
    )


def killed_main(line: list[str], log: Path, rows: int, delay: float, victim: int):
    """`pretrain_rl.py`; rank `victim` is killed `delay` seconds after metrics.jsonl has so many rows."""

    def kill() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < rows:
            time.sleep(0.005)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        threading.Thread(target=kill, daemon=True).start()
    return main(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, flags",
    [
        (1, {}),
        (2, {"use_distributed_optimizer": True}),
        (2, {"async_save": True, "keep_last_checkpoints": 1, "save_hf": True}),
    ],
    ids=["alone", "two", "two, asynchronous"],
)
def test_metrics_are_bit_equal_after_kills(model, tmp_path, processes, flags):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert {outcome.status for outcome in launch(resumable(model, whole, **flags), processes)} == {0}

    line, log = resumable(model, cut, **flags), cut / "runs/run/metrics.jsonl"
    # In the middle of saving, between two iterations, and while sampling.
    for rows, delay in ((3, 0.02), (4, 0.3), (5, 0.0)):
        victim = processes - 1
        outcomes = run_distributed(
            killed_main, processes, line, log, rows, delay, victim, timeout=120, dying=[victim]
        )
        assert outcomes[victim] is None
        assert all(outcome.status == 2 for outcome in outcomes[:victim]), outcomes
    assert {outcome.status for outcome in launch(line, processes)} == {0}

    assert reproducible(metrics(cut)) == reproducible(metrics(whole))
    assert not list((cut / "runs/run/checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_moves_from_layout_to_layout(model, tmp_path):
    """Each iteration at another layout, as on one process. (A second update could clip by a rounding.)"""
    still, moving, once = tmp_path / "still", tmp_path / "moving", {"updates_per_iteration": 1}
    assert launch(resumable(model, still, **once))[0].status == 0
    layouts = [
        {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True, "async_save": True},
        {"pipeline_model_parallel_size": 2},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"context_parallel_size": 2, "use_distributed_optimizer": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ]
    for iterations, flags in enumerate(layouts, start=1):
        outcomes = launch(resumable(model, moving, **once, **flags, train_iters=iterations), 2)
        assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    # An evaluation ends every leg.
    trained = [
        [
            {name: row[name] for name in row if not name.startswith("eval/")}
            for row in reproducible(metrics(each))
        ]
        for each in (moving, still)
    ]
    assert_close(*trained, tolerance=2e-3)


def test_the_best_and_the_last_checkpoint_open_in_diffusers(model, tmp_path):
    line = arguments(
        model,
        tmp_path,
        train_iters=3,
        save_interval=1,
        eval_interval=1,
        keep_last_checkpoints=1,
        save_hf=True,
    )
    assert launch(line)[0].status == 0
    rewards = {row["iteration"]: row["eval/reward_mean"] for row in metrics(tmp_path)[1:]}
    best = max(rewards, key=rewards.get)
    saved = tmp_path / "runs/run/checkpoints"
    assert (saved / "best").readlink() == Path(f"iter_{best:07d}")
    assert {path.name for path in saved.glob("iter_*")} == {f"iter_{best:07d}", "iter_0000003"}
    for name in ("best", "iter_0000003"):
        assert QwenImageTransformer2DModel.from_pretrained(saved / name / "hf/transformer")
