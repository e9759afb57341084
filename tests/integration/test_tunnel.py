"""Tunnels between real transports: what an engine at one end sees of the engine at the other."""

import asyncio
import contextlib
import hashlib

import pytest

from config.settings import QuicSettings
from stage_agent.tunnel.tunnels import Door, Tunnels
from stage_agent.tunnel.wire import TUNNEL_KIND
from tests.integration.transport_mesh import eventually, mesh, run, running

MIB = 1_048_576
ENDED = (ConnectionResetError, asyncio.IncompleteReadError)
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@contextlib.asynccontextmanager
async def two_nodes(*, keepalive_s=15.0, **settings):
    alpha, beta = mesh("alpha", "beta", settings=QuicSettings(**settings))
    tunnels = {node.name: Tunnels(node.transport, keepalive_s=keepalive_s) for node in (alpha, beta)}
    for node in (alpha, beta):
        taking = tunnels[node.name]

        async def serve(peer, kind, header, reader, writer, taking=taking):
            assert kind == TUNNEL_KIND
            await taking.serve(peer, header, reader, writer)

        node.transport.on_bulk = serve
    async with running(alpha, beta):
        await alpha.meet(beta)
        yield alpha, beta, tunnels["alpha"], tunnels["beta"]


@contextlib.asynccontextmanager
async def listening(tunnels, peer, door):
    async with asyncio.TaskGroup() as tasks:
        listener = await tunnels.listen(peer, door, tasks)
        try:
            yield listener
        finally:
            await listener.close()


@contextlib.asynccontextmanager
async def engine(handler):
    """A loopback server; its port."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def digest_after_end(reader, writer):
    """Answers only when the other direction has ended: proves the half-close."""
    content = await reader.read()
    writer.write(hashlib.sha256(content).digest())
    await writer.drain()
    writer.close()


async def echo(reader, writer):
    while data := await reader.read(MIB):
        writer.write(data)
        await writer.drain()
    writer.close()


@LOOPS
def test_bytes_and_a_half_close_arrive_and_both_ends_count_them(loop):
    async def main():
        async with two_nodes() as (_, beta, near, far), engine(digest_after_end) as port:
            far.open_door("d", Door(port))
            async with listening(near, beta.id, "d") as listener:
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                content = bytes(range(256)) * 4_096 * 5 + b"odd"
                writer.write(content)
                writer.write_eof()
                assert await reader.read() == hashlib.sha256(content).digest()
                writer.close()
                await eventually(lambda: near.counters.active == far.counters.active == 0)
            assert near.counters.sent_bytes == far.counters.received_bytes == len(content)
            assert near.counters.received_bytes == far.counters.sent_bytes == 32
            assert listener.counters.broken == far.counters.broken == 0

    run(main(), loop=loop)


def test_only_named_doors_lead_anywhere_and_only_for_those_they_are_meant_for():
    async def main():
        async with two_nodes() as (alpha, beta, near, far), engine(echo) as port:
            assert not (await near.ask(beta.id, str(port))).open
            far.open_door("private", Door(port, allowed=frozenset({beta.id})))
            assert (await near.ask(beta.id, "private")).reason == "not for this peer"
            door = Door(port, engine="build 7", secret="key", allowed=frozenset({alpha.id}))
            far.open_door("private", door)
            answer = await near.ask(beta.id, "private")
            assert (answer.open, answer.engine, answer.secret) == (True, "build 7", "key")
            far.close_door("private", Door(1))
            assert far.door("private") == door
            far.close_door("private", door)
            async with listening(near, beta.id, "private") as listener:
                reader, _ = await asyncio.open_connection("127.0.0.1", listener.port)
                with pytest.raises(ENDED):
                    await reader.readexactly(1)
                assert listener.counters.refused == 1

    run(main())


def test_a_closed_engine_port_and_an_absent_peer_are_told_apart_from_silence():
    async def main():
        async with two_nodes() as (_, beta, near, far):
            async with engine(echo) as port:
                pass
            far.open_door("d", Door(port))
            async with listening(near, beta.id, "d") as listener:
                reader, _ = await asyncio.open_connection("127.0.0.1", listener.port)
                with pytest.raises(ENDED):
                    await reader.readexactly(1)
            with pytest.raises(ConnectionError, match="cannot be asked"):
                await near.ask("a" * 32, "d")

    run(main())


def test_a_dying_engine_ends_the_connection_at_the_other_end():
    async def die(reader, writer):
        await reader.readexactly(1)
        writer.transport.abort()

    async def main():
        async with two_nodes() as (_, beta, near, far), engine(die) as port:
            far.open_door("d", Door(port))
            async with listening(near, beta.id, "d") as listener:
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                writer.write(b"x")
                with pytest.raises(ENDED):
                    await asyncio.wait_for(reader.readexactly(1), 5)
                writer.close()
                await eventually(lambda: near.counters.active == far.counters.active == 0)

    run(main())


def test_a_reader_that_stops_stops_the_writer_at_the_other_end():
    stopped = asyncio.Event()

    async def take_nothing(_reader, _writer):
        await stopped.wait()

    async def main():
        async with two_nodes() as (_, beta, near, far), engine(take_nothing) as port:
            far.open_door("d", Door(port))
            async with listening(near, beta.id, "d") as listener:
                _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                pushed = 0

                async def push():
                    nonlocal pushed
                    while True:
                        writer.write(bytes(MIB))
                        await writer.drain()
                        pushed += 1

                task = asyncio.ensure_future(push())
                seen = -1
                while seen != pushed:  # until nothing moves for a quarter of a second
                    seen = pushed
                    await asyncio.sleep(0.25)
                assert 0 < pushed < 64, pushed
                task.cancel()
                stopped.set()
                writer.transport.abort()

    run(main())


def test_an_idle_tunnel_outlives_the_lane_s_idle_timeout():
    async def main():
        async with two_nodes(keepalive_s=0.3, idle_timeout_us=1_000_000) as (_, beta, near, far), engine(echo) as port:
            far.open_door("d", Door(port))
            async with listening(near, beta.id, "d") as listener:
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                await asyncio.sleep(1.6)
                writer.write(b"still here")
                assert await asyncio.wait_for(reader.readexactly(10), 5) == b"still here"
                writer.close()

    run(main())


def test_leaving_the_listener_ends_what_it_carries():
    async def main():
        async with two_nodes() as (_, beta, near, far), engine(echo) as port:
            far.open_door("d", Door(port))
            async with listening(near, beta.id, "d") as listener:
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                writer.write(b"x")
                await reader.readexactly(1)
            with pytest.raises(ENDED):
                await asyncio.wait_for(reader.readexactly(1), 5)
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection("127.0.0.1", listener.port)
            await eventually(lambda: far.counters.active == 0)

    run(main())
