"""Paths tried beside a standing connection: what is taken, by whom, and that nothing flaps. On virtual time."""

import pytest

from protocol.messages import PathEcho, PathTake, Ping
from protocol.quic.conditioner import LinkShape
from protocol.quic.interface import (
    DialFailed,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    PeerMoved,
    Rejected,
)
from protocol.quic.session import State
from protocol.quic.trials import ANSWERS_MIN, PATIENCE_US, ROUNDS, Comparison
from tests.unit.quic.test_memory import Universe, meet

WIFI_US, CABLE_US = 9_000, 25


def cabled(*, wifi_us=WIFI_US, cable_us=CABLE_US, loss=0.0):
    """Two connected nodes; each can also be reached at an address that begins with "cable"."""
    universe = Universe(2)

    def shape(source, target):
        by_cable = "cable" in source or "cable" in target
        return LinkShape(delay_us=cable_us, loss=loss) if by_cable else LinkShape(delay_us=wifi_us)

    universe.network.shape = shape
    for number, node in enumerate(universe.nodes):
        universe.network.nodes[f"cable{number}:1"] = node
    meet(universe)
    return universe


def ids(universe):
    return [node.table.node_id for node in universe.nodes]


def sessions(node):
    return len(node.table._sessions)


def quiet(universe):
    """Nobody was told that a connection came, went or failed, except for the first one."""
    for number in (0, 1):
        assert len(universe.seen(number, PeerConnected)) == 1
        for kind in (PeerDisconnected, DialFailed, Rejected):
            assert universe.seen(number, kind) == []


def test_a_path_that_is_twice_as_fast_is_taken_by_both_ends_and_the_old_one_ends():
    universe = cabled()
    (one, two), (first, second) = universe.nodes, ids(universe)
    one.dial("cable1:1", second, beside=True)
    universe.run(600_000)
    assert one.connected[second].address == two.address, "nothing moves before it was measured"
    universe.run(4_000_000)
    assert one.connected[second].address == "cable1:1"
    assert sessions(one) == sessions(two) == 1
    assert one.connected[second].dialled
    assert not two.connected[first].dialled
    assert len(universe.seen(0, PeerMoved)) == len(universe.seen(1, PeerMoved)) == 1
    for sender, receiver, number in ((one, second, 1), (two, first, 0)):
        assert sender.send(receiver, Ping(seq=7), "datagram")
        universe.run(50_000)
        assert universe.seen(number, MessageReceived)[-1].message == Ping(seq=7)
    quiet(universe)


def test_what_was_sent_on_the_old_path_before_the_move_still_arrives():
    universe = cabled(wifi_us=300_000)
    one, second = universe.nodes[0], ids(universe)[1]
    universe.run(2_000_000)
    one.dial("cable1:1", second, beside=True)
    for seq in range(60):
        assert one.send(second, Ping(seq=seq), "stream")
        universe.run(100_000)
    universe.run(3_000_000)
    assert universe.seen(0, PeerMoved)
    assert sorted(event.message.seq for event in universe.seen(1, MessageReceived)) == list(range(60))
    quiet(universe)


@pytest.mark.parametrize(
    ("wifi_us", "cable_us", "why"),
    [
        (CABLE_US, WIFI_US, "slower"),
        (WIFI_US, WIFI_US, "the same"),
        (4_000, 2_300, "faster, but not by half"),
        (400, 25, "twice as fast, but by less than scheduling makes"),
    ],
)
def test_a_path_that_is_not_really_better_changes_nothing(wifi_us, cable_us, why):
    universe = cabled(wifi_us=wifi_us, cable_us=cable_us)
    one, two = universe.nodes
    before = one.table.peers[ids(universe)[1]]
    one.dial("cable1:1", ids(universe)[1], beside=True)
    universe.run(6_000_000)
    assert one.table.peers[ids(universe)[1]] is before, why
    assert sessions(one) == sessions(two) == 1
    assert universe.seen(0, PeerMoved) == universe.seen(1, PeerMoved) == []
    quiet(universe)


def test_an_address_that_does_not_answer_is_nobodys_business():
    universe = cabled()
    one, second = universe.nodes[0], ids(universe)[1]
    one.dial("nowhere:1", second, beside=True)
    universe.run(6_000_000)
    assert sessions(one) == 1
    assert universe.seen(0, DialFailed) == []
    one.dial("cable1:1", second, beside=True)
    universe.run(6_000_000)
    assert universe.seen(0, PeerMoved), "and does not stand in the way of the next"


@pytest.mark.parametrize("head_start_us", [0, 5_000, 400_000])
@pytest.mark.parametrize("first", [0, 1])
def test_when_both_try_at_once_one_connection_remains_and_both_ends_know_it(first, head_start_us):
    universe = cabled()
    names = ids(universe)
    order = (first, 1 - first)
    for number in order:
        universe.nodes[number].dial(f"cable{1 - number}:1", names[1 - number], beside=True)
        universe.run(head_start_us)
    universe.run(8_000_000)
    one, two = universe.nodes
    assert sessions(one) == sessions(two) == 1
    assert one.connected[names[1]].dialled != two.connected[names[0]].dialled
    assert len(universe.seen(0, PeerMoved)) == len(universe.seen(1, PeerMoved)) == 1
    quiet(universe)


def test_a_lossy_path_is_not_taken_however_fast_it_is():
    universe = cabled(loss=0.9)
    universe.nodes[0].dial("cable1:1", ids(universe)[1], beside=True)
    universe.run(8_000_000)
    assert universe.seen(0, PeerMoved) == []
    quiet(universe)


def test_a_trial_whose_standing_connection_is_lost_ends_with_it_and_is_not_mistaken_for_a_connection():
    universe = cabled()
    one, two = universe.nodes
    first, second = ids(universe)
    one.dial("cable1:1", second, beside=True)
    universe.run(800_000)
    assert [session.state for session in one.table._sessions].count(State.TRIAL) == 1
    one.close(second, "closed")
    universe.run(2_000_000)
    assert sessions(one) == sessions(two) == 0
    assert second not in one.connected
    assert first not in two.connected


def test_a_move_whose_agreement_is_lost_with_the_old_connection_is_still_a_move():
    universe = cabled()
    one, two = universe.nodes
    first, second = ids(universe)
    one.dial("cable1:1", second, beside=True)
    real = two.table.trials._promote

    def silently(session):
        # The answer does not get through before the old connection says that it was replaced.
        real(session)
        two.table._lingering[first].end("replaced")

    two.table.trials._promote = silently
    held = one.table.taken
    one.table.taken = lambda _session: True
    universe.run(6_000_000)
    one.table.taken = held
    assert one.connected[second].address == "cable1:1"
    assert sessions(one) == sessions(two) == 1
    quiet(universe)


def test_nobody_can_make_a_connection_count_that_was_not_on_trial():
    universe = cabled()
    one, two = universe.nodes
    first, second = ids(universe)
    before = one.table.peers[second]
    assert two.send(first, PathTake(), "stream")
    universe.run(100_000)
    assert one.table.peers[second] is before
    assert one.counters.dropped["unexpected_message"] == 1


def test_nothing_but_echoes_is_taken_from_a_path_on_trial():
    universe = cabled()
    one, second = universe.nodes[0], ids(universe)[1]
    one.dial("cable1:1", second, beside=True)
    universe.run(300_000)
    (trial,) = (session for session in one.table._sessions if session.state is State.TRIAL)
    assert trial.send(Ping(seq=99), "stream")
    universe.run(100_000)
    assert universe.seen(1, MessageReceived) == []
    assert universe.nodes[1].counters.dropped["hello_first"] == 1


def test_an_answer_counts_only_on_the_path_where_it_was_asked_and_once():
    comparison = Comparison()
    standing, fresh = comparison.next_round(1_000)
    comparison.answered(standing.seq, 1_010, fresh=True)
    comparison.answered(fresh.seq, 1_010, fresh=False)
    comparison.answered(12_345, 1_010, fresh=True)
    assert comparison._rtts == {True: [], False: []}
    comparison.answered(fresh.seq, 1_020, fresh=True)
    comparison.answered(fresh.seq, 1_030, fresh=True)
    assert comparison._rtts == {True: [20], False: []}


@pytest.mark.parametrize(("answers", "taken"), [(ANSWERS_MIN - 1, False), (ANSWERS_MIN, True)])
def test_a_standing_path_that_answers_nothing_loses_to_one_that_answers_most(answers, taken):
    comparison = Comparison()
    for number in range(ROUNDS):
        echoes = comparison.next_round(number)
        assert isinstance(echoes[1], PathEcho)
        if number < answers:
            comparison.answered(echoes[1].seq, number + 50, fresh=True)
    assert comparison.next_round(ROUNDS) is None
    assert not comparison.over(ROUNDS)
    assert comparison.over(ROUNDS + PATIENCE_US)
    assert comparison.better() is taken
