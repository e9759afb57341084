"""How often peers are probed: soon until their RTT has settled, then as rarely as keeps it settled."""

from collections import Counter

from config.settings import LinkSettings, MembershipSettings
from protocol.links.link import Link
from protocol.membership import Send
from protocol.membership.effects import Effect
from protocol.messages import Ping
from tests.simulation.membership_mesh import identity
from tests.unit.membership.hands import SECOND, Bench

SLOW = MembershipSettings(probe_everyone_up_to=1, probes_per_second_max=1)
"""With nine peers each would wait nine seconds for its turn."""


def pings(effects: list[Effect]) -> Counter[str]:
    return Counter(each.peer for each in effects if isinstance(each, Send) and isinstance(each.message, Ping))


def test_a_link_settles_as_soon_as_it_may_however_large_the_mesh() -> None:
    bench = Bench(settings=SLOW)
    everybody = range(1, 10)
    for number in everybody:
        bench.connect(number)
    sent = pings(bench.run(6.0, bench.answer_pings_of(*everybody)))
    members = bench.core.members(bench.now_us)
    assert all(members[identity(number).node_id].link.settled for number in everybody)
    assert set(sent.values()) == {2}


def test_a_settled_link_is_probed_three_times_within_the_age_at_which_it_would_be_stale() -> None:
    bench = Bench(settings=SLOW)
    everybody = range(1, 10)
    for number in everybody:
        bench.connect(number)
    bench.run(10.0, bench.answer_pings_of(*everybody))
    stale_s = LinkSettings().settle_max_age_us / SECOND
    sent = pings(bench.run(stale_s, bench.answer_pings_of(*everybody)))
    assert len(sent) == 9
    assert set(sent.values()) <= {3, 4}


def test_a_peer_that_does_not_answer_is_not_waited_for_until_its_turn() -> None:
    bench = Bench(settings=SLOW)
    for number in range(1, 10):
        bench.connect(number)
    silent = identity(9).node_id
    sent = pings(bench.run(4.0, bench.answer_pings_of(*range(1, 9))))
    assert sent[silent] >= 3


def test_a_node_that_stalls_every_few_seconds_still_keeps_its_links_settled() -> None:
    bench = Bench(settings=SLOW)
    everybody = range(1, 10)
    for number in everybody:
        bench.connect(number)
    bench.run(10.0, bench.answer_pings_of(*everybody))
    for _ in range(120):
        bench.core.on_loop_lag(300_000, bench.now_us)
        bench.run(1.6, bench.answer_pings_of(*everybody))
        members = bench.core.members(bench.now_us)
        assert all(members[identity(number).node_id].link.settled for number in everybody)


def test_a_start_that_kept_the_loop_busy_puts_settling_off_by_little_more_than_the_rest() -> None:
    bench = Bench(settings=SLOW)
    everybody = range(1, 10)
    for number in everybody:
        bench.connect(number)
    bench.core.on_loop_lag(300_000, bench.now_us)
    bench.run(1.0 + 0.5 + 5.0 + 0.3, bench.answer_pings_of(*everybody))
    members = bench.core.members(bench.now_us)
    assert all(members[identity(number).node_id].link.settled for number in everybody)


def test_a_link_knows_how_long_it_takes_to_settle() -> None:
    link = Link(LinkSettings())
    assert link.settles_in_us(7 * SECOND) == 0
    link.on_rtt(500, 7 * SECOND)
    assert link.settles_in_us(8 * SECOND) == 4 * SECOND
    assert link.settles_in_us(20 * SECOND) == 0
    link.on_rtt(500, 12 * SECOND)
    assert link.settles_in_us(13 * SECOND) is None
    assert link.settles_in_us(60 * SECOND) == 0
