"""Two whole runs on one host at the same time, each with an engine of its own."""

import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_omni.rewards.rules import brightness
from tests.rollout.vllm_omni.engine_process import PYTHON, ROOT
from tests.training.command_line import arguments, launch, metrics

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm_omni")]
ERROR = 1e-5
"""Of log-probabilities, against sampling in place."""
SEEDS = (1, 2)
TIMEOUT = 300
calls = count()


def brightness_in_step(images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
    """Runs that draw the same number of micro-batches get each one's rewards at the same time."""
    place, call = Path(os.environ["MEETING_PLACE"]), next(calls)
    (place / f"{call} of {os.environ['RUN']}").touch()
    while len(list(place.glob(f"{call} of *"))) < len(SEEDS):
        time.sleep(0.01)
    return brightness(images, metadata)


def start(line: list[str], folder: Path, **environment: str) -> subprocess.Popen:
    """As a user starts a run, with its log in `folder`/log."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [*torchrun, "pretrain_rl.py", *line],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=log,
            stderr=log,
        )


def finish(runs: list[subprocess.Popen]) -> list[int | None]:
    """Their statuses when all have ended or one has failed."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        statuses = [run.poll() for run in runs]
        if None not in statuses or any(statuses):
            break
        time.sleep(0.1)
    return statuses


@pytest.fixture
def alone(model_folder, tmp_path_factory) -> dict[int, list[dict[str, float]]]:
    """Metrics of each run by itself, which samples in place."""
    rows = {}
    for seed in SEEDS:
        folder = tmp_path_factory.mktemp("alone")
        (outcome,) = launch(arguments(model_folder, folder, seed=seed))
        assert outcome.status == 0, outcome.errors
        rows[seed] = metrics(folder)
    return rows


def test_each_of_two_runs_on_one_host_is_what_it_is_alone(model_folder, tmp_path, alone):
    folders = {seed: tmp_path / str(seed) for seed in SEEDS}
    (tmp_path / "meeting").mkdir()
    runs = []
    try:
        for seed, folder in folders.items():
            line = arguments(
                model_folder,
                folder,
                seed=seed,
                rollout_engine="vllm_omni",
                rollout_python=PYTHON,
                weight_transfer_bucket_mib=1,
                reward=f"{__name__}:{brightness_in_step.__name__}",
                reward_timeout=TIMEOUT,
            )
            runs.append(start(line, folder, MEETING_PLACE=str(tmp_path / "meeting"), RUN=str(seed)))
        statuses = finish(runs)
    finally:
        for run in runs:
            run.terminate()  # which torchrun passes on
            run.wait(60)
    assert statuses == [0, 0], "\n".join((folder / "log").read_text() for folder in folders.values())

    for seed, folder in folders.items():
        rows = metrics(folder)
        assert len(rows) == len(alone[seed]) == 4
        for row, expected in zip(rows[1:], alone[seed][1:], strict=True):
            assert row["consistency/log_prob_abs_diff_max"] < ERROR
            assert row["consistency/weight_version"] == expected["consistency/weight_version"]
            assert row["reward/failed"] == row["rollout/engine_restarts"] == 0
            assert row["train/reward_mean"] == pytest.approx(expected["train/reward_mean"], abs=1e-5)
            assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=2e-3)
