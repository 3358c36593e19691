"""A scoring process: builds one reward, then scores what its parent sends. Started by `RewardPool` alone.

Messages are JSON over an inherited pipe; pixels follow a request as raw bytes. A reply carries its request's
number, since replies of a reward that scores several batches at once may come in any order.
"""

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_omni.errors import UserError
from megatron_omni.rewards.base import Reward, Unscored
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.rewards.registry import build_reward


def main(descriptor: str, parent: str, name: str) -> None:
    """Serve the pipe `descriptor` until it closes. parent: the process to die with. name: the reward."""
    os.set_inheritable(int(descriptor), False)  # a program that the reward starts must not keep the pipe open
    threading.Thread(target=_die_with, args=(int(parent),), daemon=True).start()
    pipe = _Pipe(int(descriptor))
    requests = pipe.requests()
    first, _ = next(requests)
    try:
        reward = build_reward(name, RewardOptions.from_json(first["options"]))
    except Exception as error:
        pipe.reply(first, error=f"reward {name!r} cannot be built: {_describe(error)}")
        return
    pipe.reply(
        first,
        error="",
        concurrency=reward.concurrency,
        batch_size=reward.batch_size,
        time_limit=reward.time_limit,
    )
    if reward.concurrency == 1:
        for request, images in requests:  # in the main thread: some libraries work in no other
            _answer(pipe, reward, request, images)
    else:
        with ThreadPoolExecutor(reward.concurrency) as threads:
            for request, images in requests:
                threads.submit(_answer_or_die, pipe, reward, request, images)


class _Pipe:
    """The parent's requests, and replies to them from any thread."""

    def __init__(self, descriptor: int):
        self.connection = Connection(descriptor)
        self.replying = threading.Lock()

    def requests(self) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
        """Each request and its pixels, if it has any, until the pipe closes."""
        while True:
            try:
                request = json.loads(self.connection.recv_bytes())
                images = None
                if "shape" in request:
                    images = np.empty(request["shape"], np.uint8)
                    self.connection.recv_bytes_into(memoryview(images).cast("B"))
            except EOFError:
                return
            yield request, images

    def reply(self, request: dict[str, Any], **values: Any) -> None:
        with self.replying:
            self.connection.send_bytes(json.dumps({"number": request["number"]} | values).encode())


def _answer(pipe: _Pipe, reward: Reward, request: dict[str, Any], images: np.ndarray | None) -> None:
    if images is None:
        pipe.reply(request, error=check(reward, request["metadata"]))
    else:
        values, error = score(reward, images, request["metadata"])
        pipe.reply(request, values=values, error=error)


def _answer_or_die(*arguments: Any) -> None:
    """In a thread, an exit would otherwise go unnoticed and the parent would wait."""
    try:
        _answer(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def score(reward: Reward, images: np.ndarray, metadata: list[dict[str, Any]]) -> tuple[list[float], str]:
    """A value an image, NaN where the reward failed, and the last failure's text.

    After an exception every image is scored alone, so that one bad sample costs only itself.
    """
    try:
        values, error = _score_batch(reward, images, metadata)
    except Exception as failure:
        values, error = [math.nan] * len(metadata), _describe(failure)
        if len(metadata) > 1:
            alone = [score(reward, images[i : i + 1], [row]) for i, row in enumerate(metadata)]
            values = [value for (value,), _ in alone]
            error = next((error for _, error in reversed(alone) if error), "")
    if not error and not np.isfinite(values).all():
        error = f"the reward returned {next(value for value in values if not math.isfinite(value))}"
    return values, error


def _score_batch(
    reward: Reward, images: np.ndarray, metadata: list[dict[str, Any]]
) -> tuple[list[float], str]:
    try:
        values, error = reward.score(images, metadata), ""
    except Unscored as failure:
        values, error = failure.values or [math.nan] * len(metadata), str(failure)
    values = [float(value) for value in values]
    if len(values) != len(metadata):
        raise UserError(f"the reward returned {len(values)} values for {len(metadata)} images")
    return values, error


def check(reward: Reward, metadata: list[dict[str, Any]]) -> str:
    """Why scoring cannot begin with these prompts; empty if it can."""
    try:
        reward.check_prompts(metadata)
    except Exception as error:
        return _describe(error)
    return ""


def _describe(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _die_with(parent: int) -> None:
    """End this process group once `parent` is gone, even if the reward hangs."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
