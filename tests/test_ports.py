"""Ports that stay free for servers that come to them late."""

import socket
from contextlib import ExitStack

import pytest

from megatron_omni import ports


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    """Sets the range that the kernel gives away."""
    file = tmp_path / "range"
    monkeypatch.setattr(ports, "EPHEMERAL", file)
    return lambda first, last: file.write_text(f"{first}\t{last}\n")


def test_the_kernel_gives_it_nobody():
    first, last = map(int, ports.EPHEMERAL.read_text().split())
    for _ in range(20):
        assert not first <= ports.free_port() <= last


@pytest.mark.parametrize(
    ("first", "last", "left"), [(10_002, 65_535, (10_000, 10_001)), (1, 65_533, (65_534, 65_535))]
)
def test_taken_ones_are_passed_over(ephemeral, first, last, left):
    ephemeral(first, last)
    with ExitStack() as servers:
        for _ in left:
            port = ports.free_port()
            assert port in left
            servers.enter_context(socket.create_server(("", port)))  # fails on one that is taken
        with pytest.raises(OSError, match="all ports"):
            ports.free_port()


def test_where_the_kernel_gives_all_away_any_free_one_does(ephemeral):
    ephemeral(1, 65_535)
    assert ports.LOWEST <= ports.free_port() <= ports.HIGHEST
