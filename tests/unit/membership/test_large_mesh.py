"""A mesh too large for a connection between every pair: few links are kept settled and told, the rest is estimated."""

import pytest

from config.settings import LinkSettings, MembershipSettings
from protocol.links import is_settled
from protocol.membership.effects import CloseConnection, Dial, Send
from protocol.messages import DigestRequest, GossipPush
from protocol.rows import Coordinate
from tests.simulation.membership_mesh import identity
from tests.unit.membership.hands import SECOND, Bench, accusation, sent

SETTINGS = MembershipSettings(max_connections=4, probe_everyone_up_to=2)


def large(connected: int) -> Bench:
    bench = Bench(settings=SETTINGS)
    bench.connect(1)
    bench.gossip(1, rows=tuple(bench.row(number, 1) for number in range(2, 10)))
    for number in range(2, connected + 1):
        bench.connect(number)
    bench.run(60, bench.answer_pings_of(*range(1, connected + 1)))
    return bench


def test_the_row_tells_of_links_that_are_kept_settled_and_carries_the_coordinate() -> None:
    row = large(4).core.own_row
    assert row is not None
    assert row.coordinate is not None
    assert {link.target for link in row.links} <= {identity(number).node_id for number in range(1, 5)}
    assert row.links
    assert all(is_settled(link, LinkSettings()) and not link.estimated for link in row.links)


def test_an_estimate_is_asked_for_and_stands_in_no_row() -> None:
    bench = large(4)
    there = identity(9).node_id
    assert bench.core.estimate_rtt_us(bench.me.node_id, there) is None, "who tells no coordinate cannot be estimated"
    far = Coordinate(x_us=30_000, height_us=100, error_milli=200)
    bench.gossip(1, rows=(bench.row(9, 2, coordinate=far),))
    assert bench.core.estimate_rtt_us(bench.me.node_id, there) is None, "who has measured nobody stands nowhere yet"
    bench.gossip(1, rows=(bench.row(1, 2, coordinate=Coordinate(height_us=100, error_milli=200)),))
    bench.run(20, bench.answer_pings_of(1, 2, 3, 4))
    estimate = bench.core.estimate_rtt_us(bench.me.node_id, there)
    assert estimate is not None
    assert estimate >= 20_000
    assert bench.core.own_row is not None
    assert there not in {link.target for link in bench.core.own_row.links}


def test_a_transfer_makes_any_link_worth_telling() -> None:
    bench = large(4)
    peer = identity(8).node_id
    bench.core.on_transfer(peer, "send", 50_000_000, SECOND, "link", bench.now_us)
    effects = bench.run(70, bench.answer_pings_of(1, 2, 3, 4))
    assert bench.core.own_row is not None
    assert [link.send_bytes_per_s for link in bench.core.own_row.links if link.target == peer] == [50_000_000]
    assert sent(effects, GossipPush)


def test_connections_that_come_in_dozens_get_one_digest_and_a_newcomer_always_gets_one() -> None:
    bench = Bench(settings=SETTINGS)
    above = sorted(number for number in range(1, 10) if identity(number).node_id > bench.me.node_id)
    below = [number for number in range(1, 10) if number not in above]
    stranger, *known = above[:3]
    assert len(known) == 2
    bench.connect(below[0])
    bench.gossip(below[0], rows=tuple(bench.row(number, 1) for number in range(1, 10) if number != stranger))
    bench.now_us += SECOND

    def digests(number: int) -> int:
        bench.core.on_disconnected(identity(number).node_id, bench.now_us)
        return len(sent(bench.core.on_connected(identity(number).node_id, "10.0.0.9:1", bench.now_us), DigestRequest))

    assert [digests(number) for number in known] == [1, 0]
    assert digests(stranger) == 1, "who is not known here may know nobody"
    bench.now_us += SECOND
    assert digests(known[1]) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_a_peer_that_is_asked_for_is_dialled_and_its_link_stays_settled(asked: bool) -> None:
    """Who serves a plan together has to know the links: they are what a replacement is planned with."""
    bench = Bench(settings=MembershipSettings(max_connections=8, probe_everyone_up_to=2))
    far, near = identity(9).node_id, bench.answer_pings_of(*range(1, 9))
    distant = bench.answer_pings_of(9, rtt_us=30_000)
    for number in range(1, 9):
        bench.connect(number)
    bench.gossip(1, rows=(bench.row(9, 1),))
    if asked:
        bench.core.request_measurements([far])
    dials = [effect.peer for effect in bench.run(30, near) if isinstance(effect, Dial)]
    assert (far in dials) is asked

    def answer(send: Send) -> None:
        near(send)
        distant(send)

    bench.connect(9)
    effects = bench.run(120, answer)
    assert bench.core.own_row is not None
    assert (far in {link.target for link in bench.core.own_row.links}) is asked
    surplus = {effect.peer for effect in effects if isinstance(effect, CloseConnection)}
    assert surplus, "nine connections are one too many"
    assert not asked or far not in surplus


def test_of_whom_it_only_hears_it_takes_two_mourners_to_bury_a_node() -> None:
    bench = large(4)
    bench.gossip(1, accusations=(accusation(9, 1, "dead"),))
    bench.gossip(2, accusations=(accusation(9, 1, "dead"),))
    assert bench.state(9) == "suspect", "the same mourner twice is one"
    bench.gossip(1, accusations=(accusation(9, 3, "suspect"),))
    assert bench.state(9) == "suspect", "a suspicion is no mourning"
    bench.gossip(2, accusations=(accusation(9, 2, "dead"),))
    assert bench.state(9) == "dead"
