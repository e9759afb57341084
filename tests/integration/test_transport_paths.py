"""A node that is reached by two addresses, on real sockets: answers leave from the one that was dialled, the better one wins."""

import asyncio
import sys

import pytest

from protocol.messages import Ping
from protocol.quic.interface import DialFailed, MessageReceived, PeerConnected, PeerDisconnected, PeerMoved, Rejected
from stage_agent.addresses import free_ports
from tests.integration.transport_mesh import Node, eventually, identities, now_us, run, running

LOOPS = pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.nightly), "uvloop"])
"""The daemon's loop; Python's own waits as long again, at night."""
HOSTS = pytest.mark.parametrize("host", ["0.0.0.0", "::"])


def everywhere(tmp_path, shapes="", *, host="0.0.0.0"):
    """Two nodes bound to every address of this machine, so that each is reached at 127.0.0.1 and at 127.0.0.2."""
    file = tmp_path / "shapes.toml"
    file.write_text(shapes)
    made, books = identities(2)
    return [
        Node(identity, name, book, host=host, shapes=file)
        for identity, name, book in zip(made, ("alpha", "beta"), books, strict=True)
    ]


def slow(*hosts):
    return "".join(f'[links."alpha -> {host}"]\ndelay_ms = 18\n' for host in hosts)


async def unreachable(_where):
    """The shapes lose datagrams; this is what TCP meets on the same dead wire."""
    raise OSError("no route to host")


async def round_trip_us(near, far, seq):
    begun_us = now_us()
    assert near.transport.send(far.id, Ping(seq=seq), "datagram")
    await far.until(MessageReceived, lambda event: event.message == Ping(seq=seq))
    return now_us() - begun_us


@HOSTS
@LOOPS
def test_a_node_bound_to_everything_answers_from_the_address_that_was_dialled(tmp_path, loop, host):
    async def main():
        alpha, beta = everywhere(tmp_path, host=host)
        async with running(alpha, beta):
            alpha.transport.dial(f"127.0.0.2:{beta.transport.port}", beta.id)
            met = await alpha.until(PeerConnected)
            assert (met.path, met.address) == ("quic", f"127.0.0.2:{beta.transport.port}"), "not by the detour over TCP"
            assert alpha.seen(DialFailed) == []

    run(main(), loop=loop)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a packet came in")
def test_the_interface_by_which_a_peer_is_reached_is_named(tmp_path):
    async def main():
        alpha, beta = everywhere(tmp_path)
        async with running(alpha, beta):
            alpha.transport.dial(f"127.0.0.1:{beta.transport.port}", beta.id)
            await alpha.until(PeerConnected)
            await eventually(lambda: alpha.transport.connected[beta.id].interface == "lo")
            assert alpha.seen(PeerMoved) == [], "to learn the interface is no move"

    run(main())


@LOOPS
def test_the_fast_address_is_found_beside_the_slow_one_and_the_connection_moves_once(tmp_path, loop):
    async def main():
        alpha, beta = everywhere(tmp_path, slow("127.0.0.1"))
        async with running(alpha, beta):
            alpha.transport.dial(f"127.0.0.1:{beta.transport.port}", beta.id)
            await alpha.until(PeerConnected)
            assert await round_trip_us(alpha, beta, 1) >= 18_000
            alpha.transport.dial(f"127.0.0.2:{beta.transport.port}", beta.id, beside=True)
            moved = await alpha.until(PeerMoved)
            assert (moved.address, moved.path) == (f"127.0.0.2:{beta.transport.port}", "quic")
            assert await round_trip_us(alpha, beta, 2) < 18_000
            await eventually(lambda: len(alpha.transport.table._sessions) == len(beta.transport.table._sessions) == 1)
            for node in (alpha, beta):
                assert len(node.seen(PeerConnected)) == 1
                assert node.seen(PeerDisconnected) == node.seen(DialFailed) == node.seen(Rejected) == []
            # Back to the slow one: tried, measured, left alone.
            alpha.transport.dial(f"127.0.0.1:{beta.transport.port}", beta.id, beside=True)
            await eventually(lambda: len(alpha.transport.table._sessions) == 2)
            await eventually(lambda: len(alpha.transport.table._sessions) == 1)
            assert len(alpha.seen(PeerMoved)) == 1
            assert alpha.transport.connected[beta.id].address == f"127.0.0.2:{beta.transport.port}"

    run(main(), loop=loop)


@LOOPS
def test_when_one_way_dies_the_peers_other_address_is_taken_without_losing_the_peer(tmp_path, loop):
    async def main():
        alpha, beta = everywhere(tmp_path)
        port = free_ports(1, "127.0.0.1")[0]
        addresses = (f"127.0.0.1:{port}", f"127.0.0.2:{port}")
        beta = Node(beta.identity, "beta", beta.book, host="0.0.0.0", port=port, addresses=addresses)
        async with running(alpha, beta):
            alpha.transport.dial(addresses[0], beta.id)
            await alpha.until(PeerConnected)
            (tmp_path / "shapes.toml").write_text('[links."alpha -> 127.0.0.1"]\nloss = 1.0\n')
            alpha.transport._lane.open_control = unreachable
            begun_us = now_us()
            while not alpha.seen(PeerMoved) and now_us() - begun_us < 20_000_000:
                alpha.transport.send(beta.id, Ping(seq=1), "datagram")
                await asyncio.sleep(0.2)
            moved = await alpha.until(PeerMoved)
            assert (moved.address, moved.path) == (addresses[1], "quic")
            assert now_us() - begun_us < 12_000_000, "long before the idle timeout"
            for node in (alpha, beta):
                assert node.seen(PeerDisconnected) == node.seen(DialFailed) == node.seen(Rejected) == []

    run(main(), loop=loop)


def test_a_cable_that_turns_slow_is_left_for_the_other_address(tmp_path):
    async def main():
        alpha, beta = everywhere(tmp_path, slow("127.0.0.1"))
        async with running(alpha, beta):
            alpha.transport.dial(f"127.0.0.2:{beta.transport.port}", beta.id)
            await alpha.until(PeerConnected)
            (tmp_path / "shapes.toml").write_text(slow("127.0.0.2"))
            for seq in range(100):
                if await round_trip_us(alpha, beta, seq) >= 18_000:
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("the changed shapes did not reach the living connection")
            alpha.transport.dial(f"127.0.0.1:{beta.transport.port}", beta.id, beside=True)
            assert (await alpha.until(PeerMoved)).address == f"127.0.0.1:{beta.transport.port}"
            assert await round_trip_us(alpha, beta, 1_000) < 18_000

    run(main())
