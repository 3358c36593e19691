"""The tiny example with a judge: real training, rollout engine and judge, each in its own processes."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.rollout.vllm_omni.engine_process import PYTHON, ended

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm_omni")]
ROOT = Path(__file__).parents[2]
ERROR = 1e-4
ITERATIONS = 3
TIMEOUT = 600
WHAT_RUNS = ("vllm serve", "pretrain_rl.py", "vLLM-Omni::DiffusionWorker")
SCRIPTED_JUDGE = f"""#!{sys.executable}
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from tests.rewards.judge_server import JudgeServer, Reply
JudgeServer(lambda request: Reply('{{"text": "A"}}'), int(sys.argv[sys.argv.index("--port") + 1]))
threading.Event().wait()
"""


def with_scripted_judge(folder: Path) -> Path:
    """The rollout environment, but for `vllm`."""
    real = PYTHON.parents[1]
    (folder / "bin").mkdir(parents=True)
    for path in [*real.iterdir(), *(real / "bin").iterdir()]:
        if path.name not in ("bin", "vllm"):
            (folder / path.relative_to(real)).symlink_to(path)
    (folder / "bin/vllm").write_text(SCRIPTED_JUDGE)
    (folder / "bin/vllm").chmod(0o755)
    return folder


class Example:
    """The script, and every process that it was seen to have below it."""

    def __init__(self, folder: Path, *flags: str, rollout_venv: Path = PYTHON.parents[1]):
        command = ["bash", "examples/qwen_image/flowgrpo_judge_tiny.sh", "--output-dir", folder, *flags]
        environment = os.environ | {"VENV": sys.prefix, "ROLLOUT_VENV": str(rollout_venv)}
        self.output = folder / "log"
        with self.output.open("w") as log:
            self.script = psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.deadline = time.monotonic() + TIMEOUT
        self.family: set[psutil.Process] = set()
        self.lines: set[str] = set()

    def watch(self) -> None:
        assert time.monotonic() < self.deadline, self.said()
        for process in self.script.children(recursive=True):
            self.family.add(process)
            with suppress(psutil.NoSuchProcess):
                self.lines.add(" ".join(process.cmdline()))
        time.sleep(0.2)

    def said(self) -> str:
        return self.output.read_text()

    def leaves_nothing(self) -> bool:
        """Of all that should have run."""
        assert all(any(part in line for line in self.lines) for part in WHAT_RUNS), self.lines
        return ended(list(self.family))


def test_it_trains_on_what_the_judge_says_and_samples_what_it_trains(tmp_path):
    example = Example(tmp_path, "--train-iters", str(ITERATIONS))
    while example.script.poll() is None:
        example.watch()
    assert example.script.returncode == 0, example.said()
    assert example.leaves_nothing()
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
    """In the middle of an iteration. The judge is a scripted one, which starts faster."""
    example = Example(tmp_path, rollout_venv=with_scripted_judge(tmp_path / "venv"))
    try:
        while "iteration 1/" not in example.said():
            assert example.script.poll() is None, example.said()
            example.watch()
    finally:
        example.script.terminate()
        status = example.script.wait(60)
    assert status != 0
    assert example.leaves_nothing()
