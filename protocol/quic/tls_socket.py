"""TLS on a socket that can change hands: an asyncio transport over ``ssl.SSLSocket``.

asyncio's own TLS keeps the connection's state in memory buffers inside the event loop. Here OpenSSL reads and writes the
socket itself: two copies fewer, and a stream that outgrows the loop can be lent to a thread (``lend``), which then is the
only one to touch it. OpenSSL's objects are not safe under two threads: one thread per connection, both directions.

Unlike asyncio's, this transport stays writable after the peer has ended its direction, as TLS 1.3 allows. Like asyncio's
it takes the end of the connection for the end of the bytes: whoever speaks here must frame what it says.
"""

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Iterable

PIECE_BYTES = 65_536
"""Encrypted without a pause: a few hundredths of a millisecond of one core."""
BATCH_BYTES = 131_072
"""Decrypted without a pause; a buffer of this size per connection."""
REFUSED_READS = 4
RECORD_BYTES = 16_384
"""The most that one read of TLS gives."""
BUFFER_BYTES = 1_048_576
GOODBYE_S = 5.0
"""How long a closed connection waits for the peer's own goodbye: a reset could cut off what is still on its way."""


async def shake_hands(
    plain: socket.socket, context: ssl.SSLContext, *, server_side: bool, seconds: float
) -> ssl.SSLSocket:
    """TLS over a connected socket, which is closed when this raises ``OSError`` (``ssl.SSLError``) or ``TimeoutError``."""
    plain.setblocking(False)
    with contextlib.suppress(OSError):  # a UNIX socket in a test has no such option
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        channel = context.wrap_socket(plain, server_side=server_side, do_handshake_on_connect=False)
    except OSError:
        plain.close()
        raise
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    channel.do_handshake()
                except ssl.SSLWantReadError:
                    await _ready(channel, writing=False)
                except ssl.SSLWantWriteError:
                    await _ready(channel, writing=True)
                else:
                    return channel
    except BaseException:
        _close_after_refusal(channel)
        raise


def _close_after_refusal(channel: ssl.SSLSocket) -> None:
    """Read past what has come: closing over unread bytes is a reset, and a reset can take the alert from the peer."""
    with contextlib.suppress(OSError):
        for _ in range(REFUSED_READS):
            if not socket.socket.recv(channel, PIECE_BYTES):
                break
    channel.close()


async def _ready(channel: socket.socket, *, writing: bool) -> None:
    loop, descriptor = asyncio.get_running_loop(), channel.fileno()
    now: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not now.done():
            now.set_result(None)

    (loop.add_writer if writing else loop.add_reader)(descriptor, wake)
    try:
        await now
    finally:
        (loop.remove_writer if writing else loop.remove_reader)(descriptor)


def streams(channel: ssl.SSLSocket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams as asyncio has them, over a connection whose handshake is over. Raises ``OSError`` when the peer is gone."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=BUFFER_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        transport = TlsTransport(channel, protocol)
    except OSError:  # a reset that came with the last bytes of the handshake: nobody is at the other end
        channel.close()
        raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class TlsTransport(asyncio.Transport):
    """See the module. Made on the loop that will drive it; the protocol is told at once that the connection stands."""

    def __init__(self, channel: ssl.SSLSocket, protocol: asyncio.Protocol) -> None:
        super().__init__({"ssl_object": channel, "socket": channel, "peername": channel.getpeername()})
        self._channel = channel
        self._descriptor = channel.fileno()
        self._scratch = memoryview(bytearray(BATCH_BYTES))
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[memoryview] = deque()
        self._held_bytes = 0
        self._high, self._low = BUFFER_BYTES, BUFFER_BYTES // 4
        self._choked = self._paused = self._ended = self._closing = self._gone = self._lent = False
        self._farewell: asyncio.TimerHandle | None = None
        protocol.connection_made(self)
        self._loop.add_reader(self._descriptor, self._readable)
        self._loop.call_soon(self._readable)  # what came with the handshake is in OpenSSL already: the socket is silent

    # ---- reading ----------------------------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Whether bytes are handed to the protocol."""
        return not (self._paused or self._ended or self._closing or self._lent)

    def pause_reading(self) -> None:
        """The protocol has enough."""
        if self.is_reading():
            self._loop.remove_reader(self._descriptor)
        self._paused = True

    def resume_reading(self) -> None:
        """The protocol wants more."""
        self._paused = False
        if self.is_reading():
            self._loop.add_reader(self._descriptor, self._readable)
            self._loop.call_soon(self._readable)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Whom to tell from now on."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Whom it tells."""
        return self._protocol

    def _readable(self) -> None:
        if not self.is_reading():
            return
        size, dry = 0, False
        try:
            while size <= BATCH_BYTES - RECORD_BYTES and not self._ended:
                part = int(self._channel.read(RECORD_BYTES, self._scratch[size:]))
                size += part
                self._ended = not part
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            dry = True
        except OSError as error:
            self._fail(error)
            return
        if size:
            self._protocol.data_received(bytes(self._scratch[:size]))
        if self._ended:
            self._loop.remove_reader(self._descriptor)
            self._protocol.eof_received()
        elif not dry and self.is_reading():
            self._loop.call_soon(self._readable)  # OpenSSL may hold the rest of a record

    # ---- writing ----------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send now what the socket takes, keep the rest. ``bytes`` are not copied."""
        if self._closing or self._gone or not data:
            return
        assert not self._lent
        view = memoryview(data).cast("B")
        if not isinstance(view.obj, bytes):
            view = memoryview(bytes(view))
        idle = not self._waiting
        self._waiting.extend(view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
        self._held_bytes += len(view)
        if idle:
            self._writable()
        if self._held_bytes > self._high and not self._choked:
            self._choked = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Each in turn."""
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        """Ending one direction only is left to the protocols above."""
        return False

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._held_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Low and high water mark in bytes."""
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See ``asyncio.WriteTransport``."""
        self._high = BUFFER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low
        if self._held_bytes > self._high and not self._choked:
            self._choked = True
            self._protocol.pause_writing()

    def _writable(self) -> None:
        """Send until the socket is full. A piece that did not fit must be offered again as it was."""
        try:
            while self._waiting:
                self._channel.write(self._waiting[0])
                self._held_bytes -= len(self._waiting.popleft())
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._loop.add_writer(self._descriptor, self._writable)
        except OSError as error:
            self._fail(error)
            return
        else:
            self._loop.remove_writer(self._descriptor)
            if self._closing:
                self._say_goodbye()
        if self._choked and self._held_bytes <= self._low:
            self._choked = False
            self._protocol.resume_writing()

    # ---- ending -----------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._closing or self._gone

    def close(self) -> None:
        """Flush, say goodbye, wait a little for the peer's, close."""
        if self._closing or self._gone or self._lent:
            return
        self._loop.remove_reader(self._descriptor)
        self._closing = True
        if not self._waiting:
            self._say_goodbye()

    def abort(self) -> None:
        """Close at once. Under a borrower the connection breaks, and the socket is closed when it is given back."""
        if self._lent and not self._gone:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._channel, socket.SHUT_RDWR)
        else:
            self._fail(None)

    def lend(self) -> ssl.SSLSocket:
        """The socket, which the caller alone uses until ``give_back``. Everything written must have left."""
        assert not self._waiting
        assert not self.is_closing()
        assert not self._lent
        self._loop.remove_reader(self._descriptor)
        self._lent = True
        self._scratch = memoryview(b"")
        return self._channel

    def give_back(self) -> None:
        """The borrower is done: close."""
        self._lent = False
        with contextlib.suppress(OSError, ValueError):
            self._channel.unwrap()
        self._fail(None)

    def _say_goodbye(self) -> None:
        try:
            self._channel.unwrap()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._farewell = self._loop.call_later(GOODBYE_S, self._fail, None)
            self._loop.add_reader(self._descriptor, self._discard)
        except (OSError, ValueError) as error:
            # Bytes of the peer that nobody will read stand before its goodbye: read past them.
            if isinstance(error, ssl.SSLError) and not self._ended:
                self._farewell = self._loop.call_later(GOODBYE_S, self._fail, None)
                self._loop.add_reader(self._descriptor, self._discard)
            else:
                self._fail(None)
        else:
            self._fail(None)

    def _discard(self) -> None:
        """After our goodbye: until the peer's, or until the connection ends."""
        try:
            if not socket.socket.recv(self._channel, PIECE_BYTES):
                self._fail(None)
        except BlockingIOError:
            return
        except OSError:
            self._fail(None)

    def _fail(self, error: OSError | None) -> None:
        if self._gone:
            return
        self._gone = True
        if self._farewell is not None:
            self._farewell.cancel()
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._waiting.clear()
        self._held_bytes = 0
        self._channel.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
