"""What pretends to be a newcomer's tunnel on the TCP port: each refused connection is counted, none harms the node."""

import socket
import struct

import pytest

from config.settings import QuicSettings
from protocol.quic.tcp_tunnel import TUNNEL_TYPE
from tests.integration.transport_mesh import eventually, mesh, run, running

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
RESET = struct.pack("ii", 1, 0)


def say(port, data, *, reset):
    """Connect, say ``data``, and leave in order or with a reset that comes before anybody can have looked."""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(data)
        if reset:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@LOOPS
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_garbage_that_begins_like_a_tunnel_is_counted_and_the_node_goes_on(loop, reset):
    async def main():
        alpha, beta = mesh("alpha", "beta", settings=QuicSettings(handshakes_per_second=1_000))
        async with running(alpha, beta):
            counted = alpha.transport.counters
            for number, words in enumerate((b"", b"\x00", b"\x04\xb0", b"\x00\x05abc", b"\xff\xff" + b"x" * 900), 1):
                say(alpha.transport.port, TUNNEL_TYPE + words, reset=reset)
                await eventually(lambda number=number: counted.rejected["truncated"] == number)
            say(alpha.transport.port, TUNNEL_TYPE + b"\x00\x05abcde", reset=reset)
            await eventually(lambda: counted.dropped["not_quic"] == 1)
            await eventually(lambda: alpha.transport.table.strangers == 0)
            assert sum(counted.rejected.values()) == 5
            await alpha.meet(beta)

    run(main(), loop=loop)


@LOOPS
def test_a_reset_at_any_byte_of_a_connection_harms_nobody(loop):
    async def main():
        alpha, beta = mesh("alpha", "beta", settings=QuicSettings(handshakes_per_second=1_000))
        async with running(alpha, beta):
            for words in (b"", b"\x16", b"\x16\x03\x01\x00\x05abcde", b"GET / HTTP/1.1\r\n\r\n"):
                say(alpha.transport.port, words, reset=True)
            await eventually(lambda: sum(alpha.transport.counters.rejected.values()) == 4)
            await alpha.meet(beta)

    run(main(), loop=loop)
