"""A scoring process: builds one reward, then scores what its parent sends. Started by `RewardPool` alone.

Messages are JSON, one request and one reply at a time over an inherited pipe; pixels follow as raw bytes.
"""

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_omni.errors import UserError
from megatron_omni.rewards.base import Reward
from megatron_omni.rewards.registry import build_reward


def main(descriptor: str, parent: str, name: str) -> None:
    """Serve the pipe `descriptor` until it closes. parent: the process to die with. name: the reward."""
    os.set_inheritable(int(descriptor), False)  # a program that the reward starts must not keep the pipe open
    threading.Thread(target=_die_with, args=(int(parent),), daemon=True).start()
    connection = Connection(int(descriptor))
    try:
        reward = build_reward(name)
    except Exception as error:
        _send(connection, error=f"reward {name!r} cannot be built: {_describe(error)}")
        return
    _send(connection, error="")
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if "shape" in request:
            images = np.empty(request["shape"], np.uint8)
            connection.recv_bytes_into(memoryview(images).cast("B"))
            values, error = score(reward, images, request["metadata"])
            _send(connection, values=values, error=error)
        else:
            _send(connection, error=check(reward, request["metadata"]))


def score(reward: Reward, images: np.ndarray, metadata: list[dict[str, Any]]) -> tuple[list[float], str]:
    """A value an image, NaN where the reward failed, and the last failure's text.

    After an exception every image is scored alone, so that one bad sample costs only itself.
    """
    try:
        values, error = _score_batch(reward, images, metadata), ""
    except Exception:
        values, error = [], ""
        for index, row in enumerate(metadata):
            try:
                values += _score_batch(reward, images[index : index + 1], [row])
            except Exception as failure:
                values.append(math.nan)
                error = _describe(failure)
    if not error and not np.isfinite(values).all():
        error = f"the reward returned {next(value for value in values if not math.isfinite(value))}"
    return values, error


def _score_batch(reward: Reward, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
    values = [float(value) for value in reward.score(images, metadata)]
    if len(values) != len(metadata):
        raise UserError(f"the reward returned {len(values)} values for {len(metadata)} images")
    return values


def check(reward: Reward, metadata: list[dict[str, Any]]) -> str:
    """Why the first prompt that can never be scored cannot; empty if all can."""
    try:
        for row in metadata:
            reward.check_prompt(row)
    except Exception as error:
        return _describe(error)
    return ""


def _describe(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _send(connection: Connection, **reply: Any) -> None:
    connection.send_bytes(json.dumps(reply).encode())


def _die_with(parent: int) -> None:
    """End this process group once `parent` is gone, even if the reward hangs."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
