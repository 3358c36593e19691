"""Rewards that fail in every way a user's can; scoring processes import this module."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path

from megatron_omni.rewards.base import Reward


def first_pixel(images, metadata):
    """The red value of the first pixel, or the mishap that the row's "do" names."""
    return [
        _act(row) if "do" in row else int(image[0, 0, 0]) for image, row in zip(images, metadata, strict=True)
    ]


def slow_first_pixel(images, metadata):
    """The same, after each row's "seconds"."""
    time.sleep(sum(row["seconds"] for row in metadata))
    return [int(image[0, 0, 0]) for image in images]


def other_pixel(images, metadata):
    """Fails where "do" is "other", where `first_pixel` does not."""
    return [math.nan if row["do"] == "other" else 1.0 for row in metadata]


def _act(row):
    match row["do"]:
        case "other":
            return 1
        case "nan":
            return math.nan
        case "infinity":
            return math.inf
        case "raise":
            raise ValueError("bad sample")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die once":
            if not Path(row["mark"]).exists():
                Path(row["mark"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return 1
        case "hang":
            time.sleep(1000)
        case "hang in a child":
            child = subprocess.Popen(["sleep", "1000"])
            Path(row["mark"]).write_text(str(child.pid))
            child.wait()
        case "die with a fork":
            child = os.fork()
            if not child:
                time.sleep(1000)
            Path(row["mark"]).write_text(str(child))
            os._exit(1)
        case "sleep":
            time.sleep(row["seconds"])
            return os.getpid()
        case "exit":
            raise SystemExit("bye")


def too_few(images, metadata):
    return [1.0]


def threads(images, metadata):
    return [float(os.environ["OMP_NUM_THREADS"])] * len(images)


class Broken(Reward):
    def __init__(self):
        raise RuntimeError("no such judge")

    def score(self, images, metadata):
        return []


class NoScore:
    pass
