"""A session carried by TLS over TCP, for paths that carry no UDP. Everything goes by the one stream, in order."""

import asyncio
from collections.abc import Callable

from protocol.codec import MAX_CONTROL_BYTES, MAX_GREETING_BYTES, FrameReader, frame
from protocol.errors import WireError
from protocol.quic.address import shown
from protocol.quic.bulk import DelayLine
from protocol.quic.carriage import Conversation
from protocol.quic.conditioner import ShapedLink
from protocol.quic.interface import Path

READ_BYTES = 65_536
_KEEP_ALIVE = frame(b"")
"""A frame without content; the other side drops it."""


class TlsCarrier:
    """See the module and ``session.Carrier``. ``run`` reads until the end and must be awaited by the one who made it."""

    conversation: Conversation

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        now_us: Callable[[], int],
        idle_s: float,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._now_us = now_us
        self._idle_s = idle_s
        self._frames = FrameReader(MAX_GREETING_BYTES)
        self._pending_since_us: int | None = None
        self._shut = False
        self._line: DelayLine | None = None
        self._address = shown(writer.get_extra_info("peername"))
        self.sent_us = self.heard_us = now_us()
        self.unanswered_since_us: int | None = None

    @property
    def path(self) -> Path:
        """Always the fallback."""
        return "tls"

    @property
    def address(self) -> str:
        """TCP connections do not move."""
        return self._address

    @property
    def interface(self) -> str:
        """Not known here."""
        return ""

    @property
    def late_us(self) -> int:
        """Not known here."""
        return 0

    @property
    def datagrams(self) -> bool:
        """None here."""
        return False

    def shape(self, link: ShapedLink | None) -> None:
        """Send through ``link`` from now on."""
        self._line = DelayLine(self._writer, link) if link is not None else None

    def write(self, raw: bytes) -> None:
        """One frame."""
        if not self._shut:
            self._mark_sent()
            self._put(frame(raw))

    def write_datagram(self, raw: bytes) -> bool:
        """Never: the session takes the stream instead."""
        del raw
        return False

    def outstanding_bytes(self) -> int:
        """What the kernel has not taken yet, and what a shaped link holds."""
        held = sum(len(chunk) for _, chunk in self._line.waiting) if self._line is not None else 0
        return self._writer.transport.get_write_buffer_size() + held

    def pending_since_us(self) -> int | None:
        """When the unfinished frame began."""
        return self._pending_since_us

    def trust(self) -> None:
        """The peer is admitted: its frames may be as large as messages get."""
        self._frames.limit = MAX_CONTROL_BYTES

    def keep_alive(self) -> None:
        """Something for middle boxes and the peer's idle timer."""
        self._mark_sent()
        self._put(_KEEP_ALIVE)

    def shut(self, reason: str) -> None:
        """What is buffered still leaves; the reason is not told on this lane."""
        del reason
        if not self._shut:
            self._shut = True
            self._writer.close()

    async def run(self) -> None:
        """Read and judge until the connection ends; the conversation is told, and nothing is raised for a peer's fault."""
        reason = "peer_closed"
        try:
            while not self._shut:
                async with asyncio.timeout(self._idle_s):
                    data = await self._reader.read(READ_BYTES)
                if not data:
                    break
                self._take(data)
        except TimeoutError:
            reason = "idle_timeout"
        except OSError:
            reason = "peer_closed"
        except asyncio.CancelledError:
            reason = "closed"
            raise
        finally:
            self._shut = True
            if self._line is not None:
                self._line.stop()
            self._writer.transport.abort()
            self.conversation.closed(reason)

    def _mark_sent(self) -> None:
        self.sent_us = self._now_us()
        self.unanswered_since_us = self.unanswered_since_us or self.sent_us

    def _take(self, data: bytes) -> None:
        self.heard_us, self.unanswered_since_us = self._now_us(), None
        try:
            frames = self._frames.feed(data)
        except WireError as error:
            self.conversation.broken(error.reason)
            return
        if not self._frames.pending:
            self._pending_since_us = None
        elif frames or self._pending_since_us is None:
            self._pending_since_us = self.heard_us
        for raw in frames:
            if raw:
                self.conversation.frame(raw, "stream")

    def _put(self, data: bytes) -> None:
        if self._writer.transport.is_closing():
            return
        if self._line is not None:
            self._line.put(data)
        else:
            self._writer.write(data)
