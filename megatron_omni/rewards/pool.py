"""Scoring in separate processes, beside sampling and training; a failing sample never stops the loop."""

import itertools
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
from megatron_omni.rewards.options import RewardOptions

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
    """`workers` processes that score images with one reward, each `Reward.concurrency` batches at a time.

    A sample whose score is NaN or infinite or raises is masked. A process that dies is replaced, and its
    images are scored once more before they are masked; one that takes longer than `timeout` seconds (or the
    reward's own `time_limit`) for its share of a batch is killed and replaced, and its images are masked. All
    processes end with this one, however it ends.

    Use it as a context manager, so that no exception leaves it waiting for a score. Raises `UserError` if the
    reward cannot be built.
    """

    def __init__(self, reward: str, workers: int, timeout: float, options: RewardOptions | None = None):
        self._workers = [_Worker(reward, options) for _ in range(workers)]
        self._closed = False
        try:
            with ThreadPoolExecutor(workers) as starters:
                traits, *_ = starters.map(_Worker.start, self._workers)
        except BaseException:
            self._kill_all()
            raise
        self._timeout = traits["time_limit"] or timeout
        self._batch_size = traits["batch_size"] or sys.maxsize
        self._slots: SimpleQueue[_Worker] = SimpleQueue()  # a worker is in it once for each batch it can take
        for worker in self._workers * traits["concurrency"]:
            self._slots.put(worker)
        self._threads = ThreadPoolExecutor(self._slots.qsize(), "reward")  # one waits for each batch

    @property
    def restarts(self) -> int:
        """How many processes have been replaced."""
        return sum(worker.starts for worker in self._workers) - len(self._workers)

    def check_prompts(self, metadata: Iterable[dict[str, Any]]) -> None:
        """Raise `UserError` if scoring cannot begin, such as for a prompt that the reward can never score."""
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
        share = min(math.ceil(len(metadata) / len(self._workers)), self._batch_size)
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
        self._kill_all()
        self._threads.shutdown()
        self._kill_all()  # again: one may have been replaced meanwhile

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _score(self, pixels: np.ndarray, metadata: list[dict[str, Any]]) -> _Scores:
        request = {"shape": pixels.shape, "metadata": metadata}
        try:
            try:
                reply = self._ask(request, pixels, self._timeout)
            except _WorkerDied:
                reply = self._ask(request, pixels, self._timeout)
        except (_WorkerLost, UserError) as error:  # a UserError if a replacement cannot be started
            return [math.nan] * len(metadata), str(error)
        return reply["values"], reply["error"]

    def _ask(self, request: dict[str, Any], pixels: np.ndarray | None, timeout: float) -> dict[str, Any]:
        worker = self._slots.get()
        try:
            if self._closed:
                raise _WorkerLost("the reward pool was closed")
            return worker.ask(request, pixels, timeout)
        finally:
            self._slots.put(worker)


class _WorkerLost(Exception):
    """The process gave no answer."""


class _WorkerDied(_WorkerLost):
    """It ended by itself, or something killed it."""


class _Worker:
    """A scoring process that is started anew for the next request if it was lost."""

    def __init__(self, reward: str, options: RewardOptions | None):
        self.reward = reward
        self.options = options or RewardOptions()
        self.starts = 0
        self.process: _Process | None = None
        self._starting = threading.Lock()

    def start(self) -> dict[str, Any]:
        """Start the process and wait until its reward is built. Returns what the reward says of itself."""
        self.starts += 1
        self.process = _Process(self.reward)
        try:
            reply = self.process.ask({"options": self.options.to_json()}, None, START_TIMEOUT)
        except _WorkerLost as lost:
            reply = {"error": f"reward {self.reward!r} cannot be built: {lost}"}
        if reply["error"]:
            self.kill()
            raise UserError(reply["error"])
        return reply

    def ask(self, request: dict[str, Any], pixels: np.ndarray | None, timeout: float) -> dict[str, Any]:
        """The reply. Raises `_WorkerLost`, or `UserError` if a lost process cannot be started again."""
        with self._starting:
            if self.process.ended():
                self.process.kill()  # what it has left of its group
                self.start()
            process = self.process
        return process.ask(request, pixels, timeout)

    def kill(self) -> None:
        if self.process:
            self.process.kill()


class _Process:
    """One scoring process and the pipe to it, over which several requests may be on their way."""

    def __init__(self, reward: str):
        """Starts a fresh interpreter, not a fork or a multiprocessing child: it inherits no locks and no
        sockets, and does not import the caller's main script.
        """
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "megatron_omni.rewards.worker"),
                    *(str(theirs.fileno()), str(os.getpid()), reward),
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
        self.pid = self._process.pid
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._sending = threading.Lock()
        self._reaping = threading.Lock()
        threading.Thread(target=self._receive, name="reward replies", daemon=True).start()

    def ended(self) -> bool:
        """Whether it has ended. Until `kill` has reaped it, no other group can get its number."""
        with self._reaping:
            if self._process.returncode is not None:
                return True
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ask(self, request: dict[str, Any], pixels: np.ndarray | None, timeout: float) -> dict[str, Any]:
        """The reply. Raises `_WorkerLost`; after `timeout` seconds the process is killed."""
        deadline = time.monotonic() + timeout
        timer = threading.Timer(timeout, self.kill)  # which ends sending and waiting
        timer.start()
        number, reply = next(self._numbers), Future()
        self._waiting[number] = reply
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(request | {"number": number}).encode())
                if pixels is not None:
                    self._connection.send_bytes(pixels.reshape(-1))
            return reply.result()
        except (EOFError, OSError):
            self.kill()
            if time.monotonic() >= deadline:
                raise _WorkerLost(f"no answer from the scoring process within {timeout:g} s") from None
            raise _WorkerDied(
                f"scoring process {self.pid} died (exit status {self._process.returncode})"
            ) from None
        finally:
            timer.cancel()

    def kill(self) -> None:
        """End the process and all it started, which may have the pipe open even if the process has ended."""
        with self._reaping:
            if self._process.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()

    def _receive(self) -> None:
        """Hands replies to those who wait for them, until the pipe closes."""
        with suppress(EOFError, OSError):
            while True:
                reply = json.loads(self._connection.recv_bytes())
                self._waiting.pop(reply["number"]).set_result(reply)
        with self._sending:  # not for long: nobody has the other end open
            self._connection.close()
        # Whoever asks from now on cannot send.
        for reply in list(self._waiting.values()):
            reply.set_exception(EOFError())
