"""Judges against the real vLLM: a tiny random model whose answers are held to the schema."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from megatron_omni.errors import UserError
from megatron_omni.ports import free_port
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rollout.vllm_omni.cpu import ENVIRONMENT
from tests.models.vl_builder import build_tiny_qwen_vl
from tests.rewards.judge_server import assert_judges_alike_twice, options
from tests.rollout.vllm_omni.engine_process import PYTHON, START_TIMEOUT, ended

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm_omni")]

MODEL = "tiny"
COUNT = 6


class VllmServer:
    """`vllm serve`. Can be killed, and started again on its port."""

    def __init__(self, model: Path, log: Path):
        self.model, self.log = model, log
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        assert PYTHON.exists(), f"{PYTHON} is missing: tests/run.sh makes the rollout environment"
        command = [PYTHON.with_name("vllm"), "serve", self.model, "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "4", "--limit-mm-per-prompt.video", "0"]
        command += ["--structured-outputs-config.backend", "xgrammar"]
        command += ["--structured-outputs-config.disable_any_whitespace", "true"]
        environment = ENVIRONMENT | os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self.process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_TIMEOUT
        while not self.healthy():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.2)

    def healthy(self) -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{self.port}/health", timeout=5).ok
        except requests.RequestException:
            return False

    def kill(self) -> None:
        """All of its processes at once, as a host that fails."""
        family = [self.process, *self.process.children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGKILL)
        assert ended(family)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = build_tiny_qwen_vl(tmp_path_factory.mktemp("judge"))
    _make_livelier(model)
    server = VllmServer(model, tmp_path_factory.mktemp("log") / "log")
    yield server
    server.kill()


def _make_livelier(folder: Path) -> None:
    """By itself, a random model says the same of everything, again and again until it is cut short."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids('"')] *= 6
    for name, weight in weights.items():
        if "language_model" in name:  # attend to little, and heed it
            weight *= 8 if "o_proj" in name else 3 if "q_norm" in name else 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def batch() -> tuple[Tensor, list[dict]]:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (COUNT, 3, 64, 96), generator=random).to(torch.uint8)
    return images, [{"prompt": f'a sign that says "{word}"'} for word in ("A", "BEE", "SEA", "D", "EE", "EF")]


def judge(server: VllmServer, name: str, **settings: float) -> RewardPool:
    return RewardPool(name, 1, 60.0, options(server.url, model=MODEL, **({"timeout": 60.0} | settings)))


@pytest.mark.parametrize("name", ["judge_score", "judge_ocr"])
def test_every_answer_is_a_valid_number_and_the_same_when_asked_again(server, name):
    result = assert_judges_alike_twice(server.url, MODEL, name)
    assert result.valid.all(), result.error


@pytest.mark.parametrize("name", ["judge_score", "tests.rewards.example_judges:ReadText"])
def test_answers_do_not_depend_on_the_order_of_the_questions_or_on_how_many_are_in_flight(server, name):
    images, rows = batch()
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1)).tolist()
    with judge(server, name) as pool, judge(server, name, concurrency=1) as one_by_one:
        together = pool.submit(images, rows).result()
        shuffled = pool.submit(images[order], [rows[i] for i in order]).result()
        alone = one_by_one.submit(images, rows).result()
    assert together.valid.all(), together.error
    assert len(set(together.values.tolist())) > 1
    assert shuffled.values.tolist() == together.values[order].tolist()
    assert alone.values.tolist() == together.values.tolist()


def test_a_model_that_the_server_does_not_have_is_told_at_the_start(server):
    with (
        RewardPool("judge_score", 1, 60.0, options(server.url, model="other")) as pool,
        pytest.raises(UserError, match=f"serves {MODEL}, not judge_model 'other'"),
    ):
        pool.check_prompts(batch()[1])


def test_a_killed_server_masks_within_the_bound_and_its_successor_judges_alike(server):
    images, rows = batch()
    with judge(server, "judge_score", timeout=20.0, retries=1) as pool:
        before = pool.submit(images, rows).result()
        pending = pool.submit(images, rows)
        server.kill()
        cut_off = pending.result()
        start = time.monotonic()
        masked = pool.submit(images, rows).result()
        assert time.monotonic() - start < 10
        for result in (cut_off, masked):
            assert "tried 2 times" in result.error and server.url in result.error
        assert not masked.valid.any() and not cut_off.valid.all()
        server.start()
        after = pool.submit(images, rows).result()
    assert before.valid.all() and after.valid.all(), after.error
    assert after.values.tolist() == before.values.tolist()
