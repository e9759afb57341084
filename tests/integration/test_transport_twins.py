"""The in-memory transport and the real one tell the same story: each case runs on both."""

import asyncio
import contextlib
from collections import Counter

import pytest

from config.settings import QuicSettings
from protocol.messages import Gossip, GossipPush, Ping
from protocol.quic.interface import DialFailed, MessageReceived, PeerConnected, PeerDisconnected, Rejected
from protocol.rows import SignedRow
from tests.integration.transport_mesh import eventually, mesh
from tests.unit.quic.test_memory import Universe

SETTINGS = QuicSettings(outstanding_bytes_per_peer=65_536, connect_timeout_us=1_000_000)
BIG = GossipPush(gossip=Gossip(rows=(SignedRow(payload=bytes(30_000), signature=bytes(64)),)))


class InMemory:
    """Three nodes on virtual time."""

    def __init__(self):
        self._universe = Universe(3, settings=SETTINGS)
        self.transports, self.events = self._universe.nodes, self._universe.events
        self.ids = [identity.node_id for identity in self._universe.identities]
        self.addresses = [node.address for node in self._universe.nodes]

    def until(self, holds):
        for _ in range(10_000):
            if holds():
                return
            self._universe.run(1_000)
        raise AssertionError("ten virtual seconds passed")

    def stop(self, index):
        self.transports[index].stop()

    def close(self):
        pass


class OverUdp:
    """Three nodes on loopback."""

    def __init__(self):
        self._runner = asyncio.Runner()
        self._runner.run(self._begin())

    async def _begin(self):
        nodes = mesh("alpha", "beta", "gamma", settings=SETTINGS)
        self.transports, self.events = [node.transport for node in nodes], [node.events for node in nodes]
        self.ids = [node.id for node in nodes]
        self._tasks = [asyncio.create_task(node.transport.run()) for node in nodes]  # noqa: TID251 ended one by one, and by `close`
        for node in nodes:
            await asyncio.wait_for(node.transport.started.wait(), 10)
        self.addresses = [node.address for node in nodes]

    def until(self, holds):
        self._runner.run(eventually(holds))

    def stop(self, index):
        self._runner.run(self._end(self._tasks[index]))

    async def _end(self, *tasks):
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def close(self):
        self._runner.run(self._end(*self._tasks))
        self._runner.close()


@pytest.fixture(params=[InMemory, OverUdp])
def world(request):
    made = request.param()
    yield made
    made.close()


def seen(world, index, kind):
    return [event for event in world.events[index] if isinstance(event, kind)]


def meet(world, one=0, other=1):
    act(world, lambda: world.transports[one].dial(world.addresses[other], world.ids[other]))
    world.until(lambda: seen(world, one, PeerConnected) and seen(world, other, PeerConnected))


def act(world, action):
    """``action`` on the loop of the world, and its answer."""
    answers = []
    world.until(lambda: answers or not answers.append(action()))
    return answers[0]


def test_both_ends_hear_of_a_connection_and_each_message_arrives_on_its_lane(world):
    meet(world)
    assert [event.peer for event in seen(world, 0, PeerConnected)] == [world.ids[1]]
    assert act(world, lambda: world.transports[0].send(world.ids[1], Ping(seq=1), "datagram"))
    world.until(lambda: seen(world, 1, MessageReceived))
    for seq in range(2, 30):
        assert act(world, lambda seq=seq: world.transports[0].send(world.ids[1], Ping(seq=seq), "stream"))
    world.until(lambda: len(seen(world, 1, MessageReceived)) == 29)
    assert [(event.message.seq, event.lane) for event in seen(world, 1, MessageReceived)] == [
        (seq, "datagram" if seq == 1 else "stream") for seq in range(1, 30)
    ]
    assert all(event.peer == world.ids[0] for event in seen(world, 1, MessageReceived))


def test_what_fits_no_datagram_takes_the_stream(world):
    meet(world)
    assert act(world, lambda: world.transports[0].send(world.ids[1], BIG, "datagram"))
    world.until(lambda: seen(world, 1, MessageReceived))
    assert [event.lane for event in seen(world, 1, MessageReceived)] == ["stream"]


def test_what_is_too_much_at_once_is_refused_and_counted_and_room_returns(world):
    meet(world)
    answers = act(world, lambda: [world.transports[0].send(world.ids[1], BIG, "stream") for _ in range(4)])
    assert answers == [True, True, False, False]
    assert world.transports[0].counters.dropped == Counter(outstanding_bound=2)
    world.until(lambda: len(seen(world, 1, MessageReceived)) == 2)
    world.until(lambda: world.transports[0].send(world.ids[1], BIG, "stream"))


def test_nothing_can_be_said_to_somebody_who_is_not_connected(world):
    assert not act(world, lambda: world.transports[0].send(world.ids[1], Ping(seq=1), "stream"))


def test_a_goodbye_is_heard_as_one(world):
    meet(world)
    world.stop(1)
    world.until(lambda: seen(world, 0, PeerDisconnected))
    assert [(event.peer, event.reason) for event in seen(world, 0, PeerDisconnected)] == [(world.ids[1], "closed")]
    assert not world.transports[0].connected


def test_somebody_else_than_expected_is_not_greeted(world):
    act(world, lambda: world.transports[0].dial(world.addresses[1], world.ids[2]))
    world.until(lambda: seen(world, 0, DialFailed) and seen(world, 1, Rejected))
    assert [event.reason for event in seen(world, 0, DialFailed)] == ["wrong_identity"]
    assert not seen(world, 1, PeerConnected)


def test_a_revoked_peer_is_cut_off_at_both_ends(world):
    meet(world)
    act(world, lambda: world.transports[0].close(world.ids[1], "revoked"))
    world.until(lambda: seen(world, 0, PeerDisconnected) and seen(world, 1, PeerDisconnected))
    assert not world.transports[0].connected
    assert not world.transports[1].connected


def test_when_both_dial_one_connection_stays(world):
    """What is said over the other one before it is dropped may be lost, so it is said until it is heard."""
    act(world, lambda: [world.transports[one].dial(world.addresses[1 - one], world.ids[1 - one]) for one in (0, 1)])
    world.until(lambda: seen(world, 0, PeerConnected) and seen(world, 1, PeerConnected))

    def heard():
        world.transports[0].send(world.ids[1], Ping(seq=7), "stream")
        return seen(world, 1, MessageReceived)

    world.until(heard)
    assert [len(transport.connected) for transport in world.transports] == [1, 1, 0]
    assert not seen(world, 0, PeerDisconnected)
    assert not seen(world, 1, PeerDisconnected)
