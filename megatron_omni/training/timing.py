"""Where an iteration's time goes."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timings:
    """Seconds by phase, accumulated until `take`."""

    def __init__(self, synchronize: Callable[[], None]):
        """`synchronize` waits for the device, so that a phase pays for the work it started."""
        self._synchronize = synchronize
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Metrics `time/<phase>` since the last call."""
        seconds = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return seconds
