"""An engine's process, in the rollout environment, and plain calls of its HTTP interface."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import psutil
import requests
import torch
from torch import Tensor

from megatron_omni import wire
from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.rollout.vllm_omni.transport import Bucket, PushResult, open_sender, push

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("ROLLOUT_VENV", ".venv-rollout") / "bin/python"
START_TIMEOUT = 300
T = TypeVar("T")


def launch(model: Path, folder: Path, *options: str) -> subprocess.Popen:
    """Starts an engine that logs to `folder`/log and tells its address in `folder`/ready."""
    assert PYTHON.exists(), f"{PYTHON} is missing: tests/run.sh makes the rollout environment"
    command = [PYTHON, "-m", "megatron_omni.rollout.vllm_omni.engine.server", "--model-path", model]
    command += ["--dtype", "float32", "--ready-file", folder / "ready", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


class EngineProcess:
    """An engine that is ready."""

    def __init__(self, model: Path, folder: Path, workers: int = 1):
        self.folder, self.workers = folder, workers
        self.process = launch(model, folder, "--tensor-parallel-size", str(workers))
        deadline = time.monotonic() + START_TIMEOUT
        while not (folder / "ready").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        self.url = json.loads((folder / "ready").read_text())["url"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def family(self) -> list[psutil.Process]:
        """Its process and all below."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def get(self, path: str) -> Any:
        return _checked(requests.get(self.url + path, timeout=60)).json()

    def post(self, path: str, body: Any = None) -> Any:
        return _checked(requests.post(self.url + path, json=body, timeout=60)).json()

    def refusal(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and message of a call that fails."""
        response = requests.post(self.url + path, json=body, timeout=60)
        return response.status_code, response.json()["error"]

    def generate(self, *samples: SampleRequest) -> list[dict[str, Any]]:
        """All at once; each sample's arrays and its weight version."""
        with ThreadPoolExecutor(len(samples)) as threads:
            return list(threads.map(self._generate, samples))

    def _generate(self, sample: SampleRequest) -> dict[str, Any]:
        response = requests.post(self.url + "/generate", json=asdict(sample), timeout=60)
        metadata, arrays = wire.unpack(_checked(response).content)
        return arrays | metadata

    def update(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: str,
        adapter: dict[str, float] | None = None,
        transport: str = "folder",
    ) -> tuple[PushResult, dict[str, Any]]:
        """Send weights, in several buckets; what was sent, and what the engine says it holds."""
        kind = "model" if adapter is None else "adapter"
        cpu = torch.device("cpu")
        with (
            open_sender(transport, 2**16, self.workers, cpu, self.folder / "weights") as sender,
            ThreadPoolExecutor(1) as thread,
        ):

            def deliver(bucket: Bucket) -> Future:
                return thread.submit(self.post, "/weights/bucket", bucket.to_json())

            begin = {"version": version, "transport": sender.description, "kind": kind, "adapter": adapter}
            self.post("/weights/begin", begin)
            sent = push(tensors, sender, deliver)
        return sent, self.post("/weights/end", {"names": sent.names})


def _checked(response: requests.Response) -> requests.Response:
    assert response.ok, response.text
    return response


def ended(processes: list[psutil.Process], timeout: float = 60) -> bool:
    """Whether all of them do in time. That nobody has taken a zombie away yet is not theirs."""

    def is_left(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + timeout
    while any(is_left(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def eventually(ask: Callable[[], T], timeout: float = 60) -> T:
    """Its first answer that is true."""
    deadline = time.monotonic() + timeout
    while not (answer := ask()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer
