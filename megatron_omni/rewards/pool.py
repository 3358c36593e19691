"""Scoring in separate processes, beside sampling and training; a failing sample never stops the loop."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_omni.errors import UserError
from megatron_omni.rewards.base import RewardResult

START_TIMEOUT = 300.0
"""Seconds a process has to build its reward."""

_Scores = tuple[list[float], str]
"""Values (NaN for a failed sample) and the last failure's text."""


@dataclass(frozen=True)
class PendingReward:
    """Scores on their way."""

    parts: list[Future[_Scores]]

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return all(part.done() for part in self.parts)

    def result(self) -> RewardResult:
        """The scores in the order of the images; waits for them, a bounded time."""
        scores = [part.result() for part in self.parts]
        values = torch.tensor([value for part, _ in scores for value in part])
        valid = values.isfinite()
        error = next((error for _, error in reversed(scores) if error), "")
        return RewardResult(values.where(valid, 0.0), valid, error)


class RewardPool:
    """`workers` processes that score images with one reward, one thread each.

    A sample whose score is NaN or infinite or raises is masked. A process that dies is replaced, and its
    images are scored once more before they are masked; one that takes longer than `timeout` seconds for its
    share of a batch is killed and replaced, and its images are masked. All processes end with this one,
    however it ends.

    Use it as a context manager, so that no exception leaves it waiting for a score. Raises `UserError` if the
    reward cannot be built.
    """

    def __init__(self, reward: str, workers: int, timeout: float):
        self.timeout = timeout
        self._workers = [_Worker(reward) for _ in range(workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, "reward")  # one waits for each process
        self._closed = False
        try:
            list(self._threads.map(_Worker.start, self._workers))
        except BaseException:
            self.close()
            raise

    @property
    def restarts(self) -> int:
        """How many processes have been replaced."""
        return sum(worker.starts for worker in self._workers) - len(self._workers)

    def check_prompts(self, metadata: Iterable[dict[str, Any]]) -> None:
        """Raise `UserError` for the first prompt that the reward can never score."""
        request = {"metadata": list(metadata)}
        try:
            error = self._threads.submit(self._ask, request, None, START_TIMEOUT).result()["error"]
        except _WorkerLost as lost:
            error = str(lost)
        if error:
            raise UserError(error)

    def submit(self, images: Tensor, metadata: list[dict[str, Any]]) -> PendingReward:
        """Start to score a batch, split evenly over the processes; returns at once.

        images: [B, 3, H, W] uint8. metadata: B dictionaries of JSON values, with "prompt".
        """
        pixels = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        share = math.ceil(len(metadata) / len(self._workers))
        return PendingReward(
            [
                self._threads.submit(
                    self._score, pixels[start : start + share], metadata[start : start + share]
                )
                for start in range(0, len(metadata), share)
            ]
        )

    def close(self) -> None:
        """End all processes; scores still on their way become failures."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:  # again: one may have been replaced meanwhile
            worker.kill()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score(self, pixels: np.ndarray, metadata: list[dict[str, Any]]) -> _Scores:
        request = {"shape": pixels.shape, "metadata": metadata}
        try:
            try:
                reply = self._ask(request, pixels, self.timeout)
            except _WorkerDied:
                reply = self._ask(request, pixels, self.timeout)
        except (_WorkerLost, UserError) as error:  # a UserError if a replacement cannot be started
            return [math.nan] * len(metadata), str(error)
        return reply["values"], reply["error"]

    def _ask(self, request: dict[str, Any], pixels: np.ndarray | None, timeout: float) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if self._closed:
                raise _WorkerLost("the reward pool was closed")
            return worker.ask(request, pixels, timeout)
        finally:
            self._idle.put(worker)


class _WorkerLost(Exception):
    """The process gave no answer."""


class _WorkerDied(_WorkerLost):
    """It ended by itself, or something killed it."""


class _Worker:
    """A scoring process and the pipe to it. Started anew for the next request if it was lost."""

    def __init__(self, reward: str):
        self.reward = reward
        self.starts = 0
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process and wait until its reward is built.

        A fresh interpreter, not a fork or a multiprocessing child: it inherits no locks and no sockets, and
        does not import the caller's main script.
        """
        self.starts += 1
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "megatron_omni.rewards.worker"),
                    *(str(theirs.fileno()), str(os.getpid()), self.reward),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group to kill as a whole, out of reach of Ctrl-C
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "OMP_NUM_THREADS": "1",
                },
            )
        try:
            error = self._exchange([], START_TIMEOUT)["error"]
        except _WorkerLost as lost:
            error = f"reward {self.reward!r} cannot be built: {lost}"
        if error:
            self.kill()
            raise UserError(error)

    def ask(self, request: dict[str, Any], pixels: np.ndarray | None, timeout: float) -> dict[str, Any]:
        """The reply. Raises `_WorkerLost`, or `UserError` if a lost process cannot be started again."""
        if self.process.poll() is not None:
            self.start()
        message = [json.dumps(request).encode()]
        return self._exchange(message if pixels is None else [*message, pixels.reshape(-1)], timeout)

    def kill(self) -> None:
        """End the process and all it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _exchange(self, messages: list[Any], timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        timer = threading.Timer(timeout, self.kill)  # which closes the pipe, whether we send or wait
        timer.start()
        try:
            for message in messages:
                self.connection.send_bytes(message)
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.kill()
            if time.monotonic() >= deadline:
                raise _WorkerLost(f"no answer from the scoring process within {timeout:g} s") from None
            raise _WorkerDied(
                f"scoring process {self.process.pid} died (exit status {self.process.returncode})"
            ) from None
        finally:
            timer.cancel()
