"""Bulk streams: bytes over TLS/TCP with back-pressure, counted, shaped like everything else, observed as they flow.

``BulkReader`` and ``BulkWriter`` are used like asyncio's streams. Every read and every drain has a deadline. A stream
that runs long reports a sample each second and the rest when it closes; ``limited_by`` says what held it back: this
process's CPU, the application at this end, or the link (at the sending end this includes the reader at the other).
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.quic.conditioner import ShapedLink
from protocol.quic.interface import Direction, LimitedBy
from protocol.quic.tls_socket import TlsTransport

BUFFER_BYTES = 1_048_576
"""Per stream and direction: read ahead, and written but not yet taken by the kernel."""
CHUNK_BYTES = 65_536
PIECE_BYTES = 131_072
"""Encrypted without a pause: half a millisecond of one core."""
REPORT_US = 1_000_000
GAP_US = 500_000
SAMPLE_MIN_BYTES = 65_536
BUSY_SHARE = 0.85
WAIT_SHARE = 0.5
AHEAD_S = 0.05
"""How far a shaped stream may run ahead of its link's serialiser."""
HELD_BYTES = 16_777_216
"""What a shaped stream keeps back at the most, as a path keeps bytes under way: 200 MB/s over 75 ms."""
CUT_RETRY_S = 0.2
"""Within this time after a cut link is mended, what waited for it leaves."""

Observe = Callable[[Direction, int, int, LimitedBy], None]
"""Direction, bytes, microseconds, limit."""


@dataclass(slots=True)
class Meter:
    """Bytes and time of one direction since the last report.

    A pause of ``GAP_US`` ends a sample: a stream that carries a large frame now and then gives one sample per frame, and
    the time between frames counts for nothing.
    """

    direction: Direction
    observe: Observe
    size: int = 0
    waited_us: int = 0
    begun_us: int | None = None
    last_us: int = 0
    cpu_begun_us: int = 0

    def begin(self) -> int:
        """Call before moving bytes; the time now."""
        now_us = time.monotonic_ns() // 1_000
        if self.begun_us is not None and now_us - self.last_us >= GAP_US:
            self.report()
        if self.begun_us is None:
            self._start(now_us)
        return now_us

    def moved(self, size: int, began_us: int) -> None:
        """``size`` bytes moved by a call that began then; reports when a second has passed."""
        now_us = time.monotonic_ns() // 1_000
        if self.direction == "receive" and now_us - began_us >= GAP_US:
            self.report()
            self._start(now_us)  # what came after the pause only starts the clock
            return
        self.size += size
        self.waited_us += now_us - began_us
        self.last_us = now_us
        if self.begun_us is not None and now_us - self.begun_us >= REPORT_US:
            self.report()

    def report(self) -> None:
        """Emit a sample if there is enough to say, and start anew."""
        if self.begun_us is not None and self.size >= SAMPLE_MIN_BYTES:
            duration_us = max(1, self.last_us - self.begun_us)
            busy_us = time.process_time_ns() // 1_000 - self.cpu_begun_us
            limit: LimitedBy = "app"
            if busy_us >= BUSY_SHARE * duration_us:
                limit = "cpu"
            elif self.waited_us >= WAIT_SHARE * duration_us:
                limit = "link"
            self.observe(self.direction, self.size, duration_us, limit)
        self.size, self.waited_us, self.begun_us = 0, 0, None

    def restart(self) -> None:
        """Report what there is; the clock starts now."""
        self.report()
        self._start(time.monotonic_ns() // 1_000)

    def _start(self, now_us: int) -> None:
        self.size, self.waited_us, self.begun_us, self.last_us = 0, 0, now_us, now_us
        self.cpu_begun_us = time.process_time_ns() // 1_000


@dataclass(frozen=True, slots=True)
class Loan:
    """A bulk stream's connection in other hands: a thread of the borrower's is the only one to touch ``channel``.

    ``early`` came before. Samples go to ``observe``, on the loop. The transport breaks the connection under the borrower
    when the peer is not admitted any more; only ``give_back``, on the loop, closes the socket.
    """

    channel: ssl.SSLSocket
    early: bytes
    link: ShapedLink | None
    observe: Observe
    idle_s: float
    give_back: Callable[[], None]


class BulkReader:
    """The receiving half. Raises ``TimeoutError`` when nothing comes for ``timeout_s``."""

    def __init__(self, reader: asyncio.StreamReader, observe: Observe, timeout_s: float) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self.meter = Meter("receive", observe)

    async def read(self, limit: int) -> bytes:
        """Up to ``limit`` bytes; empty at the end."""
        began_us = self.meter.begin()
        async with asyncio.timeout(self._timeout_s):
            data = await self._reader.read(limit)
        self.meter.moved(len(data), began_us)
        return data

    async def readexactly(self, size: int) -> bytes:
        """Exactly ``size`` bytes. Raises ``asyncio.IncompleteReadError`` at the end.

        A large frame is one sample, from its first bytes on: how long the peer took to begin says nothing of the link.
        """
        parts: list[bytes] = []
        while size:
            if len(parts) == 1 and size >= SAMPLE_MIN_BYTES:
                self.meter.restart()
            part = await self.read(min(size, BUFFER_BYTES))
            if not part:
                raise asyncio.IncompleteReadError(b"".join(parts), size)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def rest(self) -> bytes:
        """What has come and was not read; nothing more will."""
        self._reader.feed_eof()
        return await self._reader.read()


class BulkWriter:
    """The sending half: ``write`` then ``await drain()``, which waits for the link. ``close`` ends the stream.

    ``drain`` raises ``TimeoutError`` when the peer takes nothing for ``timeout_s``, ``ConnectionError`` when it is gone.
    What is written is encrypted in pieces with the loop running in between: a heartbeat waits for one piece, not for all.
    """

    def __init__(
        self, writer: asyncio.StreamWriter, observe: Observe, timeout_s: float, link: ShapedLink | None = None
    ) -> None:
        self._writer = writer
        self._timeout_s = timeout_s
        self._delay_line = DelayLine(writer, link) if link is not None else None
        self._pending: deque[memoryview] = deque()
        self.meter = Meter("send", observe)
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hand over bytes, which must not change until drained; call ``drain`` after at most ``BUFFER_BYTES``."""
        self.meter.begin()
        self._pending.append(memoryview(data).cast("B"))

    async def drain(self) -> None:
        """Wait until the link has room again."""
        began_us = self.meter.begin()
        size = sum(len(data) for data in self._pending)
        async with asyncio.timeout(self._timeout_s):
            while self._pending:
                await self._send(self._pending.popleft())
        self.meter.moved(size, began_us)

    async def close(self) -> None:
        """Flush, say that it is over, and close. Never raises for a peer that is gone."""
        try:
            await self.drain()
            began_us = self.meter.begin()
            async with asyncio.timeout(self._timeout_s):
                if self._delay_line is not None:
                    await self._delay_line.flush()
                self._writer.transport.set_write_buffer_limits(high=1)  # 0 would pause an empty buffer for ever
                await self._writer.drain()
            self.meter.moved(0, began_us)
            self.meter.report()
            self._writer.close()
        except (OSError, TimeoutError):
            self.abort()

    async def lend(self, reader: BulkReader) -> Loan:
        """Both halves of the stream to a thread, for good. Raises ``OSError`` or ``TimeoutError`` like ``drain``."""
        await self.drain()
        transport = self._writer.transport
        assert isinstance(transport, TlsTransport)
        async with asyncio.timeout(self._timeout_s):
            if self._delay_line is not None:
                await self._delay_line.flush()
            transport.set_write_buffer_limits(high=1)
            await self._writer.drain()
        if transport.is_closing():
            raise ConnectionResetError("the peer is gone")
        channel = transport.lend()
        link = self._delay_line.link if self._delay_line is not None else None
        observe = self.meter.observe
        return Loan(channel, await reader.rest(), link, observe, self._timeout_s, transport.give_back)

    def abort(self) -> None:
        """Drop the connection at once."""
        self._pending.clear()
        if self._delay_line is not None:
            self._delay_line.stop()
        self._writer.transport.abort()

    async def _send(self, data: memoryview) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if start:
                await asyncio.sleep(0)
            if self._delay_line is None:
                self._writer.write(data[start : start + PIECE_BYTES])
                await self._writer.drain()
            else:
                self._delay_line.put(bytes(data[start : start + PIECE_BYTES]))
                await self._delay_line.drain()


@dataclass(slots=True)
class DelayLine:
    """A shaped stream: chunks leave when the link's serialiser and delay say so, in order.

    It wakes by the link's own clock, which is punctual where the loop's timers are not, and sends a little at a time:
    what fell due together must not keep the loop from its heartbeats.
    """

    writer: asyncio.StreamWriter
    link: ShapedLink
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    held_bytes: int = 0
    last_s: float = 0.0
    armed: bool = False
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, data: bytes) -> None:
        """Queue bytes at the moment the link can carry them."""
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            due_s = self.link.depart(len(chunk), time.monotonic(), bounded=False)
            assert due_s is not None
            self.last_s = max(self.last_s, due_s + self.link.late_by_loss_s())
            self.waiting.append((self.last_s, chunk))
            self.held_bytes += len(chunk)
        self.empty.clear()
        if not self.armed:
            self._arm()

    async def drain(self) -> None:
        """Until the serialiser is at most ``AHEAD_S`` ahead and ``HELD_BYTES`` wait, then until the kernel has room."""
        ahead_s = self.link.free_s - time.monotonic() - AHEAD_S
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)
        while self.held_bytes > HELD_BYTES:
            self.room.clear()
            await self.room.wait()
        await self.writer.drain()

    async def flush(self) -> None:
        """Until everything left."""
        if self.waiting:
            await self.empty.wait()

    def stop(self) -> None:
        """Forget what waits."""
        self.waiting.clear()
        self.held_bytes = 0
        self.empty.set()
        self.room.set()

    def _arm(self) -> None:
        self.armed = True
        self.link.wake(self.waiting[0][0], self._fire)

    def _fire(self) -> None:
        self.armed = False
        if self.waiting and self.link.is_cut:
            self.armed = True
            asyncio.get_running_loop().call_later(CUT_RETRY_S, self._fire)
            return
        now_s, sent = time.monotonic(), 0
        while self.waiting and self.waiting[0][0] <= now_s and sent < PIECE_BYTES:
            chunk = self.waiting.popleft()[1]
            sent += len(chunk)
            self.writer.write(chunk)
        self.held_bytes -= sent
        if self.held_bytes <= HELD_BYTES:
            self.room.set()
        if self.waiting:
            self._arm()
        else:
            self.empty.set()
