"""A server that speaks the OpenAI API over real sockets and answers as a test's script says."""

import base64
import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from PIL import Image

from megatron_omni.config.schema import JudgeConfig
from megatron_omni.rewards.base import RewardResult
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.rewards.pool import RewardPool

MODEL = "judge"


@dataclass
class Reply:
    """What the server does with a request."""

    content: str | None = None
    """The judge's words, in a sound completion..."""
    finish_reason: str = "stop"
    body: Any = None
    """...or this body instead: JSON, or text as it is."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    """Seconds before it answers."""
    hang: bool = False
    """Never answers."""
    cut: bool = False
    """Closes the connection in the middle of the answer."""

    def encode(self) -> bytes:
        if isinstance(self.body, str):
            return self.body.encode()
        if self.body is not None:
            return json.dumps(self.body).encode()
        choice = {"index": 0, "finish_reason": self.finish_reason}
        choice["message"] = {"role": "assistant", "content": self.content}
        return json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}).encode()


def score(value: Any, **how: Any) -> Reply:
    return Reply(json.dumps({"score": value}), **how)


def picture(request: dict) -> np.ndarray:
    """The picture in a request, [H, W, 3] uint8."""
    (url,) = [part["image_url"]["url"] for part in request["messages"][0]["content"] if "image_url" in part]
    assert url.startswith("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def question(request: dict) -> str:
    (text,) = [part["text"] for part in request["messages"][0]["content"] if "text" in part]
    return text


class JudgeServer:
    """Calls `script` with each chat request. Can stop and start again on its port."""

    def __init__(self, script: Callable[[dict], Reply], port: int = 0):
        self.script, self.port = script, port
        self.requests: list[dict] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        self.stopping = threading.Event()
        self.server = _Server(("127.0.0.1", self.port), _Handler)
        self.server.judge = self
        self.port = self.server.server_port
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def wait_for(self, in_flight: int) -> None:
        """Returns once so many requests wait for their answer; fails if that takes too long."""
        deadline = time.monotonic() + 20
        while self.in_flight < in_flight:
            assert time.monotonic() < deadline, f"{self.in_flight} requests in flight, not {in_flight}"
            time.sleep(0.01)

    def stop(self) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self) -> "JudgeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    judge: JudgeServer


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        assert self.path in ("/v1/models", "/health")
        self._send(Reply(body={"object": "list", "data": [{"id": MODEL, "object": "model"}]}))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        judge = self.server.judge
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judge.lock:
            judge.requests.append(request)
            judge.in_flight += 1
            judge.most_in_flight = max(judge.most_in_flight, judge.in_flight)
        try:
            reply = judge.script(request)
            if reply.hang:
                judge.stopping.wait()
                return
            time.sleep(reply.delay)
        finally:
            with judge.lock:
                judge.in_flight -= 1
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        body = reply.encode()
        self.send_response(reply.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | reply.headers
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if reply.cut else body)

    def log_message(self, *_: Any) -> None:
        pass


def options(*urls: str, **settings: Any) -> RewardOptions:
    """Those of a judge at `urls`, impatient."""
    defaults = {"judge_model": MODEL, "judge_timeout": 5.0, "judge_retries": 2}
    return RewardOptions(JudgeConfig(urls, **(defaults | {f"judge_{k}": v for k, v in settings.items()})))


def assert_judges_alike_twice(url: str, model: str, reward: str = "judge_score") -> RewardResult:
    """For any server: the same pictures get the same scores again, from 0 to 1 or masked with a reason."""
    images = torch.randint(0, 256, (6, 3, 64, 96), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    rows = [{"prompt": f'a sign that says "{word}"'} for word in ("A", "BEE", "SEA", "D", "EE", "EFF")]
    with RewardPool(reward, 1, 60.0, options(url, model=model, timeout=60.0)) as pool:
        pool.check_prompts(rows)
        first, second = (pool.submit(images, rows).result() for _ in range(2))
    assert first.values.tolist() == second.values.tolist()
    assert first.valid.tolist() == second.valid.tolist()
    assert ((first.values >= 0) & (first.values <= 1)).all()
    assert first.valid.all() or "cannot be used" in first.error, first.error
    return first
