"""One exchange measures both ends of a link, and a row that only refreshes travels with what is sent anyway."""

from config.settings import MembershipSettings
from protocol.codec import MAX_DATAGRAM_BYTES, encode
from protocol.membership import Rejected, Send
from protocol.membership.dissemination import GossipQueue, encoded_bytes
from protocol.membership.effects import Effect
from protocol.membership.member import Member
from protocol.messages import Ack, GossipPush, Ping, RowVersion
from tests.simulation.membership_mesh import identity
from tests.unit.membership.hands import SECOND, Bench

SLOW = MembershipSettings(probe_everyone_up_to=1, probes_per_second_max=1)
"""With nine peers each would wait nine seconds for its turn."""
PEER = identity(1).node_id
LARGEST = 2**53 - 1


def settled_bench() -> Bench:
    bench = Bench(settings=SLOW)
    for number in range(1, 10):
        bench.connect(number)
    bench.run(10.0, bench.answer_pings_of(*range(1, 10)))
    return bench


def messages(effects: list[Effect], kind: type) -> list[Send]:
    return [each for each in effects if isinstance(each, Send) and isinstance(each.message, kind)]


def answer_to(bench: Bench, lane: str = "datagram") -> Ack:
    (sent,) = messages(bench.say(1, Ping(seq=7), lane), Ack)
    assert isinstance(sent.message, Ack)
    return sent.message


def until_an_echo(bench: Bench) -> Ack:
    """The peer pings at every moment until this node would have pinged soon itself."""
    for _ in range(100):
        if (answer := answer_to(bench)).echo:
            return answer
        bench.run(0.2, bench.answer_pings_of(*range(2, 10)))
    raise AssertionError("never")


def seen(bench: Bench) -> Member:
    return bench.core.members(bench.now_us)[PEER]


def samples(bench: Bench) -> int:
    link = seen(bench).link
    return 0 if link is None or link.rtt is None else link.rtt.samples


def test_a_peer_that_pings_from_the_start_is_settled_without_a_ping_to_it() -> None:
    bench = Bench(settings=SLOW)
    bench.connect(1)
    for _ in range(2):
        bench.say(1, Ack(seq=answer_to(bench).echo), "datagram")
        bench.now_us += 5 * SECOND + 1
    link = bench.core.members(bench.now_us - SECOND)[PEER].link
    assert link is None or link.rtt is None, "an answer in no time is no sample"
    for _ in range(2):
        echo = answer_to(bench).echo
        bench.now_us += 900
        bench.say(1, Ack(seq=echo, held_us=300), "datagram")
        bench.now_us += 5 * SECOND + 1
    link = bench.core.members(bench.now_us - SECOND)[PEER].link
    assert link is not None
    assert link.settled
    assert link.rtt is not None
    assert link.rtt.min_rtt_us == 600


def test_a_ping_is_answered_by_an_echo_only_when_this_node_would_soon_ask_itself() -> None:
    bench = settled_bench()
    bench.run(10.0, bench.answer_pings_of(*range(1, 10)))
    answers = [answer_to(bench)]
    bench.say(1, Ack(seq=answers[0].echo), "datagram")
    fresh = until_an_echo(bench)
    bench.now_us += 400
    bench.say(1, Ack(seq=fresh.echo), "datagram")
    assert answer_to(bench).echo == 0
    assert answer_to(bench, "stream").echo == 0
    pinged = [
        each for each in messages(bench.run(4.0, bench.answer_pings_of(*range(2, 10))), Ping) if each.peer == PEER
    ]
    assert pinged == [], "its turn comes an interval after the sample"


def test_an_echo_counts_once_from_the_peer_that_was_asked_in_time_and_by_datagram() -> None:
    bench = settled_bench()
    echo = until_an_echo(bench).echo
    before = samples(bench)
    bench.now_us += 400
    for number, seq, lane in ((2, echo, "datagram"), (1, echo + 1, "datagram"), (1, echo, "stream")):
        bench.say(number, Ack(seq=seq), lane)
    bench.say(1, Ack(seq=echo, target=identity(2).node_id), "datagram")
    assert samples(bench) == before
    bench.say(1, Ack(seq=echo), "datagram")
    bench.say(1, Ack(seq=echo), "datagram")
    assert samples(bench) == before + 1


def test_an_echo_that_comes_very_late_or_after_a_stall_is_no_sample() -> None:
    for stalls in (False, True):
        bench = settled_bench()
        echo, before = until_an_echo(bench).echo, samples(bench)
        if stalls:
            bench.core.on_loop_lag(300_000, bench.now_us)
            bench.now_us += 400
        else:
            bench.now_us += 6 * SECOND
        bench.say(1, Ack(seq=echo), "datagram")
        assert samples(bench) == before


def test_an_echo_is_answered_only_in_an_answer_to_a_ping_of_ours_and_never_echoed_again() -> None:
    bench = settled_bench()
    assert messages(bench.say(1, Ack(seq=5, echo=6), "datagram"), Ack) == []
    pings: list[Send] = []
    while not pings:
        sent = messages(bench.run(0.05, bench.answer_pings_of(*range(2, 10))), Ping)
        pings = [each for each in sent if each.peer == PEER and each.lane == "datagram"]
    ping = pings[0]
    assert isinstance(ping.message, Ping)
    effects = bench.core.on_message(
        PEER, Ack(seq=ping.message.seq, echo=6), bench.now_us, lane="datagram", arrived_us=bench.now_us - 70
    )
    answers = [each.message for each in messages(effects, Ack)]
    assert [(answer.seq, answer.held_us, answer.echo) for answer in answers if isinstance(answer, Ack)] == [(6, 70, 0)]
    assert not [each for each in effects if isinstance(each, Rejected)]


def test_the_longest_answer_with_an_echo_and_all_that_may_ride_along_fits_a_datagram() -> None:
    queue = GossipQueue(items_max=64)
    for number in range(64):
        fact = RowVersion(node_id=identity(number).node_id, boot_counter=LARGEST, seq=LARGEST)
        queue.add("row", fact.node_id, fact)
    gossip = queue.take(PEER, 64, 63)
    assert sum(encoded_bytes(fact) for fact in gossip.versions) > 850
    answer = Ack(seq=LARGEST, held_us=LARGEST, health=7, echo=LARGEST, gossip=gossip)
    assert len(encode(answer)) <= MAX_DATAGRAM_BYTES


def test_a_refreshed_row_waits_for_a_probe_and_news_do_not() -> None:
    bench = settled_bench()
    bench.run(20.0, bench.answer_pings_of(*range(1, 10)))

    def heard_of(seq: int, **fields: object) -> tuple[bool, bool]:
        bench.gossip(1, rows=(bench.row(1, seq, **fields),))
        sent = bench.run(4.0, bench.answer_pings_of(*range(1, 10)))

        def tell(kind: type) -> bool:
            return any(
                row.signature == bench.row(1, seq, **fields).signature
                for each in messages(sent, kind)
                for row in each.message.gossip.rows  # type: ignore[union-attr]
            )

        return tell(Ping), tell(GossipPush)

    assert heard_of(2) == (True, False)
    assert heard_of(3, status="draining")[1]


def test_what_replaces_news_that_not_everybody_heard_is_not_quiet() -> None:
    queue = GossipQueue(items_max=8)
    version = RowVersion(node_id="a", boot_counter=1, seq=1)
    queue.add("row", "a", version, quiet=True)
    assert not queue.pressing
    queue.add("row", "a", version)
    queue.add("row", "a", version, quiet=True)
    assert queue.pressing
    queue.drop("row", "a")
    assert not queue.pressing
