"""Retries are bounded, load is spread, and a server that fails is left alone and then tried again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.rewards import endpoints
from megatron_omni.rewards.base import Unscored
from megatron_omni.rewards.endpoints import Endpoints, TransientError, is_local


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(endpoints, "LONGEST_PAUSE", 0.1)


class Server:
    def __init__(self, works: bool = True):
        self.works = works
        self.calls = 0
        self.lock = threading.Lock()

    def __call__(self):
        with self.lock:
            self.calls += 1
        if not self.works:
            raise TransientError("down")
        time.sleep(0.005)
        return "answer"


def ask(pool: Endpoints, times: int, threads: int = 8) -> list[str]:
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(lambda _: pool.call(lambda server: server()), range(times)))


@given(retries=st.integers(0, 6), failures=st.integers(0, 8))
def test_a_request_is_sent_until_it_succeeds_and_never_more_often_than_allowed(retries, failures):
    sent = []

    def request(_):
        sent.append(1)
        if len(sent) <= failures:
            raise TransientError("busy")
        return len(sent)

    pool = Endpoints(["one"], retries)
    endpoints_pause, endpoints._pause = endpoints._pause, lambda number: 0.0
    try:
        if failures <= retries:
            assert pool.call(request) == failures + 1
        else:
            with pytest.raises(Unscored, match=f"busy.*tried {retries + 1} times"):
                pool.call(request)
    finally:
        endpoints._pause = endpoints_pause
    assert len(sent) == min(failures, retries) + 1


def test_other_errors_are_not_tried_again():
    sent = []

    def request(_):
        sent.append(1)
        raise Unscored("no")

    with pytest.raises(Unscored, match=r"^no$"):
        Endpoints(["one", "two"], 5).call(request)
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.1.2.3", True), ("[::1]", True),
        ("10.0.0.1", False), ("judge", False), ("localhost.example.org", False),
    ],
)  # fmt: skip
def test_local_addresses_are_known(host, local):
    assert is_local(f"http://{host}:8000/v1") == local


def test_load_is_spread():
    servers = [Server() for _ in range(3)]
    assert ask(Endpoints(servers, 0), 90, threads=9) == ["answer"] * 90
    assert all(server.calls >= 15 for server in servers)


def test_a_dead_server_is_left_alone_and_returned_to():
    dead, alive = Server(works=False), Server()
    pool = Endpoints([dead, alive], 3)
    assert ask(pool, 100) == ["answer"] * 100
    assert dead.calls < 20
    dead.works = True
    time.sleep(0.12)
    before = dead.calls
    ask(pool, 100)
    assert dead.calls - before > 20


def test_a_server_that_hung_gets_one_request_at_a_time_until_it_answers():
    hangs, alive = threading.Event(), Server()
    struck, lock = [], threading.Lock()

    def hung():
        with lock:
            struck.append(1)
        hangs.wait(0.3)
        raise TransientError("timeout")

    pool = Endpoints([hung, alive], 3)
    ask(pool, 8)  # half of the first requests go to each
    time.sleep(0.05)
    before = len(struck)
    ask(pool, 60)
    assert len(struck) - before <= 2


def test_the_time_limit_holds_all_attempts_and_pauses():
    assert Endpoints(["one"], 2).time_limit(1.0) == pytest.approx(3 * 1.0 + 0.02 + 0.04 + endpoints.MARGIN)
