"""A reward on another host gives what it gives here, whatever happens to the server meanwhile."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import requests
import torch

from megatron_omni.config.schema import HttpRewardConfig
from megatron_omni.errors import UserError
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.wire import pack, unpack

ROOT = Path(__file__).parents[2]
MISHAPS = "tests.rewards.example_rewards:first_pixel"


class Server:
    """`python -m megatron_omni.rewards.server` in a process of its own."""

    def __init__(self, reward: str, port: int = 0, workers: int = 1, timeout: float = 10.0):
        command = [
            sys.executable,
            "-m",
            "megatron_omni.rewards.server",
            "--reward",
            reward,
            "--port",
            str(port),
        ]
        command += ["--reward-workers", str(workers), "--reward-timeout", str(timeout)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith(f"serving reward {reward!r} at http://127.0.0.1:"), line
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(10)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def colours():
    with Server("colour_match", workers=2) as server:
        yield server


@pytest.fixture(scope="module")
def mishaps():
    with Server(MISHAPS, timeout=2.0) as server:
        yield server


def client(*urls: str, **settings: float) -> RewardPool:
    defaults = {"http_timeout": 5.0, "http_retries": 2}
    settings = defaults | {f"http_{name}": value for name, value in settings.items()}
    return RewardPool("http", 1, 5, RewardOptions(http=HttpRewardConfig(urls, **settings)))


def noise(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 12, 16), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )


def reds(count: int) -> torch.Tensor:
    pixels = torch.zeros(count, 3, 6, 8, dtype=torch.uint8)
    pixels[:, 0] = torch.arange(count)[:, None, None]
    return pixels


def rows(count: int, **mishaps: str) -> list[dict]:
    rows = [{"prompt": f"a {'red' if i % 2 else 'blue'} wall"} for i in range(count)]
    for index, mishap in mishaps.items():
        rows[int(index[1:])]["do"] = mishap
    return rows


def test_scores_equal_those_of_the_same_reward_here(colours):
    with client(colours.url) as remote, RewardPool("colour_match", 1, 5) as local:
        pending = [
            (remote.submit(noise(n), rows(n)), local.submit(noise(n), rows(n))) for n in (1, 5, 16, 40)
        ]
        for there, here in pending:
            assert there.result().values.tolist() == here.result().values.tolist()
            assert there.result().valid.all() and there.result().error == ""


@pytest.mark.parametrize("mishap", ["nan", "infinity", "raise", "hang"])
def test_samples_that_fail_on_the_server_are_masked_with_the_reason(mishaps, mishap):
    with client(mishaps.url) as pool:
        result = pool.submit(reds(4), rows(4, _2=mishap)).result()
    lost = [False, False, True, False] if mishap != "hang" else [True] * 4  # one process, one share
    assert result.valid.tolist() == [not each for each in lost]
    expected = {"nan": "nan", "infinity": "inf", "raise": "ValueError: bad sample", "hang": "within 2 s"}
    assert expected[mishap] in result.error and mishaps.url in result.error


def test_prompts_are_checked_on_the_server(colours):
    with client(colours.url) as pool:
        pool.check_prompts(rows(1000))
        with pytest.raises(UserError, match="no colour is named in the prompt 'a wall'"):
            pool.check_prompts([*rows(3), {"prompt": "a wall"}])


def test_all_servers_must_have_the_same_reward_and_one_must_answer(colours, mishaps):
    with client(colours.url, "http://127.0.0.1:9") as pool:
        pool.check_prompts(rows(1))
    with (
        client(colours.url, mishaps.url) as pool,
        pytest.raises(UserError, match="must have the same reward"),
    ):
        pool.check_prompts(rows(1))
    with client("http://127.0.0.1:9") as pool, pytest.raises(UserError, match="no reward server answers"):
        pool.check_prompts(rows(1))


def test_a_proxy_is_not_asked_for_a_server_on_this_host(colours, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with client(colours.url) as pool:
        pool.check_prompts(rows(1))
        assert pool.submit(reds(2), rows(2)).result().valid.all()


def test_batches_cut_off_by_a_killed_server_are_scored_by_its_successor():
    slow = [{"prompt": "", "do": "sleep", "seconds": 0.5} for _ in range(4)]
    with Server(MISHAPS) as first, client(first.url, retries=5) as pool:
        pending = pool.submit(reds(4), slow)
        time.sleep(0.7)
        first.stop(signal.SIGKILL)
        assert not pending.done()
        with Server(MISHAPS, port=first.port):
            result = pending.result()
            assert result.valid.all(), result.error


def test_a_server_that_stays_away_masks_its_batch_within_a_bounded_time():
    with Server(MISHAPS) as server, client(server.url) as pool:
        assert pool.submit(reds(2), rows(2)).result().valid.all()
        server.stop(signal.SIGKILL)
        start = time.monotonic()
        result = pool.submit(reds(20), rows(20)).result()
        assert time.monotonic() - start < 15
        assert not result.valid.any() and "tried 3 times" in result.error


def test_a_server_asked_to_stop_ends_with_its_scoring_processes():
    with Server("brightness") as server:
        with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as children:
            workers = children.read().split()
        assert len(workers) == 1
        assert server.stop() == 0
        assert not Path(f"/proc/{workers[0]}").exists()


def message(metadata: list | None = None, images: np.ndarray | None = None) -> bytes:
    """A request for scores, without the parts that are None."""
    return pack(
        {} if metadata is None else {"metadata": metadata}, {} if images is None else {"images": images}
    )


ONE = [{"prompt": ""}]
PIXELS = np.zeros((1, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not a message"),
        (b"\x00" * 100, "not a message"),
        (pickle.dumps({"images": [1]}), "not a message"),
        (message(ONE, PIXELS)[:-5], "not a message"),
        (message(ONE), "images"),
        (message(images=PIXELS), "metadata"),
        (message(ONE, PIXELS.astype(float)), "uint8, not .* float64"),
        (message(ONE, PIXELS.transpose(0, 3, 1, 2)), r"\[1, 3, 4, 4\]"),
        (message([], PIXELS[:0]), r"\[0, 4, 4, 3\]"),
        (message(ONE, PIXELS.repeat(2, 0)), "2 images"),
        (message(["cat"], PIXELS), "objects"),
    ],
)
def test_a_damaged_request_is_refused_and_the_server_goes_on(mishaps, body, complaint):
    response = requests.post(f"{mishaps.url}/score", data=body, timeout=5)
    assert response.status_code == 400
    assert re.search(complaint, response.json()["error"])
    good = message(rows(2), np.full((2, 4, 4, 3), 9, np.uint8))
    answer, arrays = unpack(requests.post(f"{mishaps.url}/score", data=good, timeout=5).content)
    assert arrays["values"].tolist() == [9, 9] and answer["error"] == ""


def raw(server: Server, head: str, body: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(4096):
            answer += part
        return answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /score HTTP/1.1\nHost: x\nContent-Length: 1099511627776", 413),
        ("POST /score HTTP/1.1\nHost: x\nContent-Length: -1", 411),
        ("POST /score HTTP/1.1\nHost: x", 411),
        ("POST /score HTTP/1.1\nHost: x\nContent-Length: 1000", 400),
        ("POST /nonsuch HTTP/1.1\nHost: x\nContent-Length: 0", 404),
        ("GET /nonsuch HTTP/1.1\nHost: x\nConnection: close", 404),
    ],
)
def test_an_oversized_or_broken_off_request_is_refused_at_once(mishaps, head, status):
    start = time.monotonic()
    answer = raw(mishaps, head, b"only this")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert time.monotonic() - start < 10
    assert requests.get(f"{mishaps.url}/health", timeout=5).json()["reward"] == MISHAPS


@contextmanager
def answering(status: int, body: bytes):
    """A server that gives this answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            calls.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    calls = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", calls
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "message", "attempts"),
    [
        (200, b"<html>", "damaged", 1),
        (200, pack({"error": ""}, {}), "damaged", 1),
        (200, pack({}, {"values": np.zeros(3, np.float32)}), "damaged", 1),
        (200, pack({"error": ""}, {"values": np.zeros(2, np.float32)}), "values of shape", 1),
        (200, pack({"error": ""}, {"values": np.array([1, 1, np.nan], np.float32)}), "returned nan", 1),
        (400, b"no", "HTTP 400", 1),
        (503, b"no", "HTTP 503.*tried 3 times", 3),
        (429, b"no", "HTTP 429.*tried 3 times", 3),
    ],
)  # fmt: skip
def test_a_wrong_answer_masks_and_only_a_fault_of_the_moment_is_tried_again(status, body, message, attempts):
    with answering(status, body) as (url, calls), client(url) as pool:
        result = pool.submit(reds(3), rows(3)).result()
    assert not result.valid[2] and re.search(message, result.error), result.error
    assert result.valid.sum() == (2 if "nan" in message else 0)
    assert calls == ["/score"] * attempts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "brigthness"], "Did you mean 'brightness'"),
        (["--reward", "brightness", "--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_exits_with_2(arguments, message):
    command = [sys.executable, "-m", "megatron_omni.rewards.server", *arguments]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("error: ") and message in outcome.stderr


def test_memory_of_the_client_and_server_stays_flat(colours):
    def resident() -> int:
        pids = [colours.process.pid, *[worker.process.pid for worker in pool._workers]]
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    images = torch.zeros(16, 3, 128, 128, dtype=torch.uint8)
    with client(colours.url) as pool:
        for _ in range(20):
            assert pool.submit(images, rows(16)).result().valid.all()
        before = resident()
        for _ in range(100):
            pool.submit(images, rows(16)).result()
        assert resident() - before < 15e6  # the batches alone are 80 MB
