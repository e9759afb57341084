"""One deadline that may move at any time. Moved or called off it costs no wake, and most deadlines are: answers come."""

import asyncio

from protocol.beat import EARLY_US
from stage_agent.clock import monotonic_us


class Alarm:
    """For one waiter on the running loop. Nothing rings before ``wait``."""

    def __init__(self) -> None:
        self._rings = asyncio.Event()
        self._handle: asyncio.TimerHandle | None = None
        self._due_us = 0

    def move(self, due_us: int) -> None:
        """Ring then instead, if somebody waits."""
        if self._handle is not None and due_us != self._due_us:
            self._arm(due_us)

    async def wait(self, due_us: int) -> None:
        """Until that moment (µs of the monotonic clock) or the one it was moved to."""
        self._rings.clear()
        self._arm(due_us)
        try:
            await self._rings.wait()
        finally:
            self._disarm()

    def _arm(self, due_us: int) -> None:
        self._disarm()
        self._due_us = due_us
        left_us = due_us - monotonic_us()
        wait_s = (left_us + EARLY_US) / 1e6 if left_us > 0 else 0.0
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._rings.set)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
