"""What the core makes of the way a peer is reached: over TCP only, by another interface, and of a stall told twice."""

from protocol.membership.effects import CloseConnection, Send
from protocol.messages import Ack, Ping
from tests.unit.membership.hands import SECOND, Bench, identity


def settled(bench: Bench) -> None:
    bench.connect(1)
    bench.run(8, bench.answer_pings_of(1))


def move(bench: Bench, address: str, **way: object) -> None:
    bench.core.on_moved(identity(1).node_id, address, bench.now_us, **way)  # type: ignore[arg-type]


def test_a_peer_that_only_tcp_reaches_shows_in_the_own_row_at_once_and_not_for_longer_than_it_lasts() -> None:
    bench = Bench()
    settled(bench)
    move(bench, "10.0.0.2:1", over_tcp=True)
    bench.run(2, bench.answer_pings_of(1))
    row = bench.core.own_row
    assert row is not None
    assert "datagrams_blocked" in row.degraded
    assert [fact.over_tcp for fact in row.links] == [True]
    move(bench, "10.0.0.2:1", over_tcp=False)
    bench.run(2, bench.answer_pings_of(1))
    row = bench.core.own_row
    assert row is not None
    assert "datagrams_blocked" not in row.degraded
    assert [fact.over_tcp for fact in row.links] == [False]


def test_another_interface_is_another_path_and_one_that_was_not_known_is_not() -> None:
    bench = Bench()
    settled(bench)
    member = bench.core.members(bench.now_us)[identity(1).node_id]
    assert member.link is not None
    assert member.link.settled
    for interface, changes in (("eth0", 0), ("", 0), ("eth0", 0), ("wlan0", 1)):
        move(bench, "10.0.0.2:9", interface=interface)
        link = bench.core.members(bench.now_us)[identity(1).node_id].link
        assert link is not None
        assert link.path_changes == changes
        assert link.settled is (changes == 0), "round trips of another path say nothing"


def test_a_stall_that_two_timers_tell_counts_once_and_the_next_one_again() -> None:
    bench = Bench()
    settled(bench)
    bench.now_us += 2 * SECOND
    bench.core.on_loop_lag(1_900_000, bench.now_us)
    health = bench.health(1)
    assert health == 1
    bench.core.on_loop_lag(1_950_000, bench.now_us + 40_000)
    assert bench.health(1) == health
    bench.core.on_loop_lag(300_000, bench.now_us + SECOND)
    assert bench.health(1) == health + 1


def test_few_connections_are_never_shed() -> None:
    bench = Bench()
    settled(bench)
    effects = bench.core.on_loop_lag(5_000_000, bench.now_us)
    assert not [effect for effect in effects if isinstance(effect, CloseConnection)]


def test_datagrams_are_tried_again_at_once_when_the_way_to_a_peer_has_changed() -> None:
    bench = Bench()
    settled(bench)

    def answers_streams(send: Send) -> None:
        if send.lane == "stream":
            bench.answer_pings_of(1)(send)

    bench.run(15, answers_streams)
    row = bench.core.own_row
    assert row is not None
    assert "datagrams_blocked" in row.degraded
    move(bench, "10.0.9.2:1")
    pings = [effect for effect in bench.run(3, bench.answer_pings_of(1)) if isinstance(effect, Send)]
    assert "datagram" in {ping.lane for ping in pings if isinstance(ping.message, Ping)}
    row = bench.core.own_row
    assert row is not None
    assert "datagrams_blocked" not in row.degraded


def test_a_round_trip_is_that_of_the_link_without_what_either_end_held_it() -> None:
    bench = Bench()
    bench.connect(1)

    def slowly(send: Send) -> None:
        if isinstance(send.message, Ping):
            ack = Ack(seq=send.message.seq, held_us=7_000)
            sent_us, now_us = bench.now_us, bench.now_us + 12_000
            bench.core.on_message(send.peer, ack, now_us, lane=send.lane, arrived_us=sent_us + 7_400)

    bench.run(8, slowly)
    link = bench.core.members(bench.now_us)[identity(1).node_id].link
    assert link is not None
    assert link.rtt is not None
    assert link.rtt.min_rtt_us == 400


def test_an_answer_says_how_long_the_ping_lay_here() -> None:
    bench = Bench()
    bench.connect(1)
    peer = identity(1).node_id
    effects = bench.core.on_message(peer, Ping(seq=3), bench.now_us, lane="datagram", arrived_us=bench.now_us - 2_500)
    (ack,) = (effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Ack))
    assert ack.held_us == 2_500


def test_a_peer_that_claims_to_have_held_a_ping_for_longer_than_it_was_away_gives_no_sample() -> None:
    bench = Bench()
    bench.connect(1)

    def lies(send: Send) -> None:
        if isinstance(send.message, Ping):
            bench.core.on_message(
                send.peer, Ack(seq=send.message.seq, held_us=10**9), bench.now_us + 400, lane=send.lane
            )

    bench.run(8, lies)
    link = bench.core.members(bench.now_us)[identity(1).node_id].link
    assert link is not None
    assert link.rtt is None


def test_a_stall_in_which_nothing_could_be_spared_does_not_put_off_the_next_shedding() -> None:
    bench = Bench()
    settled(bench)
    bench.admitted.update(identity(number).node_id for number in range(40))
    bench.core.on_loop_lag(1_500_000, bench.now_us)
    for number in range(2, 25):
        bench.connect(number)
    bench.now_us += 3 * SECOND
    effects = bench.core.on_loop_lag(1_500_000, bench.now_us)
    assert len([effect for effect in effects if isinstance(effect, CloseConnection)]) == 2
