"""Samples run beside each other; whoever changes the weights runs alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    def __init__(self):
        self.changed = asyncio.Condition()
        self.inside = 0
        self.closed = False

    @asynccontextmanager
    async def through(self) -> AsyncIterator[None]:
        """Waits while it is closed; then it cannot close until this context ends."""
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.inside += 1
        try:
            yield
        finally:
            async with self.changed:
                self.inside -= 1
                self.changed.notify_all()

    async def close(self) -> None:
        """Lets no one in from now on, and returns when all are out."""
        async with self.changed:
            self.closed = True
            await self.changed.wait_for(lambda: self.inside == 0)

    async def open(self) -> None:
        async with self.changed:
            self.closed = False
            self.changed.notify_all()
