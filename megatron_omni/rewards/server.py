"""Serves any reward over HTTP, so that it can run on another host.

python -m megatron_omni.rewards.server --reward ocr --host 0.0.0.0 --port 8100 --reward-workers 8

GET /health → {"reward": name, "restarts": scoring processes that were replaced}.
POST /score: a `megatron_omni.wire` message with "images" ([B, H, W, 3] uint8) and "metadata" (B dictionaries)
→ one with "values" ([B] float32, NaN where scoring failed) and "error" (why).
POST /check: {"metadata": [...]} → {"error": why scoring cannot begin with these prompts, or ""}.
What a client did wrong is status 400, 404, 411 or 413 with {"error": message}.
"""

import json
import math
import signal
import sys
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
import tyro

from megatron_omni.config.schema import JudgeConfig
from megatron_omni.errors import UserError
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.wire import CONTENT_TYPE, pack, unpack

MAX_BODY = 512 * 2**20
"""Bytes of a request at most; 16 pictures of 2048² pixels are 192 MiB."""
SILENCE = 60.0
"""Seconds that a client may leave a connection silent before it is closed."""


@dataclass
class ServerConfig:
    """What is served, and where."""

    reward: str
    """Reward: a registered name or a 'package.module:attribute' path."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all. Anyone who can connect can ask for scores."""
    port: int = 8100
    """Port to listen on; 0 takes a free one."""
    reward_workers: int = 1
    """Scoring processes."""
    reward_timeout: float = 60.0
    """Seconds one batch may take to score before its samples count as failed."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)


class RewardServer(ThreadingHTTPServer):
    """Scores with `pool`, each connection in a thread of its own."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], reward: str, pool: RewardPool):
        super().__init__(address, _Handler)
        self.reward = reward
        self.pool = pool

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host}:{port}"


class _Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    timeout = SILENCE

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply_json(200, {"reward": self.server.reward, "restarts": self.server.pool.restarts})
        else:
            self._reply_json(404, {"error": f"there is no {self.path}; try /health"})

    def do_POST(self) -> None:
        answers = {"/score": self._score, "/check": self._check}
        try:
            if self.path not in answers:
                raise _Refused(404, f"there is no {self.path}; try /score or /check")
            answers[self.path](self._body())
        except _Refused as refused:
            self.close_connection = True  # what is left of the body would be read as the next request
            self._reply_json(refused.status, {"error": str(refused)})

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refused(411, "Content-Length is missing")
        if int(length) > MAX_BODY:
            raise _Refused(413, f"the request has {length} bytes, more than {MAX_BODY}; send smaller batches")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(400, f"the request ends after {len(body)} of {length} bytes")
        return body

    def _score(self, body: bytes) -> None:
        images, metadata = _parse_batch(body)
        result = self.server.pool.submit(images, metadata).result()
        values = result.values.where(result.valid, math.nan).numpy()
        self._reply(200, CONTENT_TYPE, pack({"error": result.error}, {"values": values}))

    def _check(self, body: bytes) -> None:
        try:
            metadata = json.loads(body)["metadata"]
        except (ValueError, KeyError, TypeError) as error:
            raise _Refused(400, f'not JSON with "metadata": {error!r}') from error
        _check_metadata(metadata)
        try:
            self.server.pool.check_prompts(metadata)
        except UserError as error:
            self._reply_json(200, {"error": str(error)})
        else:
            self._reply_json(200, {"error": ""})

    def _reply_json(self, status: int, values: dict[str, Any]) -> None:
        self._reply(status, "application/json", json.dumps(values).encode())

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are not worth a line each."""


def _parse_batch(body: bytes) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """[B, 3, H, W] uint8, and B rows."""
    try:
        values, arrays = unpack(body)
        images, metadata = arrays["images"], values["metadata"]
    except (ValueError, KeyError, TypeError) as error:
        raise _Refused(400, f'not a message with "images" and "metadata": {error!r}') from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape:
        raise _Refused(400, f"images must be [B, H, W, 3] uint8, not {list(images.shape)} {images.dtype}")
    _check_metadata(metadata)
    if len(metadata) != len(images):
        raise _Refused(400, f"{len(images)} images came with metadata for {len(metadata)}")
    return torch.from_numpy(images).permute(0, 3, 1, 2), metadata


def _check_metadata(metadata: Any) -> None:
    if not (
        isinstance(metadata, list) and all(isinstance(row, dict) and "prompt" in row for row in metadata)
    ):
        raise _Refused(400, 'metadata must be a list of objects with "prompt"')


def main(arguments: list[str]) -> int:
    config = tyro.cli(
        ServerConfig,
        prog="python -m megatron_omni.rewards.server",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options = RewardOptions(judge=config.judge)
    try:
        with (
            RewardPool(config.reward, config.reward_workers, config.reward_timeout, options) as pool,
            RewardServer((config.host, config.port), config.reward, pool) as server,
        ):
            print(f"serving reward {config.reward!r} at {server.url}", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot listen on {config.host} port {config.port}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
