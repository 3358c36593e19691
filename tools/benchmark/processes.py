"""Real processes that talk over gloo, for benchmarks."""

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist


def run_on_processes(function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `function(*args)` returns on each of `count` processes, which have joined one process group."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes,
    ):
        futures = [
            processes.submit(_join, f"file://{folder}/store", rank, count, function, args)
            for rank in range(count)
        ]
        return [future.result() for future in futures]


def _join(store: str, rank: int, count: int, function: Callable[..., Any], args: tuple) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
