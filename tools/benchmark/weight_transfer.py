"""Speed of sending new weights from a trainer to an engine, beside a plain copy of as many bytes.

A trainer of two tensor-parallel processes holds Qwen-Image's layers at their published width, in bfloat16.
Workers, which are processes of their own, copy their share of each tensor into parameters, as an engine with
tensor parallelism does. Each transport sends the model from whole tensors, which shows its own speed, and
while gathering them from the two processes, as an update does. Every process has one thread. A plain copy
goes from tensor to tensor within one process, in the same run: `python tools/benchmark/weight_transfer.py`.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_omni.checkpoint.hf import hf_tensors
from megatron_omni.config.schema import Config, ModelConfig, ParallelConfig
from megatron_omni.models.qwen_image.config import QwenImageConfig
from megatron_omni.models.qwen_image.mapping import MAPPING
from megatron_omni.parallel.state import form_groups
from megatron_omni.rollout.vllm_omni.transport import Bucket, PushResult, Receiver, open_sender, push
from tools.benchmark.processes import run_on_processes
from tools.benchmark.workload import build_chunks

TRAINERS = 2
WORKERS = (1, 2)
KINDS = ("shared_memory", "process_group", "folder")
LAYERS = 2
"""Of 680 MB each."""
SMALL = QwenImageConfig(
    num_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=64,
    axes_dims_rope=(4, 6, 6),
)
Tensors = Iterable[tuple[str, Tensor]]


class Worker:
    """One of an engine's workers: holds its rows of every tensor."""

    def __init__(self, index: int, workers: int):
        self.index, self.workers = index, workers
        self.parameters: dict[str, Tensor] = {}

    def open(self, description: dict[str, Any]) -> None:
        self.receiver = Receiver.open(description, self.index, self.workers, torch.device("cpu"), timeout=60)

    def load(self, bucket: dict[str, Any]) -> None:
        for name, tensor in self.receiver.receive(Bucket.from_json(bucket)):
            share = tensor.tensor_split(self.workers)[self.index]
            if name in self.parameters:
                self.parameters[name].copy_(share)
            else:
                self.parameters[name] = share.clone()

    def close(self) -> None:
        self.receiver.close()

    def held(self) -> dict[str, Tensor]:
        return self.parameters


def serve(connection: Connection, index: int, workers: int) -> None:
    torch.set_num_threads(1)
    worker = Worker(index, workers)
    while True:
        try:
            method, *args = connection.recv()
        except EOFError:
            return
        connection.send(getattr(worker, method)(*args))


class Engine:
    def __init__(self, workers: int):
        self.connections, self.processes = [], []
        self.requests = ThreadPoolExecutor(1)
        context = multiprocessing.get_context("spawn")
        for index in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, index, workers))
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join()

    def ask(self, *command: Any) -> list[Any]:
        """Every worker's answer."""
        for connection in self.connections:
            connection.send(command)
        return [connection.recv() for connection in self.connections]

    def deliver(self, bucket: Bucket) -> Future:
        return self.requests.submit(self.ask, "load", bucket.to_json())


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Table:
    """Speeds, each beside that of a plain copy right before, since the machine may have other work."""

    def __init__(self, whole: dict[str, Tensor], repetitions: int):
        self.whole, self.repetitions = whole, repetitions
        self.copy = {name: tensor.clone() for name, tensor in whole.items()}
        self.nbytes = sum(tensor.nbytes for tensor in whole.values())

    def copy_all(self) -> None:
        for name, tensor in self.whole.items():
            self.copy[name].copy_(tensor)

    def row(self, title: str, function: Callable[[], Any]) -> None:
        """Medians over the repetitions, after one call more."""
        function()
        durations, ratios = [], []
        for _ in range(self.repetitions):
            plain = timed(self.copy_all)
            durations.append(timed(function))
            ratios.append(plain / durations[-1])
        speed = self.nbytes / statistics.median(durations) / 1e9
        print(f"{title:48s}{speed:6.2f}{statistics.median(ratios):18.3f}", flush=True)


def use_up(tensors: Tensors) -> None:
    for _ in tensors:
        pass


@contextmanager
def updates(kind: str, engine: Engine, bucket_bytes: int, folder: Path) -> Iterator[Callable]:
    """What sends tensors to `engine`, as one update, through a sender that stays open."""
    workers = len(engine.processes)
    with open_sender(kind, bucket_bytes, workers, torch.device("cpu"), folder, timeout=60) as sender:

        def update(tensors: Tensors) -> PushResult:
            engine.ask("open", sender.description)
            result = push(tensors, sender, engine.deliver)
            engine.ask("close")
            return result

        yield update


def check(engine: Engine, whole: dict[str, Tensor], result: PushResult, nbytes: int) -> None:
    shares = engine.ask("held")
    for name, tensor in whole.items():
        parts = [share[name] for share in shares]
        if not torch.equal(torch.cat(parts) if tensor.dim() else parts[0], tensor):
            raise SystemExit(f"{name} is not what was sent")
    if result.nbytes > 1.05 * nbytes:
        raise SystemExit(f"{result.nbytes} bytes were sent for {nbytes} bytes of weights")


def measure(qwen: QwenImageConfig, repetitions: int, bucket_bytes: int, folder: Path) -> None:
    """On each of the trainer's processes; the first prints."""
    config = Config(
        model=ModelConfig(bf16=True), parallel=ParallelConfig(tensor_model_parallel_size=TRAINERS)
    )
    layout = form_groups(config.parallel, config.training.seed, torch.device("cpu"))
    chunks = [chunk.bfloat16() for chunk in build_chunks(qwen, config, layout)]

    def gathered() -> Tensors:
        return hf_tensors(chunks, MAPPING)

    whole = {name: tensor.clone() for name, tensor in gathered()}
    nbytes = sum(tensor.nbytes for tensor in whole.values())
    if dist.get_rank():
        del whole
        for _ in range(1 + len(WORKERS) * len(KINDS)):
            for _ in range(1 + repetitions):
                use_up(gathered())
            dist.barrier()
        return

    title = f"{nbytes / 1e9:.2f} GB of weights, buckets of {bucket_bytes >> 20} MiB"
    print(f"{title:48s}  GB/s   to a plain copy")
    table = Table(whole, repetitions)
    table.row("plain copy", table.copy_all)
    table.row("gathering alone", lambda: use_up(gathered()))
    dist.barrier()
    for workers in WORKERS:
        with Engine(workers) as engine:
            for kind in KINDS:
                title = f"{kind}, {workers} worker{'s' * (workers > 1)}"
                with updates(kind, engine, bucket_bytes, folder) as update:
                    table.row(title, lambda update=update: update(whole.items()))
                    check(engine, whole, update(whole.items()), nbytes)
                    table.row(f"{title}, gathering", lambda update=update: update(gathered()))
                dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where files go; by default the temporary folder")
    parser.add_argument("--quick", action="store_true", help="narrow layers: to see that it runs")
    args = parser.parse_args()
    qwen = SMALL if args.quick else QwenImageConfig(num_layers=LAYERS)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bucket_bytes = 2**16 if args.quick else args.bucket_mib << 20
        run_on_processes(measure, TRAINERS, qwen, args.repetitions, bucket_bytes, Path(folder))


if __name__ == "__main__":
    main()
