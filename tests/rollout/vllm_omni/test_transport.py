"""Weights arrive as they were sent, by every transport; failures show in time and leave nothing behind."""

import fcntl
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_omni.errors import UserError
from megatron_omni.platforms import current_platform
from megatron_omni.rollout.vllm_omni.transport import (
    Bucket,
    Receiver,
    Sender,
    TensorSpec,
    TransportError,
    checksum,
    open_sender,
    push,
)
from megatron_omni.rollout.vllm_omni.transport.bucket import ALIGNMENT
from megatron_omni.rollout.vllm_omni.transport.folder import FolderSender
from tests.distributed import run_distributed
from tests.rollout.vllm_omni.engine_process import PYTHON
from tests.rollout.vllm_omni.receiving_worker import content, open_files, resident_bytes
from tests.rollout.vllm_omni.workers import ROOT, Engine, WorkerError, update

KINDS = ["shared_memory", "process_group", "folder"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
MIB = 2**20


def device() -> torch.device:
    return current_platform().device(0)


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def engine(request) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.kill()


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def sender_for(kind: str, engine: Engine, folder: Path, bucket_bytes: int, timeout: float = 30) -> Sender:
    return open_sender(kind, bucket_bytes, len(engine.workers), device(), folder, timeout)


def numbered(count: int, nbytes: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors that differ, made one at a time."""
    for number in range(count):
        yield f"layer.{number}.weight", torch.full((nbytes // 4,), number, dtype=torch.float32)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of any value, NaN and infinity as well."""
    nbytes = prod(shape) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


# What arrives

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(
    specs=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12),
    bucket_bytes=st.integers(1, 3000),
)
@settings(max_examples=25)
def test_the_same_bytes_arrive_in_the_same_order(
    tmp_path_factory, kind: str, engine: Engine, specs: list, bucket_bytes: int
):
    tensors = [(f"tensor {n}", random_bits(shape, dtype)) for n, (shape, dtype) in enumerate(specs)]
    with sender_for(kind, engine, tmp_path_factory.mktemp("w"), bucket_bytes) as sender:
        result = update(sender, engine, tensors)
        size = len(engine.workers)
        largest = max((tensor.nbytes for _, tensor in tensors), default=0)
        unit = ALIGNMENT * size
        assert sender.memory.numel() <= max(bucket_bytes, largest + unit - 1, 2 * unit)
    assert engine.received == [content(tensors)] * size
    assert result.names == [name for name, _ in tensors]
    assert result.checksum == sum(checksum(tensor) for _, tensor in tensors) % 2**64
    sent = sum(tensor.nbytes for _, tensor in tensors)
    assert sent <= result.nbytes <= sent + ALIGNMENT * (len(tensors) + size * result.buckets)
    assert result.buckets <= len(tensors)


def test_tensors_larger_than_the_memory_arrive_between_small_ones(kind: str, engine: Engine, folder: Path):
    sizes = [10, 4000, 20, 5000, 2500, 30, 30, 3000, 9000, 1]
    tensors = [(str(n), random_bits((size,), torch.bfloat16)) for n, size in enumerate(sizes)]
    with sender_for(kind, engine, folder, 4096) as sender:
        for _ in range(2):
            update(sender, engine, tensors)
            assert engine.received == [content(tensors)] * len(engine.workers)
            assert sender.memory.numel() <= 18000 + 32


def test_floating_point_tensors_arrive_in_the_dtype_asked_for(kind: str, engine: Engine, folder: Path):
    tensors = [("a", torch.randn(30, 7)), ("b", torch.randint(-9, 9, (50,), dtype=torch.int8))]
    sent = [("a", tensors[0][1].bfloat16()), tensors[1]]
    with sender_for(kind, engine, folder, 300) as sender:
        result = update(sender, engine, tensors, dtype=torch.bfloat16)
    assert engine.received == [content(sent)] * len(engine.workers)
    assert result.checksum == sum(checksum(tensor) for _, tensor in sent) % 2**64


def test_a_view_that_is_not_contiguous_arrives(engine: Engine, folder: Path):
    tensors = [("a", torch.randn(6, 8).T), ("b", torch.randn(9, 9)[2:5, ::3])]
    with sender_for("shared_memory", engine, folder, 4096) as sender:
        update(sender, engine, tensors)
    assert engine.received == [content(tensors)] * len(engine.workers)


def test_workers_may_run_in_the_rollout_environment(kind: str, folder: Path):
    engine = Engine(2, PYTHON)
    try:
        tensors = [("a", torch.randn(100, 7).bfloat16()), ("b", torch.randn(999))]
        with sender_for(kind, engine, folder, 2000) as sender:
            update(sender, engine, tensors)
        assert engine.received == [content(tensors)] * 2
    finally:
        engine.kill()


def test_two_trainers_on_one_host_do_not_disturb_each_other(kind: str, folder: Path):
    engines = [Engine(1), Engine(1)]
    tensors = [[(f"{job}.{n}", torch.full((500,), 10.0 * job + n)) for n in range(20)] for job in range(2)]
    senders = [sender_for(kind, engine, folder, 8000) for engine in engines]
    try:
        threads = [
            threading.Thread(target=update, args=args) for args in zip(senders, engines, tensors, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [engine.received for engine in engines] == [[content(each)] for each in tensors]
    finally:
        for each in senders:
            each.close()
        for each in engines:
            each.kill()


# What it costs


def test_no_byte_crosses_twice(engine: Engine, folder: Path):
    """The kernel's count of what this process has written, to sockets as well."""

    def written() -> int:
        return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])

    tensors = list(numbered(40, MIB))
    with sender_for("process_group", engine, folder, 8 * MIB) as sender:
        before = written()
        result = update(sender, engine, tensors)
    assert 40 * MIB <= result.nbytes <= written() - before <= 1.05 * 40 * MIB


def test_the_next_bucket_is_packed_while_one_is_loaded_and_no_sooner_overwritten():
    """Of 4 tensors of half a slot, 1 and 2 are on their way, 3 and 4 packed; the fifth waits to be packed."""
    taken, delivered = [], []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in numbered(8, 1024):
            taken.append(name)
            yield name, tensor

    def deliver(bucket: Bucket) -> Future:
        future = Future()
        delivered.append((bucket, future))
        return future

    with open_sender("shared_memory", 4096, 1, device()) as sender:
        thread = threading.Thread(target=push, args=(tensors(), sender, deliver))
        thread.start()
        for number in range(4):
            wait_until(lambda number=number: len(delivered) == number + 1)
            time.sleep(0.1)
            assert len(delivered) == number + 1  # one at a time
            assert len(taken) == min(2 * number + 5, 8)  # 2 loading, 2 packed, 1 in hand
            bucket, future = delivered[number]
            views = bucket.views(sender.bytes_of(bucket))
            assert [int(view[0]) for _, view in views] == [2 * number, 2 * number + 1]
            future.set_result(None)
        thread.join(10)
        assert not thread.is_alive()


def wait_until(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_trainer_holds_one_bucket_beyond_its_own_tensors(kind: str, folder: Path):
    (beyond,) = run_distributed(memory_beyond_tensors, 1, kind, folder)
    assert beyond <= (128 + 16) * MIB


def memory_beyond_tensors(kind: str, folder: Path) -> int:
    """Peak of resident memory while 512 MiB go in buckets of 128 MiB, made as tensors of 1 MiB."""
    engine = Engine(1)
    try:
        with sender_for(kind, engine, folder, 1) as sender:  # what libraries need at first use
            update(sender, engine, numbered(3, MIB))
        before = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # measure the peak anew
        with sender_for(kind, engine, folder, 128 * MIB) as sender:
            update(sender, engine, numbered(512, MIB))
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024 - before
    finally:
        engine.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["one sender", "a sender an update"])
def test_fifty_updates_use_no_more_memory_and_files(kind: str, kept: bool, folder: Path):
    engine = Engine(2)
    try:
        sender = sender_for(kind, engine, folder, 2 * MIB)
        seen = []
        for number in range(60):
            update(sender, engine, numbered(5, MIB // 2))
            if not kept:
                sender.close()
                sender = sender_for(kind, engine, folder, 2 * MIB)
            if number in (9, 59):
                gc.collect()
                seen.append([[resident_bytes(), open_files()], *engine.measure()])
        for (memory, files), (memory_after, files_after) in zip(*seen, strict=True):
            assert memory_after < memory + 8 * MIB  # a fiftieth of what one slot an update would add
            assert files_after <= files + 2
        sender.close()
    finally:
        engine.kill()


# Failures


class Counted:
    """An iterator that knows whether it has been exhausted."""

    def __init__(self, tensors: Iterator):
        self.tensors, self.exhausted = tensors, False

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self.tensors)
        except StopIteration:
            self.exhausted = True
            raise


@pytest.mark.parametrize("at_once", [True, False], ids=["call", "future"])
def test_a_failed_delivery_raises_after_all_tensors_were_taken(at_once: bool):
    delivered = []

    def deliver(bucket: Bucket) -> Future:
        delivered.append(bucket)
        if at_once:
            raise ConnectionError("engine 3 is gone")
        future = Future()
        future.set_exception(ConnectionError("engine 3 is gone"))
        return future

    tensors = Counted(numbered(20, 1024))
    with (
        open_sender("shared_memory", 4096, 1, device()) as sender,
        pytest.raises(ConnectionError, match="engine 3"),
    ):
        push(tensors, sender, deliver)
    assert tensors.exhausted
    assert len(delivered) == 1


def test_an_engine_that_does_not_answer_is_an_error_within_the_timeout():
    tensors = Counted(numbered(20, 1024))
    start = time.monotonic()
    with (
        open_sender("shared_memory", 4096, 1, device(), timeout=0.5) as sender,
        pytest.raises(TransportError, match=r"not loaded.*0\.5 s"),
    ):
        push(tensors, sender, lambda bucket: Future())
    assert tensors.exhausted
    assert time.monotonic() - start < 3


def test_a_failure_while_tensors_are_made_is_raised():
    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from numbered(3, 1024)
        raise RuntimeError("rank 1 is gone")

    done = Future()
    done.set_result(None)
    with (
        open_sender("shared_memory", 4096, 1, device()) as sender,
        pytest.raises(RuntimeError, match="rank 1"),
    ):
        push(tensors(), sender, lambda bucket: done)


def test_other_ranks_are_not_left_waiting_when_the_engine_fails():
    assert run_distributed(push_from_collective_iterator, 2) == ["ConnectionError", "exhausted"]


def push_from_collective_iterator() -> str:
    dist.init_process_group("gloo")

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for number in range(30):
            tensor = torch.full((100,), float(number))
            dist.all_reduce(tensor)
            yield str(number), tensor

    def deliver(bucket: Bucket) -> Future:
        raise ConnectionError

    if dist.get_rank():
        for _ in gathered():
            pass
        return "exhausted"
    try:
        with open_sender("shared_memory", 1000, 1, device()) as sender:
            push(gathered(), sender, deliver)
    except ConnectionError:
        return "ConnectionError"


def test_a_killed_worker_is_an_error_in_time_and_the_next_update_arrives(kind: str, folder: Path):
    engine = Engine(2)
    deadline, tensors = time.monotonic() + 15, Counted(numbered(64, MIB))
    loaded = []

    def deliver(bucket: Bucket) -> Future:
        loaded.append(bucket)
        if len(loaded) == 3:
            engine.workers[1].kill()
        return engine.deliver(bucket)

    try:
        with sender_for(kind, engine, folder, 8 * MIB, timeout=10) as sender:
            engine.open(sender.description, timeout=10)
            with pytest.raises((WorkerError, TransportError), match=r"gone"):
                push(tensors, sender, deliver)
        assert tensors.exhausted
        assert len(loaded) == 3
        engine.requests.submit(int).result(15)  # the other worker has answered as well
        assert time.monotonic() < deadline
        assert len(engine.received[0]) < 64
    finally:
        engine.kill()
    engine = Engine(2)
    try:
        with sender_for(kind, engine, folder, 8 * MIB) as sender:
            update(sender, engine, numbered(4, MIB))
        assert engine.received == [content(list(numbered(4, MIB)))] * 2
    finally:
        engine.kill()


def test_workers_that_wait_for_a_killed_one_say_so(folder: Path):
    engine = Engine(2)
    loading = []

    def deliver(bucket: Bucket) -> Future:
        if len(loading) == 2:
            engine.workers[1].kill()
        loading.append(engine.deliver(bucket))
        return loading[-1]

    try:
        with sender_for("process_group", engine, folder, 8 * MIB, timeout=10) as sender:
            engine.open(sender.description, timeout=10)
            with pytest.raises((TransportError, WorkerError), match=r"worker( 1)? of the engine is gone"):
                push(numbered(64, MIB), sender, deliver)
            # The first worker's words; the trainer ends the group as soon as it knows.
            assert re.match(
                "TransportError: (another worker of the engine|the trainer) is gone",
                str(loading[-1].exception(15)),
            )
    finally:
        engine.kill()


def test_a_sender_that_starts_is_not_taken_for_a_killed_one(folder: Path, monkeypatch):
    flock, opened = fcntl.flock, threading.Event()

    def slowly_at_first(file, flags):
        if "weights-" in file.name and not opened.is_set():
            opened.set()
            time.sleep(0.5)
        flock(file, flags)

    monkeypatch.setattr(fcntl, "flock", slowly_at_first)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(FolderSender, MIB, folder, 30)
        assert opened.wait(10)
        with FolderSender(MIB, folder, 30), first.result():
            assert len(list(folder.glob("weights-*.lock"))) == 2


SENDING = """
import sys, json, torch
from concurrent.futures import Future
from megatron_omni.rollout.vllm_omni.transport import open_sender, push
kind, folder = sys.argv[1:]
sender = open_sender(kind, 64 * 2**20, 1, torch.device("cpu"), __import__("pathlib").Path(folder), timeout=60)
print(json.dumps(sender.description), flush=True)
sys.stdin.readline()
def deliver(bucket):
    print(json.dumps(bucket.to_json()), flush=True)
    return Future()
push((("a", torch.ones(8 * 2**20)) for _ in range(3)), sender, deliver)
"""


@pytest.mark.skipif(current_platform().name != "cpu", reason="host memory")
def test_of_a_killed_trainer_workers_learn_in_time_and_nothing_is_left(kind: str, folder: Path):
    before_it = in_shared_memory()
    trainer = subprocess.Popen(
        [sys.executable, "-c", SENDING, kind, folder],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    engine = Engine(1)
    try:
        description = json.loads(trainer.stdout.readline())
        (before, _), *_ = engine.measure()
        engine.open(description, timeout=20)
        print(file=trainer.stdin, flush=True)
        bucket = json.loads(trainer.stdout.readline())
        (first,) = engine.ask("receive", (bucket,))
        assert first == content([("a", torch.ones(8 * MIB))])
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        start = time.monotonic()
        (second,) = engine.ask("receive", (bucket,))
        if kind != "folder":  # whose file is still there
            assert str(second).startswith("TransportError: the trainer") and "gone" in str(second)
            assert time.monotonic() - start < 5
        engine.close()
        (after, _), *_ = engine.measure()
        assert after < before + 16 * MIB
        assert in_shared_memory() <= before_it
        if kind == "folder":
            assert len(list(folder.glob("weights-*"))) == 2
            with sender_for(kind, engine, folder, MIB) as sender:
                (left,) = (path for path in folder.iterdir() if path.is_dir())
                assert str(left) == sender.description["folder"]
            assert list(folder.glob("weights-*")) == []
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdin.close()
        trainer.stdout.close()
        engine.kill()


def in_shared_memory() -> set[str]:
    """All but what multiprocessing has in other programs of this machine, which come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "psm_"))}


def test_a_new_sender_leaves_a_living_ones_files_alone(folder: Path):
    with (
        open_sender("folder", 4096, 1, device(), folder) as one,
        open_sender("folder", 4096, 1, device(), folder) as other,
    ):
        assert {Path(each.description["folder"]) for each in (one, other)} == {
            path for path in folder.iterdir() if path.is_dir()
        }


def test_after_each_update_the_folder_is_empty(engine: Engine, folder: Path):
    with sender_for("folder", engine, folder, 4096) as sender:
        update(sender, engine, numbered(9, 1024))
        assert list(Path(sender.description["folder"]).iterdir()) == []


def test_a_full_or_forbidden_folder_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        open_sender("folder", 4096, 1, device(), tmp_path / "file")
    with open_sender("folder", 4096, 1, device(), tmp_path / "weights") as sender:
        sender.folder.rmdir()
        with pytest.raises(UserError, match=r"cannot write weights to .*make room"):
            push(numbered(3, 4096), sender, lambda bucket: Future())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("pigeon", 1, 1, torch.device("cpu")),
            "pigeon.*shared_memory, process_group, folder",
        ),
        (("shared_memory", 0, 1, torch.device("cpu")), "0 bytes"),
        (("folder", 1, 1, torch.device("cpu")), "name one"),
        (
            ("process_group", 1, 1, torch.device("cpu"), None, 1, "no.host.invalid"),
            "no.host.invalid",
        ),
    ],
)
def test_an_impossible_sender_is_an_error(arguments: tuple, message: str):
    with pytest.raises(UserError, match=message):
        open_sender(*arguments)


def test_a_worker_that_cannot_reach_the_trainer_says_why(tmp_path: Path):
    with open_sender("shared_memory", 4096, 1, torch.device("cpu")) as sender:
        memory = sender.description["memory"]
    worker = (0, 1, torch.device("cpu"), 1.0)
    elsewhere = memory | {"pid": 2**22 + 1}
    reused = memory | {"pid": os.getpid(), "fd": 0}
    for description, error, message in [
        ({"kind": "shared_memory", "memory": elsewhere}, UserError, "same host.*process_group or folder"),
        ({"kind": "shared_memory", "memory": reused}, UserError, "cannot open the memory"),
        (
            {"kind": "shared_memory", "memory": memory | {"of": "CUDA memory"}},
            UserError,
            "same kind of device",
        ),
        (
            {"kind": "folder", "folder": str(tmp_path / "other host")},
            UserError,
            "file system that both share",
        ),
        (
            {"kind": "process_group", "hardware": "cpu", "address": "127.0.0.1", "port": 1},
            TransportError,
            "port 1,",
        ),
        ({"kind": "process_group", "hardware": "npu"}, UserError, "npu"),
        ({"kind": "folder"}, ValueError, "transport"),
        ({}, ValueError, "transport"),
    ]:
        with pytest.raises(error, match=message):
            Receiver.open(description, *worker)


def test_a_trainer_listens_on_the_address_of_the_route_only(folder: Path):
    before = listening()
    engine = Engine(1)
    try:
        with closing(sender_for("process_group", engine, folder, 4096)) as sender:
            update(sender, engine, numbered(3, 1024))
            addresses = {address.split(":")[0] for address in listening() - before}
            assert addresses == {"0100007F"}  # 127.0.0.1
    finally:
        engine.kill()


def listening() -> set[str]:
    """Addresses and ports, as the kernel writes them, on which this process listens."""
    mine = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


# Checksums and JSON


@given(shape=shapes, dtype=st.sampled_from(DTYPES), cut=st.integers(0, 9))
def test_checksum_adds_up_the_words_of_rows_and_over_parts(shape: tuple, dtype: torch.dtype, cut: int):
    tensor = random_bits(shape, dtype)
    rows = torch.atleast_1d(tensor)
    row_bytes = rows.shape[-1] * dtype.itemsize
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    expected = sum(
        int.from_bytes(raw[row + word : min(row + word + 8, row + row_bytes)], "little")
        for row in range(0, len(raw), row_bytes or 1)
        for word in range(0, row_bytes, 8)
    )
    assert checksum(tensor) == expected % 2**64
    word = 8 // dtype.itemsize
    cuts = [(-1, cut * word)] if rows.dim() == 1 else [(-1, cut * word), (0, cut)]
    for dim, position in cuts:
        position = min(position, rows.shape[dim])
        parts = rows.split([position, rows.shape[dim] - position], dim)
        assert sum(map(checksum, parts)) % 2**64 == expected % 2**64
    assert checksum(rows.mT.contiguous().mT if rows.dim() > 1 else rows) == expected % 2**64


def test_checksum_of_a_large_tensor_needs_no_memory():
    assert checksum(torch.full((70_000,), -1, dtype=torch.int64)) == (70_000 * (2**64 - 1)) % 2**64
    (beyond,) = run_distributed(memory_of_checksum, 1)
    assert beyond < MIB


def memory_of_checksum() -> int:
    tensor = torch.zeros(64 * MIB, dtype=torch.bfloat16)
    tensor += 1
    checksum(tensor[:1000])
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    checksum(tensor)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


@given(
    st.builds(
        TensorSpec,
        st.text(),
        shapes,
        st.sampled_from(DTYPES),
        st.integers(0, 99).map(lambda n: n * ALIGNMENT),
    )
)
def test_buckets_survive_json(spec: TensorSpec):
    bucket = Bucket(1, spec.offset + spec.nbytes, (spec, spec), {"file": "a"})
    assert Bucket.from_json(json.loads(json.dumps(bucket.to_json()))) == bucket


GOOD_SPEC = {"name": "a", "shape": [2, 3], "dtype": "bfloat16", "offset": 16}
GOOD = {"slot": 0, "nbytes": 28, "tensors": [GOOD_SPEC], "location": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 2}, {"slot": True}, {"slot": "0"}, {"nbytes": -1}, {"nbytes": 27}, {"nbytes": 1.5},
        {"tensors": None}, {"location": 3}, {"more": 1},
        {"tensors": [GOOD_SPEC | {"dtype": "nn"}]}, {"tensors": [GOOD_SPEC | {"dtype": 3}]},
        {"tensors": [GOOD_SPEC | {"shape": [-2, -3]}]}, {"tensors": [GOOD_SPEC | {"shape": "ab"}]},
        {"tensors": [GOOD_SPEC | {"offset": 15}]}, {"tensors": [GOOD_SPEC | {"offset": -16}]},
        {"tensors": [GOOD_SPEC | {"name": 1}]}, {"tensors": [{}]}, {"tensors": [[]]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_bucket_is_refused(change: dict):
    Bucket.from_json(GOOD)
    with pytest.raises(ValueError, match="not a bucket"):
        Bucket.from_json(GOOD | change)


@pytest.mark.gpu
def test_memory_of_a_gpu_is_shared_and_freed_when_a_worker_is_killed():
    free = torch.accelerator.get_memory_info()[0]
    for _ in range(3):
        engine = Engine(2)
        try:
            with open_sender("shared_memory", 256 * MIB, 2, device(), timeout=60) as sender:
                assert sender.memory.device.type == device().type
                tensors = [(str(n), torch.full((16 * MIB,), float(n), device=device())) for n in range(9)]
                update(sender, engine, tensors)
                assert engine.received == [content(tensors)] * 2
                engine.open(sender.description)
                engine.workers[1].kill()
        finally:
            engine.kill()
    del tensors
    gc.collect()
    current_platform().synchronize()
    assert torch.accelerator.get_memory_info()[0] > free - 1024 * MIB
