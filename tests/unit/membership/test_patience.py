"""How long a node waits before it believes that another is silent: its links, its own health, and its own stalls."""

import pytest

from protocol.membership.effects import MemberChanged, Send
from protocol.messages import Ack, Ping
from tests.simulation.membership_mesh import identity
from tests.unit.membership.hands import SECOND, Bench

BASE_US, CAP_US = 500_000, 2 * SECOND


def answer_later(bench: Bench, seconds: int, rtt_us: int) -> None:
    """Node 1 answers each datagram ``rtt_us`` after it was sent."""
    pending: list[tuple[int, Ack]] = []

    def note(send: Send) -> None:
        if isinstance(send.message, Ping) and send.lane == "datagram":
            pending.append((bench.now_us + rtt_us, Ack(seq=send.message.seq)))

    end_us = bench.now_us + seconds * SECOND
    while bench.now_us < end_us:
        due_us = pending[0][0] if pending else max(bench.now_us, bench.core.next_deadline() or 0)
        bench.run((due_us - bench.now_us) / SECOND, note)
        bench.now_us = due_us
        if pending and pending[0][0] == due_us:
            bench.say(1, pending.pop(0)[1], lane="datagram")


def patience_us(bench: Bench) -> int:
    """From a ping by datagram that nobody answers to the same ping by stream."""
    sent_us: dict[int, int] = {}
    waits: list[int] = []

    def note(send: Send) -> None:
        if send.peer == identity(1).node_id and isinstance(send.message, Ping):
            if send.lane == "datagram":
                sent_us[send.message.seq] = bench.now_us
            elif send.message.seq in sent_us:
                waits.append(bench.now_us - sent_us[send.message.seq])

    while not waits:
        bench.run(0.1, note)
    return waits[0]


@pytest.mark.parametrize(("rtt_us", "wait_us"), [(400, BASE_US), (400_000, 4 * 400_000), (600_000, CAP_US)])
def test_a_probe_waits_four_times_the_worst_round_trip_of_its_link_at_least_half_a_second_at_most_two(
    rtt_us: int, wait_us: int
) -> None:
    bench = Bench()
    bench.connect(1)
    answer_later(bench, 12, rtt_us)
    assert bench.health(1) == 0
    assert patience_us(bench) == wait_us


def test_a_node_with_reason_to_distrust_itself_waits_longer_for_others() -> None:
    bench = Bench()
    bench.connect(1)
    for stall in range(3):
        bench.core.on_loop_lag(300_000, bench.now_us + stall * SECOND)
    bench.now_us += 2 * SECOND
    assert bench.health(1) == 3
    assert patience_us(bench) == BASE_US * (1 + 3)


def death_us(*, lag_us: int) -> int:
    """When the only peer, silent for 4 s, is declared dead by a node that was late by so much then."""
    bench = Bench()
    bench.connect(1)
    bench.run(10, bench.answer_pings_of(1))
    bench.run(4)
    assert bench.state(1) == "suspect"
    if lag_us:
        bench.core.on_loop_lag(lag_us, bench.now_us)
    for _ in range(200):
        effects = bench.run(0.05)
        if any(isinstance(effect, MemberChanged) and effect.new == "dead" for effect in effects):
            return bench.now_us
    raise AssertionError("it never died")


def test_a_suspect_gets_the_time_back_in_which_this_node_did_not_listen_and_rested() -> None:
    rest_us = SECOND
    assert death_us(lag_us=900_000) - death_us(lag_us=0) == 900_000 + rest_us
