"""An engine server from the trainer's side."""

from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import requests

from megatron_omni import wire
from megatron_omni.errors import UserError
from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.rollout.vllm_omni.transport import Bucket
from megatron_omni.rollout.vllm_omni.transport.background import in_background

CONNECT_TIMEOUT = 10.0
"""Seconds."""
Answer = TypeVar("Answer")


class EngineLostError(Exception):
    """The engine died, hangs, or does not hold the weights it should."""


@dataclass(frozen=True)
class Health:
    engine_id: str
    """New at each start of the engine."""
    weight_version: str | None
    """None: the weights it was started with."""
    model_version: str | None
    """The same of the weights without an adapter."""
    asleep: bool


@dataclass(frozen=True)
class HeldWeights:
    """What the engine says of itself after a transfer."""

    version: str
    checksum: int
    missing: list[str]
    unknown: list[str]


class EngineClient:
    """Calls of one server.

    Each raises `EngineLostError` if it gets no answer within `timeout` seconds, or the engine fails, and
    `UserError` for what the engine refuses.
    """

    def __init__(self, url: str, timeout: float):
        self.url = url.rstrip("/")
        self.timeout = timeout

    @property
    def host(self) -> str:
        """Name or address of the engine's machine."""
        return urlsplit(self.url).hostname

    def within(self, timeout: float) -> "EngineClient":
        """The same engine, if it answers sooner."""
        return EngineClient(self.url, min(self.timeout, timeout))

    def health(self) -> Health:
        return self._answer(Health, "GET", "/health")

    def generate(self, request: SampleRequest) -> tuple[str | None, dict[str, np.ndarray]]:
        """The version of the weights that drew the sample, and its arrays."""
        try:
            metadata, arrays = wire.unpack(self._call("POST", "/generate", asdict(request)).content)
        except ValueError as error:
            raise EngineLostError(f"rollout engine {self.url} sent a damaged sample: {error}") from error
        return metadata["weight_version"], arrays

    def sleep(self) -> None:
        self._call("POST", "/sleep")

    def wake(self) -> None:
        self._call("POST", "/wake")

    def begin_weights(self, version: str, transport: dict[str, Any], adapter: dict[str, Any] | None) -> None:
        """`adapter`: {"rank", "alpha"} if an adapter is to come, and not a model."""
        kind = "model" if adapter is None else "adapter"
        update = {"version": version, "transport": transport, "kind": kind, "adapter": adapter}
        self._call("POST", "/weights/begin", update)

    def load_bucket(self, bucket: Bucket) -> Future:
        return in_background(self._call, "POST", "/weights/bucket", bucket.to_json())

    def end_weights(self, names: list[str]) -> HeldWeights:
        return self._answer(HeldWeights, "POST", "/weights/end", {"names": names})

    def _answer(self, kind: type[Answer], method: str, path: str, body: Any = None) -> Answer:
        answer = self._call(method, path, body)
        try:
            return kind(**answer.json())
        except (ValueError, TypeError):
            raise UserError(f"what answers at {self.url} is no rollout engine: {answer.text[:200]}") from None

    def _call(self, method: str, path: str, body: Any = None) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False  # no proxy stands between a trainer and its engines
            try:
                answer = session.request(
                    method, self.url + path, json=body, timeout=(CONNECT_TIMEOUT, self.timeout)
                )
            except requests.RequestException as error:
                raise EngineLostError(f"rollout engine {self.url} does not answer: {error}") from error
        if answer.ok:
            return answer
        message = f"rollout engine {self.url}{path}: {_error(answer)}"
        raise UserError(message) if answer.status_code == 400 else EngineLostError(message)


def _error(answer: requests.Response) -> str:
    try:
        return answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}: {answer.text[:200]}"
