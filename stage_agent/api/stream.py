"""Server-sent events: the event ring as it grows.

A reader that is too slow skips what the ring forgot and sees the gap in ``seq``. The number of readers is bounded.
"""

import asyncio
import json
from collections.abc import AsyncIterator

from stage_agent.api.documents import event_document
from stage_agent.api.problems import Problem
from stage_agent.api.snapshot import NodeSnapshotSource

MAX_READERS = 32
POLL_S = 0.25
KEEPALIVE_S = 15.0


class EventStreams:
    """Counts readers and makes their streams."""

    def __init__(self, view: NodeSnapshotSource) -> None:
        self._view = view
        self._readers = 0
        self._closing = False

    def close(self) -> None:
        """End all streams soon: the server stops."""
        self._closing = True

    def open(self, after: int) -> AsyncIterator[str]:
        """A stream of events newer than ``after``; ``Problem`` 503 when there are too many readers."""
        if self._readers >= MAX_READERS:
            raise Problem(
                503,
                "too_many_streams",
                f"already {MAX_READERS} readers of the event stream; close one or poll /api/v1/events",
                headers={"retry-after": "5"},
            )
        return self._follow(after)

    async def _follow(self, after: int) -> AsyncIterator[str]:
        self._readers += 1
        try:
            newest = self._view.events(0)
            if newest and newest[-1].seq < after:  # the daemon was restarted and counts from 1 again
                after = 0
            yield ": stagemesh events\n\n"
            quiet_s = 0.0
            while not self._closing:
                for event in self._view.events(after):
                    after, quiet_s = event.seq, 0.0
                    document = json.dumps(event_document(event, event.at_us), ensure_ascii=False)
                    yield f"id: {event.seq}\ndata: {document}\n\n"
                if quiet_s >= KEEPALIVE_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(POLL_S)
                quiet_s += POLL_S
        finally:
            self._readers -= 1
