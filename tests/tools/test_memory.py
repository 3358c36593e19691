"""`tools/memory.py` as its user runs it, beside what a run says of itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments

FLAGS = {"lora_rank": 4, "bf16": True, "use_distributed_optimizer": True, "reward": "brightness"}
KINDS = ("parameters", "gradients", "optimizer", "activations")


ROOT = Path(__file__).parents[2]


def call(*command: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def kinds(text: str) -> dict[str, float]:
    """GiB of each kind."""
    return {kind: float(re.search(rf"{kind} ([\d.e-]+)", text)[1]) for kind in KINDS}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model"))


def say(model: Path, *line: str) -> dict[str, float]:
    done = call("tools/memory.py", *line, "--model-path", model)
    assert done.returncode == 0, done.stderr
    return kinds(done.stdout)


def test_it_says_what_a_run_says(model, tmp_path):
    line = arguments(model, tmp_path, train_iters=1, **FLAGS)
    run = call("pretrain_rl.py", *line)
    assert run.returncode == 0, run.stderr
    reported = kinds(re.search(r"estimated: (.*?)memory: ", run.stdout.replace("\n", " "))[1])
    said = say(model, *line)
    assert said.pop("activations") == pytest.approx(reported.pop("activations"), rel=0.2)  # other prompts
    assert said == reported


def test_a_layout_without_its_processes_is_counted(model):
    flags = ["--use-distributed-optimizer", "--sequence-parallel", "--tensor-model-parallel-size", "2"]
    one, eight = say(model), say(model, "--processes", "8", *flags, "--pipeline-model-parallel-size", "2")
    assert eight["parameters"] < 0.5 * one["parameters"]
    assert eight["optimizer"] < 0.2 * one["optimizer"]


def test_a_layout_that_the_model_cannot_have_is_explained(model):
    flags = ["--processes", 3, "--tensor-model-parallel-size", 3]
    done = call("tools/memory.py", *flags, "--model-path", model)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
