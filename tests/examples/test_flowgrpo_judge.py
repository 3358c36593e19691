"""The recipe with a judge on GPUs, with stand-ins for torchrun and vLLM: what these are told is sound."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_omni.config.parse import parse_config
from megatron_omni.config.schema import Config
from megatron_omni.config.validate import validate

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/qwen_image/flowgrpo_judge.sh"
NOTE = """
note = json.dumps([sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()])
Path({folder!r}, Path(sys.argv[0]).name).write_text(note)
"""
STAND_INS = {
    "vllm": """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
""",
    "torchrun": "sys.exit(int(os.environ['TORCHRUN_STATUS']))\n",
}


class Outcome:
    def __init__(self, folder: Path, *arguments: str, status: int = 0, gpus: str | None = None):
        """Runs the script on stand-ins."""
        tools = folder / "venv/bin"
        tools.mkdir(parents=True)
        for name, code in STAND_INS.items():
            lines = f"#!{sys.executable}\nimport json, os, sys\nfrom pathlib import Path\n"
            (tools / name).write_text(lines + NOTE.format(folder=str(folder)) + code)
            (tools / name).chmod(0o755)
        (tools / "python").symlink_to(sys.executable)
        (folder / "prompts.txt").write_text('a sign that says "OPEN"\n')
        environment = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "ROLLOUT_VENV": str(folder / "venv"),
            "MODEL": str(folder),
            "PROMPTS": str(folder / "prompts.txt"),
            "TORCHRUN_STATUS": str(status),
        }
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        self.folder = folder
        self.done = subprocess.run(
            ["bash", SCRIPT, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def of(self, program: str) -> tuple[list[str], list[str], int]:
        """Its arguments, GPUs and process."""
        arguments, gpus, process = json.loads((self.folder / program).read_text())
        return arguments, gpus.split(","), process

    def config(self) -> Config:
        arguments, gpus, _ = self.of("torchrun")
        assert arguments[:4] == ["--standalone", "--nproc-per-node", str(len(gpus)), "pretrain_rl.py"]
        config = parse_config(arguments[4:])
        validate(config, len(gpus))
        return config


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("placement", ["colocated", "separate"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_settings_fit_four_gpus_and_the_judge_that_was_started(tuning, placement, tmp_path):
    outcome = Outcome(tmp_path, tuning, placement, "--train-iters", "7")
    assert outcome.done.returncode == 0, outcome.done.stderr
    config = outcome.config()
    parallel, rollout = config.parallel, config.rollout
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt) == (32, 16)
    assert (rollout.height, rollout.width, rollout.num_inference_steps) == (512, 512, 10)
    assert config.training.train_iters == 7
    assert bool(config.lora.lora_rank) == (tuning == "lora")
    # A replica's engine has a worker on each of its GPUs.
    assert config.vllm_omni.rollout_tensor_parallel_size == parallel.tensor_model_parallel_size
    assert config.vllm_omni.rollout_python == f"{tmp_path}/venv/bin/python"

    arguments, gpus, judge = outcome.of("vllm")
    assert config.judge.judge_urls == (f"http://127.0.0.1:{option(arguments, '--port')}/v1",)
    assert config.judge.judge_model == option(arguments, "--served-model-name") == arguments[1]
    training_gpus = outcome.of("torchrun")[1]
    if placement == "colocated":
        assert gpus == training_gpus and option(arguments, "--tensor-parallel-size") == str(len(gpus))
        assert float(option(arguments, "--gpu-memory-utilization")) <= 0.2
    else:
        assert len(gpus) == 1 and not set(gpus) & set(training_gpus)
    with pytest.raises(ProcessLookupError):
        os.kill(judge, 0)


def test_a_failure_of_training_is_the_scripts_and_ends_the_judge(tmp_path):
    outcome = Outcome(tmp_path, "lora", "separate", status=3)
    assert outcome.done.returncode == 3
    with pytest.raises(ProcessLookupError):
        os.kill(outcome.of("vllm")[2], 0)


@pytest.mark.parametrize(("placement", "judge"), [("colocated", "2 3 5 7"), ("separate", "GPU-8f")])
def test_the_gpus_that_a_scheduler_gave_are_taken(placement, judge, tmp_path):
    outcome = Outcome(tmp_path, "full", placement, gpus="2,3,5,7,GPU-8f,9")
    assert outcome.of("torchrun")[1] == ["2", "3", "5", "7"]
    assert outcome.of("vllm")[1] == judge.split()


@pytest.mark.parametrize(("placement", "gpus"), [("colocated", "1,2,3"), ("separate", "0,1,2,3")])
def test_too_few_gpus_are_refused(placement, gpus, tmp_path):
    outcome = Outcome(tmp_path, "full", placement, gpus=gpus)
    assert outcome.done.returncode == 2
    assert f"CUDA_VISIBLE_DEVICES={gpus} names" in outcome.done.stderr


def test_a_proxy_is_not_asked_for_the_judge(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert Outcome(tmp_path, "full", "separate").done.returncode == 0


def test_a_judge_that_cannot_start_ends_the_script_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setitem(STAND_INS, "vllm", "sys.exit('no memory')\n")
    outcome = Outcome(tmp_path, "full", "separate")
    assert outcome.done.returncode == 1
    assert "The judge has ended" in outcome.done.stderr and "no memory" in outcome.done.stderr


@pytest.mark.parametrize("arguments", [[], ["full"], ["full", "elsewhere"], ["some", "separate"]])
def test_other_words_are_refused(arguments, tmp_path):
    outcome = Outcome(tmp_path, *arguments)
    assert outcome.done.returncode == 2
    assert "TUNING is" in outcome.done.stderr or "JUDGE is" in outcome.done.stderr
