"""TLS on a socket that can change hands, beside what asyncio's own TLS does with the same certificates."""

import asyncio
import contextlib
import socket
import ssl

import pytest

from protocol.quic.tls import LaneContexts
from protocol.quic.tls_socket import BUFFER_BYTES, shake_hands, streams
from tests.integration.transport_mesh import identities, run

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
MIB = 1_048_576


@contextlib.asynccontextmanager
async def connected():
    """Reader and writer of a client and of a server."""
    made, books = identities(2)
    server, client = LaneContexts(made[0], books[0]).server(), LaneContexts(made[1], books[1]).client()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    both = await asyncio.gather(
        shake_hands(dialled, client, server_side=False, seconds=5),
        shake_hands(accepted, server, server_side=True, seconds=5),
    )
    ends = [streams(channel) for channel in both]
    try:
        yield ends
    finally:
        for _, writer in ends:
            writer.transport.abort()
        await asyncio.sleep(0)


@LOOPS
def test_everything_written_arrives_before_the_end_however_much_it_is(loop):
    async def main():
        async with connected() as ((_, writer), (reader, _)):
            content = bytes(range(256)) * (8 * MIB // 256) + b"end"
            writer.write(content)
            assert writer.transport.get_write_buffer_size() > BUFFER_BYTES
            writer.close()
            assert await reader.read() == content

    run(main(), loop=loop)


@LOOPS
def test_a_side_may_answer_after_the_other_has_said_its_last(loop):
    async def main():
        async with connected() as ((near, asks), (far, answers)):
            asks.write(b"question")
            await asks.drain()
            assert await far.readexactly(8) == b"question"
            answers.write(b"answer")
            answers.close()
            assert await near.read() == b"answer"
            assert not asks.is_closing()
            asks.write(b"still open")
            await asks.drain()

    run(main(), loop=loop)


@LOOPS
def test_a_writer_waits_while_nobody_reads_and_goes_on_when_somebody_does(loop):
    async def main():
        async with connected() as ((_, writer), (reader, _)):
            writer.write(bytes(24 * MIB))
            waiting = asyncio.ensure_future(writer.drain())
            await asyncio.sleep(0.3)
            assert not waiting.done()
            assert len(await reader.readexactly(24 * MIB)) == 24 * MIB
            await asyncio.wait_for(waiting, 5)

    run(main(), loop=loop)


@LOOPS
def test_an_abort_ends_the_other_side_at_once(loop):
    async def main():
        async with connected() as ((_, writer), (reader, _)):
            waiting = asyncio.ensure_future(reader.read())
            await asyncio.sleep(0)
            writer.transport.abort()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(waiting, 2) == b""
            writer.write(b"x")
            with pytest.raises(ConnectionResetError):
                await writer.drain()

    run(main(), loop=loop)


def test_a_bytearray_may_change_once_it_was_written():
    async def main():
        async with connected() as ((_, writer), (reader, _)):
            content = bytearray(b"a" * 24 * MIB)
            writer.write(content)
            content[:] = b"b" * len(content)
            assert set(await reader.readexactly(24 * MIB)) == {ord("a")}

    run(main())


@LOOPS
def test_a_lent_connection_speaks_tls_in_other_hands_and_closes_when_it_is_given_back(loop):
    async def main():
        async with connected() as ((_, writer), (reader, _)):
            transport = writer.transport
            channel = transport.lend()
            channel.setblocking(True)
            await asyncio.to_thread(channel.sendall, b"from a thread")
            assert await reader.readexactly(13) == b"from a thread"
            assert not transport.is_closing()
            channel.setblocking(False)
            transport.give_back()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            assert transport.is_closing()
            assert channel.fileno() == -1

    run(main(), loop=loop)


def test_an_abort_under_a_borrower_breaks_the_connection_and_leaves_the_descriptor_to_the_borrower():
    async def main():
        async with connected() as ((_, writer), _):
            channel = writer.transport.lend()
            writer.transport.abort()
            assert channel.fileno() != -1
            with contextlib.suppress(OSError):
                assert socket.socket.recv(channel, 1) == b""
            writer.transport.give_back()
            assert channel.fileno() == -1

    run(main())


@LOOPS
def test_a_handshake_that_never_comes_costs_its_time_limit_and_no_descriptor(loop):
    async def main():
        made, books = identities(1)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            silent = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
            with pytest.raises(TimeoutError):
                await shake_hands(accepted, LaneContexts(made[0], books[0]).server(), server_side=True, seconds=0.2)
            assert accepted.fileno() == -1
            silent.settimeout(2)
            assert silent.recv(1) == b""
            silent.close()

    run(main(), loop=loop)


def test_bytes_that_are_not_tls_are_an_ssl_error_and_the_sender_hears_of_it():
    async def main():
        made, books = identities(1)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            rude = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(4_000))
            with pytest.raises(ssl.SSLError):
                await shake_hands(accepted, LaneContexts(made[0], books[0]).server(), server_side=True, seconds=2)
            rude.settimeout(2)
            assert isinstance(rude.recv(100), bytes)  # an alert or an end, not a reset
            rude.close()

    run(main())
