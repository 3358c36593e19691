"""Running a function on several real processes that talk over gloo."""

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

# Ranks are forked from one server process a test session, which has imported these already.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "megatron_omni.training.run",
        "megatron_omni.models.qwen_image.pipeline",
        "megatron.core.transformer.transformer_block",
        "diffusers.models.transformers.transformer_qwenimage",
        "hypothesis",
        "pytest",
    ]
)


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    dying: Collection[int] = (),
) -> list[Any]:
    """The results of `function(*args)` on processes of rank 0 to `world_size` - 1, in that order.

    `function` is a module's function. Its environment is torchrun's, so it begins with
    `megatron_omni.parallel.state.initialize` or `torch.distributed.init_process_group("gloo")`. The result is
    copied, tensors too. Ranks named in `dying` are not waited for; their result is None. The first failure of
    any other, or `timeout` in seconds, ends all ranks and raises with the failing rank's traceback.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port, held from here on
    call = pickle.dumps((function, args))
    ranks = [_start(rank, world_size, store.port, call) for rank in range(world_size)]
    try:
        return _results(ranks, dying, time.monotonic() + timeout)
    finally:
        for process, connection in ranks:
            with suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            connection.close()


def _start(rank: int, world_size: int, port: int, call: bytes) -> tuple[BaseProcess, Connection]:
    receiver, sender = _processes.Pipe(duplex=False)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    process = _processes.Process(target=_run_rank, args=(environment, call, sender))
    process.start()
    sender.close()
    return process, receiver


def _run_rank(environment: dict[str, str], call: bytes, sender: Connection) -> None:
    os.setpgid(0, 0)  # so that this rank's own children end with it
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(call)
        succeeded, result = True, function(*args)
    except BaseException:
        succeeded, result = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps((succeeded, result)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _results(
    ranks: list[tuple[BaseProcess, Connection]], dying: Collection[int], deadline: float
) -> list[Any]:
    results = [None] * len(ranks)
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in dying}
    while waiting:
        ready = wait(waiting, max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(ranks)} did not finish in time")
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                succeeded, results[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                process, _ = ranks[rank]
                process.join()
                raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} of {len(ranks)} failed:\n{results[rank]}")
    return results
