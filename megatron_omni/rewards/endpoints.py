"""Several servers that do the same work: load is spread, dead ones are avoided, failures are tried again."""

import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from megatron_omni.rewards.base import Unscored

FIRST_PAUSE = 0.5
"""Seconds before the first retry; each further pause is twice as long."""
LONGEST_PAUSE = 8.0
"""Seconds; also how long a server may be avoided at most before it is tried again."""
MARGIN = 10.0
"""Seconds for all but the requests of a call, such as encoding pictures."""

Client = TypeVar("Client")
Answer = TypeVar("Answer")


class TransientError(Exception):
    """A request failed that may succeed if sent again: no connection, no answer in time, a busy server."""


def is_transient(status: int) -> bool:
    """Whether a request that got this HTTP status may succeed if sent again."""
    return status in (408, 429) or status >= 500


def is_local(url: str) -> bool:
    """Whether its host is a loopback address, to which a proxy from the environment must not be asked."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # another name
        return False


@dataclass
class _Endpoint(Generic[Client]):
    client: Client
    in_flight: int = 0
    failures: int = 0
    """One after another, up to now."""
    rests_until: float = 0.0

    def open(self, now: float) -> bool:
        """A server that failed gets one request after its rest, and more once it has answered that."""
        return now >= self.rests_until and not (self.failures and self.in_flight)


class Endpoints(Generic[Client]):
    """Calls any of several servers, from many threads at once.

    A request goes to the server with the fewest in flight. After a transient failure it is sent again, to
    another server if there is one, `retries` times at most and after growing pauses with jitter, so that many
    clients do not strike at once. A server that fails is left alone for a while.
    """

    def __init__(self, clients: Iterable[Client], retries: int):
        self._endpoints = [_Endpoint(client) for client in clients]
        self._retries = retries
        self._lock = threading.Lock()

    def call(self, request: Callable[[Client], Answer]) -> Answer:
        """What `request` returns. Raises `Unscored` when all attempts ended in `TransientError`."""
        for attempt in range(self._retries + 1):
            endpoint = self._take()
            try:
                answer = request(endpoint.client)
            except TransientError as error:
                self._give_back(endpoint, failed=True)
                if attempt == self._retries:
                    raise Unscored(f"{error} (tried {attempt + 1} times)") from error
                time.sleep(_pause(attempt) * random.uniform(0.5, 1))
            except BaseException:
                self._give_back(endpoint, failed=False)
                raise
            else:
                self._give_back(endpoint, failed=False)
                return answer

    def time_limit(self, timeout: float) -> float:
        """Seconds `call` may take if every attempt takes `timeout` seconds, with a margin."""
        return (self._retries + 1) * timeout + sum(map(_pause, range(self._retries))) + MARGIN

    def _take(self) -> _Endpoint[Client]:
        with self._lock:
            now = time.monotonic()
            ready = [endpoint for endpoint in self._endpoints if endpoint.open(now)]
            if ready:
                endpoint = min(ready, key=lambda endpoint: endpoint.in_flight)
            else:
                endpoint = min(self._endpoints, key=lambda endpoint: endpoint.rests_until)
            endpoint.in_flight += 1
            return endpoint

    def _give_back(self, endpoint: _Endpoint[Client], failed: bool) -> None:
        with self._lock:
            endpoint.in_flight -= 1
            now = time.monotonic()
            if not failed:
                endpoint.failures = 0
                endpoint.rests_until = 0.0
            elif now >= endpoint.rests_until:  # else it is one of many that failed together
                endpoint.rests_until = now + _pause(endpoint.failures)
                endpoint.failures += 1


def _pause(number: int) -> float:
    return min(FIRST_PAUSE * 2**number, LONGEST_PAUSE)
