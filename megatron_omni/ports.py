"""TCP ports for servers that are told theirs, and take long to start."""

import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 10_000, 65_535


def free_port() -> int:
    """One that nothing listens on, and that the kernel gives nobody who asks for any free port.

    So it is still free when a server has loaded what it needs, seconds later, and comes to listen on it.
    Raises `OSError` if there is none.
    """
    first, last = map(int, EPHEMERAL.read_text().split())
    ports = [*range(LOWEST, first), *range(last + 1, HIGHEST + 1)] or range(LOWEST, HIGHEST + 1)
    for port in SystemRandom().sample(ports, len(ports)):  # a run's seed must not choose it
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"all ports from {LOWEST} to {HIGHEST} are taken")
