"""From the engine's socket into TLS: one chunk at a time, sealed where it was read, offered again until it has left."""

import socket
import ssl
import time
from collections import deque

from protocol.quic.bulk import AHEAD_S, HELD_BYTES
from protocol.quic.conditioner import ShapedLink
from stage_agent.tunnel.burst import Burst
from stage_agent.tunnel.wire import END, KEEPALIVE, LENGTH_BYTES

FRAME_BYTES = 131_072
"""Length and content: eight full TLS records, small enough for a core's own cache at both ends."""
SHAPED_FRAME_BYTES = 16_384


class Outbound:
    """Used by the connection's own thread only. Everything raises ``OSError`` when a side is gone."""

    def __init__(self, local: socket.socket, channel: ssl.SSLSocket, link: ShapedLink | None, burst: Burst) -> None:
        self._local = local
        self._channel = channel
        self._link = link
        self._burst = burst
        self._frame = memoryview(bytearray(SHAPED_FRAME_BYTES if link is not None else FRAME_BYTES))
        self._pending: memoryview | None = None
        self._held: deque[tuple[float, bytes]] = deque()
        self._last_due_s = 0.0
        self.sealed = False
        """The engine has ended its direction."""
        self.sent_bytes = 0
        self.sent_s = time.monotonic()
        """When the peer was last told anything."""

    @property
    def blocked(self) -> bool:
        """Whether something waits for room in the socket to the peer."""
        return self._pending is not None

    @property
    def done(self) -> bool:
        """Whether the end has left."""
        return self.sealed and self._pending is None and not self._held

    def takes(self, now_s: float) -> bool:
        """Whether the engine's socket is to be read now."""
        if self.sealed or self._pending is not None:
            return False
        return self._link is None or (
            self._link.free_s - now_s <= AHEAD_S and len(self._held) * SHAPED_FRAME_BYTES < HELD_BYTES
        )

    def silence_s(self) -> float | None:
        """Since when the peer has been told nothing although it could be; None while something is on its way."""
        return None if self.sealed or self._pending is not None or self._held else self.sent_s

    def due_s(self, now_s: float) -> float | None:
        """When a shaped link has something to do again, if it has."""
        if self._link is None or self._pending is not None:
            return None
        moments = [self._held[0][0]] if self._held else []
        if not self.sealed and self._link.free_s - now_s > AHEAD_S:
            moments.append(self._link.free_s - AHEAD_S)
        return min(moments, default=None)

    def take(self, now_s: float) -> None:
        """Read once from the engine and send."""
        try:
            size = self._local.recv_into(self._frame[LENGTH_BYTES:])
        except BlockingIOError:
            return
        if not size:
            self.sealed = True
            self._offer(memoryview(END), now_s)
            return
        self._burst.begin(now_s)
        self._frame[:LENGTH_BYTES] = size.to_bytes(LENGTH_BYTES, "big")
        self._offer(self._frame[: LENGTH_BYTES + size], now_s)

    def keep_alive(self, now_s: float) -> None:
        """Say something. Only in silence."""
        assert self.silence_s() is not None
        self._offer(memoryview(KEEPALIVE), now_s)

    def push(self, now_s: float) -> None:
        """Send what is due."""
        while True:
            if self._pending is None:
                if not self._held or self._held[0][0] > now_s:
                    return
                self._pending = memoryview(self._held.popleft()[1])
            try:
                self._channel.write(self._pending)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return  # OpenSSL keeps what it began; the same bytes must be offered again
            size = len(self._pending) - LENGTH_BYTES
            self._pending = None
            self.sent_s = time.monotonic()
            if size:
                self.sent_bytes += size
                self._burst.moved(size, self.sent_s)

    def _offer(self, frame: memoryview, now_s: float) -> None:
        if self._link is None:
            self._pending = frame
        else:
            due_s = self._link.depart(len(frame), now_s, bounded=False)
            assert due_s is not None
            self._last_due_s = max(self._last_due_s, due_s + self._link.late_by_loss_s())
            self._held.append((self._last_due_s, bytes(frame)))
        self.push(now_s)
