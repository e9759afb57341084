"""The in-memory twin: the same rules as the real transport, on virtual time."""

import heapq
import itertools
import random

import pytest

from config.settings import QuicSettings
from protocol.messages import Hello, Ping
from protocol.quic.conditioner import LinkShape
from protocol.quic.interface import DialFailed, MessageReceived, PeerConnected, PeerDisconnected
from protocol.quic.memory import MemoryNetwork, MemoryTransport
from tests.integration.transport_mesh import identities

NEAR = LinkShape(delay_us=1_000)


class Universe:
    """Virtual time and a network of admitted nodes."""

    def __init__(self, count, *, shape=NEAR, seed=1, settings=None):
        self.now_us = 1_000_000
        self._queue, self._ticket = [], itertools.count()
        self.network = MemoryNetwork(
            schedule=self.schedule, clock_us=lambda: self.now_us, die=random.Random(seed), shape=lambda _a, _b: shape
        )
        made, books = identities(count)
        self.identities, self.books = made, books
        self.events = [[] for _ in made]
        self.nodes = [self.node(index, settings=settings) for index in range(count)]
        for node in self.nodes:
            node.start()

    def node(self, index, *, boot_counter=1, instance=None, settings=None):
        identity = self.identities[index]
        return MemoryTransport(
            network=self.network,
            address=f"10.0.0.{index}:7946",
            public_key=identity.public_key,
            node_id=identity.node_id,
            settings=settings or QuicSettings(),
            admission=self.books[index],
            events=self.events[index].append,
            hello=Hello(
                mesh_id=self.books[index].mesh_id,
                instance=instance or f"{index}" * 32,
                boot_counter=boot_counter,
                name=f"n{index}",
                version="1",
            ),
        )

    def schedule(self, delay_us, call):
        heapq.heappush(self._queue, (self.now_us + delay_us, next(self._ticket), call))

    def run(self, duration_us):
        until = self.now_us + duration_us
        while self._queue and self._queue[0][0] <= until:
            self.now_us, _, call = heapq.heappop(self._queue)
            call()
        self.now_us = until

    def seen(self, index, kind):
        return [event for event in self.events[index] if isinstance(event, kind)]


def meet(universe, one=0, other=1):
    universe.nodes[one].dial(universe.nodes[other].address)
    universe.run(100_000)


def test_two_nodes_meet_and_talk_in_virtual_time():
    universe = Universe(2)
    meet(universe)
    assert len(universe.seen(0, PeerConnected)) == len(universe.seen(1, PeerConnected)) == 1
    peer = universe.nodes[1].table.node_id
    begun = universe.now_us
    assert universe.nodes[0].send(peer, Ping(seq=1), "datagram")
    universe.run(1_000)
    assert [event.message for event in universe.seen(1, MessageReceived)] == [Ping(seq=1)]
    assert universe.now_us - begun == 1_000


def test_streams_keep_order_and_lose_nothing_where_datagrams_do():
    universe = Universe(2, shape=LinkShape(delay_us=1_000, jitter_us=20_000, loss=0.3))
    for _ in range(50):
        if universe.nodes[1].table.node_id in universe.nodes[0].connected:
            break
        meet(universe)
    peer = universe.nodes[1].table.node_id
    for seq in range(100):
        universe.nodes[0].send(peer, Ping(seq=seq), "stream")
        universe.nodes[0].send(peer, Ping(seq=seq), "datagram")
        universe.run(500)  # sooner than a lost one is sent again
    universe.run(1_000_000)
    got = universe.seen(1, MessageReceived)
    assert [event.message.seq for event in got if event.lane == "stream"] == list(range(100))
    assert 40 < len([event for event in got if event.lane == "datagram"]) < 95


def test_a_dial_into_nowhere_fails_at_the_connect_timeout():
    universe = Universe(1)
    universe.nodes[0].dial("10.9.9.9:7946")
    universe.run(2_900_000)
    assert universe.events[0] == []
    universe.run(300_000)
    assert universe.events[0] == [DialFailed("10.9.9.9:7946", "timeout")]


def test_a_crash_says_nothing_and_a_restart_replaces():
    universe = Universe(2)
    meet(universe)
    universe.nodes[1].stop(goodbye=False)
    universe.run(1_000_000)
    assert universe.seen(0, PeerDisconnected) == []
    again = universe.node(1, boot_counter=2, instance="e" * 32)
    again.start()
    again.dial(universe.nodes[0].address)
    universe.run(1_500_000)  # the one before is asked whether it still lives
    assert [event.reason for event in universe.seen(0, PeerDisconnected)] == ["replaced"]
    assert universe.seen(0, PeerConnected)[-1].hello.boot_counter == 2


def test_a_goodbye_is_heard():
    universe = Universe(2)
    meet(universe)
    universe.nodes[1].stop()
    universe.run(10_000)
    assert [event.reason for event in universe.seen(0, PeerDisconnected)] == ["closed"]


def test_a_cut_link_ends_at_the_idle_timeout():
    universe = Universe(2, settings=QuicSettings(idle_timeout_us=5_000_000))
    meet(universe)
    addresses = [node.address for node in universe.nodes]
    universe.network.cut |= {tuple(addresses), tuple(reversed(addresses))}
    universe.run(4_000_000)
    assert universe.seen(0, PeerDisconnected) == []
    universe.run(2_000_000)
    assert [event.reason for event in universe.seen(0, PeerDisconnected)] == ["idle_timeout"]


@pytest.mark.parametrize("seed", range(5))
def test_when_everybody_dials_everybody_one_connection_per_pair_remains(seed):
    universe = Universe(6, seed=seed, shape=LinkShape(delay_us=2_000, jitter_us=3_000))
    for one, other in itertools.permutations(universe.nodes, 2):
        one.dial(other.address)
    universe.run(5_000_000)
    for node in universe.nodes:
        assert len(node.connected) == 5
        assert len(node.table._sessions) == 5
    assert all(PeerDisconnected not in map(type, events) for events in universe.events)


def test_the_same_seed_gives_the_same_history():
    def history():
        universe = Universe(3, seed=4, shape=LinkShape(delay_us=1_000, jitter_us=500, loss=0.1))
        names = {identity.node_id: index for index, identity in enumerate(universe.identities)}
        for one, other in itertools.combinations(range(3), 2):
            meet(universe, one, other)
        for seq in range(50):
            for peer in list(universe.nodes[0].connected):
                universe.nodes[0].send(peer, Ping(seq=seq), "datagram")
            universe.run(1_000)
        return [
            (index, names[event.peer], event.message.seq)
            for index in range(3)
            for event in universe.seen(index, MessageReceived)
        ]

    first = history()
    assert len(first) > 50
    assert history() == first
