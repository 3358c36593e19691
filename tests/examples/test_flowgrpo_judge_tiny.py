"""The tiny example with a judge: real training, rollout engine and judge, each in its own processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.rollout.vllm_omni.engine_process import PYTHON, ended

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm_omni")]
ROOT = Path(__file__).parents[2]
ERROR = 1e-4
ITERATIONS = 3
TIMEOUT = 600


def start(folder: Path, *flags: str) -> subprocess.Popen:
    command = ["bash", "examples/qwen_image/flowgrpo_judge_tiny.sh", "--output-dir", folder, *flags]
    environment = os.environ | {"VENV": sys.prefix, "ROLLOUT_VENV": str(PYTHON.parents[1])}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def test_it_trains_on_what_the_judge_says_and_samples_what_it_trains(tmp_path):
    script = start(tmp_path, "--train-iters", str(ITERATIONS))
    assert script.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
    lines = (tmp_path / "flowgrpo_judge_tiny/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    for version, row in enumerate(rows):
        assert row["consistency/log_prob_abs_diff_max"] <= ERROR
        assert row["consistency/weight_version"] == version
        assert row["reward/failed"] == row["rollout/engine_restarts"] == 0
        assert 0 <= row["reward/judge_ocr_mean"] <= 1
        assert row["train/reward_std"] > 0 and row["train/grad_norm"] > 0


def test_whatever_it_started_ends_with_it(tmp_path):
    script = start(tmp_path)
    try:
        deadline = time.monotonic() + TIMEOUT
        while "iteration 1/" not in (tmp_path / "log").read_text():
            assert script.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        family = psutil.Process(script.pid).children(recursive=True)
        names = " ".join(" ".join(process.cmdline()) for process in family)
        assert all(part in names for part in ("vllm serve", "pretrain_rl.py", "vLLM-Omni::DiffusionWorker"))
    finally:
        script.terminate()
        status = script.wait(60)
    assert status != 0
    assert ended(family)
