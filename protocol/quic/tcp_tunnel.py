"""QUIC packets over TCP, for newcomers whom no UDP reaches.

The TLS lane lets nobody in who is not admitted, and Python's TLS cannot ask a stranger for a certificate that it does not
know yet. QUIC here can (``mutual``). So a newcomer that gets no answer by UDP sends the very same packets through a TCP
connection to the port of the same number, and everything that guards a stranger's handshake guards this one: the limits
of the router, the pins, the proof of the token, the deadlines of sessions. A tunnel begins with ``TUNNEL_TYPE``, which no
TLS connection begins with; packets follow, each after its length. It lives for one conversation, and is bounded in time
and bytes. Members do not use it: their control runs over the TLS lane, which knows them.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

TUNNEL_TYPE = b"Q"
LENGTH_BYTES = 2
LIMIT_S = 12.0
"""Longer than connecting, asking and being answered may take."""
TAKEN_MAX_BYTES = 4_194_304
BUFFER_MAX_BYTES = 2_097_152
"""What does not fit is lost, as in a router; QUIC sends it again."""


class TunnelAddress(tuple[str, int]):
    """The address of a tunnel's other end: equal to itself alone, so that it is never taken for one that UDP reaches."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Identity."""
        return self is other

    def __ne__(self, other: object) -> bool:
        """Identity."""
        return self is not other

    def __hash__(self) -> int:
        """Identity."""
        return id(self)


class Tunnel:
    """One end over an open TCP connection. ``address`` stands for the other end wherever a socket address is wanted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        host, port = (writer.get_extra_info("peername") or ("", 0))[:2]  # nothing when the other end is gone already
        self.address = TunnelAddress((host, port))

    def send(self, packet: bytes) -> bool:
        """One packet; False when it is lost."""
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > BUFFER_MAX_BYTES:
            return False
        self._writer.write(len(packet).to_bytes(LENGTH_BYTES, "big") + packet)
        return True

    async def run(self, take: Callable[[bytes], None]) -> str:
        """Hand over what comes, until the other end is gone or a limit is met. Closes the connection, raises nothing.

        Returns what was wrong with it, one of ``interface.REASONS``: no packet at all or a part of one (``truncated``), too
        much (``oversized``) or for too long (``read_timeout``); empty when it was in order.
        """
        taken, whole = 0, False
        try:
            async with asyncio.timeout(LIMIT_S):
                while taken < TAKEN_MAX_BYTES:
                    prefix = await self._reader.readexactly(LENGTH_BYTES)
                    whole = False
                    size = int.from_bytes(prefix, "big")
                    take(await self._reader.readexactly(size))
                    taken += LENGTH_BYTES + size
                    whole = True
        except asyncio.IncompleteReadError as ended:
            return "" if whole and not ended.partial else "truncated"
        except TimeoutError:
            return "read_timeout"
        except OSError:
            return "" if whole else "truncated"
        finally:
            self._writer.close()
        return "oversized"


async def open_tunnel(host: str, port: int, seconds: float) -> Tunnel:
    """Connect to the TCP port of a node. Raises ``OSError``, also ``TimeoutError``."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(host, port)
    writer.write(TUNNEL_TYPE)
    return Tunnel(reader, writer)


async def begins_as_tunnel(accepted: socket.socket, seconds: float) -> bool:
    """Look at the first byte of an accepted connection and leave it there, unless it says that this is a tunnel.

    Raises ``OSError``, also ``TimeoutError``, when nothing comes.
    """
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(accepted.fileno(), ready.set)
    try:
        async with asyncio.timeout(seconds):
            await ready.wait()
    finally:
        loop.remove_reader(accepted.fileno())
    with contextlib.suppress(BlockingIOError):
        if accepted.recv(1, socket.MSG_PEEK) == TUNNEL_TYPE:
            return accepted.recv(1) == TUNNEL_TYPE
    return False
