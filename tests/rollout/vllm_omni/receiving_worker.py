"""A worker of an engine that only receives: one JSON command a line on stdin, one JSON answer on stdout.

Run by any Python that has torch and safetensors: `python -m tests.rollout.vllm_omni.receiving_worker`.
"""

import ctypes
import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_omni.platforms import current_platform
from megatron_omni.rollout.vllm_omni.transport import Bucket, Receiver

Content = list[list[Any]]


def content(tensors: list[tuple[str, Tensor]]) -> Content:
    """What must arrive: names, shapes, dtypes and a digest of the bytes, in order."""
    return [
        [
            name,
            list(tensor.shape),
            str(tensor.dtype),
            hashlib.sha256(tensor.cpu().flatten().contiguous().view(torch.uint8).numpy()).hexdigest(),
        ]
        for name, tensor in tensors
    ]


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Worker:
    receiver: Receiver | None = None

    def open(self, description: dict, worker: int, workers: int, timeout: float) -> None:
        device = current_platform().device(0)
        self.receiver = Receiver.open(description, worker, workers, device, timeout)

    def receive(self, bucket: dict) -> Content:
        return content(list(self.receiver.receive(Bucket.from_json(bucket))))

    def close(self) -> None:
        self.receiver.close()
        self.receiver = None

    def measure(self) -> list[int]:
        return [resident_bytes(), open_files()]


def main() -> None:
    torch.set_num_threads(1)
    worker = Worker()
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else prints must not disturb the answers
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(worker, command["call"])(*command["args"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
