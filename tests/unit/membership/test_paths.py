"""What the core makes of the way a peer is reached: over TCP only, by another interface, and of a stall told twice."""

from protocol.membership.effects import CloseConnection
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
    health = bench.core.local_health
    assert health == 1
    bench.core.on_loop_lag(1_950_000, bench.now_us + 40_000)
    assert bench.core.local_health == health
    bench.core.on_loop_lag(300_000, bench.now_us + SECOND)
    assert bench.core.local_health == health + 1


def test_few_connections_are_never_shed() -> None:
    bench = Bench()
    settled(bench)
    effects = bench.core.on_loop_lag(5_000_000, bench.now_us)
    assert not [effect for effect in effects if isinstance(effect, CloseConnection)]
