"""Killed with SIGKILL at any moment and resumed, a run gives the metrics of one that was left alone."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments, launch, main, metrics, reproducible

ITERATIONS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model"))


def resumable(model: Path, folder: Path) -> list[str]:
    """Saves at every iteration and goes on from there; warm-up makes the rate depend on the step count."""
    return arguments(
        model,
        folder,
        train_iters=ITERATIONS,
        updates_per_iteration=2,
        lr_warmup_iters=3,
        save_interval=1,
        load=folder / "runs/run/checkpoints",
        eval_samples=2,
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
@pytest.mark.parametrize("processes", [1, 2])
def test_metrics_are_bit_equal_after_kills(model, tmp_path, processes):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert {outcome.status for outcome in launch(resumable(model, whole), processes)} == {0}

    line, log = resumable(model, cut), cut / "runs/run/metrics.jsonl"
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
