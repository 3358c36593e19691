"""`tools/memory.py` as its user runs it, beside what a run says of itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments

FLAGS = {"lora_rank": 4, "bf16": True, "use_distributed_optimizer": True, "reward": "brightness"}
KINDS = ("parameters", "gradients", "optimizer", "activations")


def kinds(text: str) -> dict[str, float]:
    """GiB of each kind."""
    return {kind: float(re.search(rf"{kind} ([\d.e-]+)", text)[1]) for kind in KINDS}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model"))


def say(model: Path, *line: str) -> dict[str, float]:
    settings = [*line, "--model-path", str(model)]
    command = [sys.executable, "tools/memory.py", *settings]
    return kinds(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_it_says_what_a_run_says(model, tmp_path):
    line = arguments(model, tmp_path, train_iters=1, **FLAGS)
    command = [sys.executable, "pretrain_rl.py", *line]
    run = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    reported = kinds(re.search(r"estimated: (.*?)memory: ", run.replace("\n", " "))[1])
    said = say(model, *line)
    assert said.pop("activations") == pytest.approx(reported.pop("activations"), rel=0.2)  # other prompts
    assert said == reported


def test_a_layout_without_its_processes_is_counted(model):
    flags = ["--use-distributed-optimizer", "--sequence-parallel", "--tensor-model-parallel-size", "2"]
    one, eight = say(model), say(model, "--processes", "8", *flags, "--pipeline-model-parallel-size", "2")
    assert eight["parameters"] < 0.5 * one["parameters"]
    assert eight["optimizer"] < 0.2 * one["optimizer"]


def test_a_layout_that_the_model_cannot_have_is_explained(model):
    line = ["--processes", "3", "--tensor-model-parallel-size", "3", "--model-path", model]
    done = subprocess.run([sys.executable, "tools/memory.py", *line], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
