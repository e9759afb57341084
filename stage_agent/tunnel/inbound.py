"""From TLS to the engine's socket: records are decrypted into one buffer, and only their contents are passed on."""

import contextlib
import socket
import ssl
import time
from collections import deque

from protocol.errors import WireError
from protocol.quic.tls_socket import RECORD_BYTES
from stage_agent.tunnel.burst import Burst
from stage_agent.tunnel.wire import CHUNK_BYTES, KEEPALIVE_LENGTH, LENGTH_BYTES

BOX_BYTES = 131_072


class Inbound:
    """Used by the connection's own thread only.

    Raises ``OSError`` when a side is gone, ``EOFError`` when the stream ends before its end, ``WireError`` for nonsense.
    """

    def __init__(self, channel: ssl.SSLSocket, local: socket.socket, burst: Burst) -> None:
        self._channel = channel
        self._local = local
        self._burst = burst
        self._box = memoryview(bytearray(BOX_BYTES))
        self._spans: deque[memoryview] = deque()
        self._length = bytearray()
        self._left = 0
        self.ended = False
        """The peer has ended its direction."""
        self.received_bytes = 0
        self.heard_s = time.monotonic()

    @property
    def blocked(self) -> bool:
        """Whether something waits for the engine."""
        return bool(self._spans)

    @property
    def done(self) -> bool:
        """Whether all was passed on, the end too."""
        return self.ended and not self._spans

    @property
    def mid_chunk(self) -> bool:
        """Whether the peer has announced more than has come: who waits now waits for the link."""
        return bool(self._left or self._length)

    def early(self, content: bytes) -> None:
        """What came before this thread took over."""
        if content:
            self._parse(memoryview(content))
            self.deliver()

    def receive(self) -> None:
        """Read what there is, up to the buffer's size, and pass it on. Nothing may be undelivered."""
        assert not self._spans
        size, read, box = 0, self._channel.read, self._box
        try:
            # A record is always read whole, so OpenSSL never holds bytes of which the socket knows nothing.
            while size <= BOX_BYTES - RECORD_BYTES:
                part = int(read(RECORD_BYTES, box[size:]))
                size += part
                if part < RECORD_BYTES:
                    if not part:
                        raise EOFError("the tunnel's stream ended before its end")
                    break
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        if size:
            self.heard_s = time.monotonic()
            self._parse(box[:size])
            self.deliver()

    def deliver(self) -> None:
        """Pass on what the engine takes, and the end after it."""
        try:
            while self._spans:
                size = self._local.send(self._spans[0])
                self.received_bytes += size
                if size < len(self._spans[0]):
                    self._spans[0] = self._spans[0][size:]
                else:
                    self._spans.popleft()
        except BlockingIOError:
            return
        if self.ended:
            with contextlib.suppress(OSError):  # the engine may have closed both directions
                self._local.shutdown(socket.SHUT_WR)

    def _parse(self, view: memoryview) -> None:
        while view:
            if self._left:
                span = view[: self._left]
                self._left -= len(span)
                self._spans.append(span)
                self._burst.moved(len(span), self.heard_s)
                view = view[len(span) :]
                continue
            missing = LENGTH_BYTES - len(self._length)
            self._length += view[:missing]
            view = view[missing:]
            if len(self._length) < LENGTH_BYTES:
                return
            length = int.from_bytes(self._length, "big")
            self._length.clear()
            if not length:
                self.ended = True
                return
            if length == KEEPALIVE_LENGTH:
                continue
            if length > CHUNK_BYTES:
                raise WireError("oversized", f"a tunnel chunk of {length} bytes is over {CHUNK_BYTES}")
            self._left = length
