"""A function on a thread of its own, which never keeps the process from ending."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any


def in_background(function: Callable[..., Any], *args: Any) -> Future:
    future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
