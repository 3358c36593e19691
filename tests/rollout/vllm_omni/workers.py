"""Workers of an engine as real processes, and the engine's side of `push`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_omni.rollout.vllm_omni.transport import Bucket, PushResult, Sender, push
from tests.rollout.vllm_omni.receiving_worker import Content

ROOT = Path(__file__).parents[3]


class WorkerError(Exception):
    """What a worker failed with, or that it is gone."""


class WorkerProcess:
    def __init__(self, python: str | Path = sys.executable):
        self.process = subprocess.Popen(
            [python, "-m", "tests.rollout.vllm_omni.receiving_worker"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, call: str, *args: Any) -> None:
        print(json.dumps({"call": call, "args": args}), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError("the worker is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        with suppress(BrokenPipeError):  # something was left to write
            self.process.stdin.close()
        self.process.stdout.close()


class Engine:
    """A group of workers; `received` is what each of them got."""

    def __init__(self, workers: int, python: str | Path = sys.executable):
        self.workers = [WorkerProcess(python) for _ in range(workers)]
        self.received: list[Content] = []
        self.requests = ThreadPoolExecutor(1)

    def open(self, description: dict[str, Any], timeout: float = 30) -> None:
        self.received = [[] for _ in self.workers]
        size = len(self.workers)
        answers = self.ask("open", *[(description, index, size, timeout) for index in range(size)])
        errors = [answer for answer in answers if isinstance(answer, WorkerError)]
        if errors:
            raise errors[0]

    def deliver(self, bucket: Bucket) -> Future:
        return self.requests.submit(self.load, bucket)

    def load(self, bucket: Bucket) -> None:
        answers = self.call("receive", *[(json.loads(json.dumps(bucket.to_json())),)] * len(self.workers))
        for answer in answers:
            if isinstance(answer, WorkerError):
                raise answer
        for received, answer in zip(self.received, answers, strict=True):
            received += answer

    def ask(self, name: str, *args: tuple) -> list[Any]:
        """As `call`, after what workers do now."""
        return self.requests.submit(self.call, name, *args).result()

    def call(self, name: str, *args: tuple) -> list[Any]:
        """The answers of all workers, each a result or a `WorkerError`; the same time for all."""
        for worker, each in zip(self.workers, args, strict=True):
            with suppress(BrokenPipeError):  # reading its answer tells that it is gone
                worker.ask(name, *each)
        answers = []
        for worker in self.workers:
            try:
                answers.append(worker.answer())
            except WorkerError as error:
                answers.append(error)
        return answers

    def measure(self) -> list[list[int]]:
        """Resident bytes and open files of each worker."""
        return self.ask("measure", *[()] * len(self.workers))

    def close(self) -> None:
        self.ask("close", *[()] * len(self.workers))

    def kill(self) -> None:
        for worker in self.workers:
            worker.close()
        self.requests.shutdown()


def update(
    sender: Sender, engine: Engine, tensors: Iterable[tuple[str, Tensor]], **options: Any
) -> PushResult:
    """One update of an engine, from opening to closing what receives it."""
    engine.open(sender.description)
    try:
        return push(tensors, sender, engine.deliver, **options)
    finally:
        engine.close()
