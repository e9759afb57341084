"""Evidence against accusation: who is believed, and who comes back."""

from typing import TYPE_CHECKING

from config.settings import MembershipSettings
from protocol.membership import (
    MemberChanged,
    Rejected,
    Send,
)
from protocol.membership.signing import label_of
from protocol.messages import (
    Ack,
    GossipPush,
    Ping,
    PingRequest,
    RowRequest,
)
from protocol.rows import Accusation
from tests.simulation.membership_mesh import identity
from tests.unit.membership.hands import SECOND, Bench, accusation, refutation, sent

if TYPE_CHECKING:
    from protocol.membership.effects import Effect


def test_an_accusation_of_a_connected_node_causes_a_probe_and_nothing_else() -> None:
    bench = Bench(settings=MembershipSettings(probe_interval_us=20 * SECOND))
    bench.connect(1)
    bench.connect(2)
    bench.run(8, bench.answer_pings_of(1, 2))
    for verdict in ("suspect", "dead"):
        bench.gossip(1, accusations=(accusation(2, 1, verdict),))
        assert bench.state(2) == "alive"
    effects = bench.run(0.01, bench.answer_pings_of(1, 2))
    assert [send.peer for send in sent(effects, Ping)] == [identity(2).node_id]
    bench.run(30, bench.answer_pings_of(1, 2))
    assert bench.state(2) == "alive"


def test_a_probe_goes_by_datagram_then_by_stream_and_through_helpers_before_it_fails() -> None:
    bench = Bench(settings=MembershipSettings(probe_everyone_up_to=16))
    for number in range(1, 6):
        bench.connect(number)
    bench.run(3, bench.answer_pings_of(1, 2, 3, 4, 5))
    effects = bench.run(2.0, bench.answer_pings_of(1, 2, 3, 4))
    lanes = [send.lane for send in sent(effects, Ping) if send.peer == identity(5).node_id]
    assert lanes[:2] == ["datagram", "stream"]
    asked = [send for send in sent(effects, PingRequest) if send.message.target == identity(5).node_id]  # type: ignore[union-attr]
    assert len({send.peer for send in asked[:3]}) == 3
    assert bench.state(5) in {"alive", "suspect"}


def test_a_helper_that_reaches_the_node_clears_it() -> None:
    bench = Bench()
    for number in range(1, 5):
        bench.connect(number)
    helpers = bench.answer_pings_of(1, 2, 3)

    def answer(send: Send) -> None:
        helpers(send)
        if isinstance(send.message, PingRequest):
            ack = Ack(seq=send.message.seq, target=send.message.target)
            bench.core.on_message(send.peer, ack, bench.now_us, lane="stream")

    bench.run(60, answer)
    assert bench.state(4) == "alive"


def test_an_answer_fetched_by_somebody_who_was_not_asked_is_refused() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    effects = bench.run(1.5)
    ping = next(send for send in sent(effects, Ping) if send.peer == identity(2).node_id)
    forged = Ack(seq=ping.message.seq, target=identity(2).node_id)  # type: ignore[union-attr]
    assert Rejected(identity(9).node_id, "foreign_ack") in bench.say(9, forged)
    assert Rejected(identity(9).node_id, "foreign_ack") in bench.say(9, Ack(seq=ping.message.seq))  # type: ignore[union-attr]


def test_an_answer_that_took_no_time_is_no_measurement() -> None:
    bench = Bench()
    bench.connect(1)
    effects: list[Effect] = []

    def answer(send: Send) -> None:
        if isinstance(send.message, Ping):
            effects.extend(bench.say(1, Ack(seq=send.message.seq), lane="datagram"))

    bench.run(3, answer)
    assert Rejected(identity(1).node_id, "rtt") in effects
    assert bench.core.link_facts(bench.now_us) == ()


def test_an_answer_nobody_asked_for_does_nothing() -> None:
    bench = Bench()
    bench.connect(1)
    assert [e for e in bench.say(1, Ack(seq=12345), lane="datagram") if not isinstance(e, Rejected)] == []
    assert bench.core.link_facts(bench.now_us) == ()


def test_an_accused_node_raises_its_incarnation_once_for_a_burst_of_accusations() -> None:
    bench = Bench()
    bench.connect(1)
    me = bench.me.node_id
    charge = Accusation(node_id=me, boot_counter=5, incarnation=0, verdict="suspect", accuser=identity(1).node_id)
    answers = [sent(bench.gossip(1, accusations=(charge,)), GossipPush) for _ in range(20)]
    raised = {item.incarnation for sends in answers for send in sends for item in send.message.gossip.refutations}  # type: ignore[union-attr]
    assert raised == {1}
    assert bench.health(1) == 1


def test_an_accusation_of_an_incarnation_that_never_was_is_refused() -> None:
    bench = Bench()
    bench.connect(1)
    charge = Accusation(
        node_id=bench.me.node_id, boot_counter=5, incarnation=2**50, verdict="dead", accuser=identity(1).node_id
    )
    assert Rejected(identity(1).node_id, "incarnation") in bench.gossip(1, accusations=(charge,))
    assert bench.core.own_row is not None
    assert bench.core.own_row.incarnation == 0


def test_a_node_declared_dead_answers_with_a_higher_row() -> None:
    bench = Bench()
    bench.connect(1)
    before = bench.core.own_row
    charge = Accusation(
        node_id=bench.me.node_id, boot_counter=5, incarnation=0, verdict="dead", accuser=identity(1).node_id
    )
    effects = bench.gossip(1, accusations=(charge,))
    assert before is not None
    assert bench.core.own_row is not None
    assert bench.core.own_row.seq > before.seq
    rows = [row for send in sent(effects, GossipPush) for row in send.message.gossip.rows]  # type: ignore[union-attr]
    assert len(rows) == 1


def test_a_node_whose_very_row_was_buried_outdoes_it_when_the_accuser_insists() -> None:
    """A suspicion is refuted without a new row, so the row may lie in the grave of who buries it afterwards."""
    bench = Bench()
    bench.connect(1)
    me, accuser = bench.me.node_id, identity(1).node_id
    for verdict in ("suspect", "dead"):
        charge = Accusation(node_id=me, boot_counter=5, incarnation=0, verdict=verdict, accuser=accuser)  # type: ignore[arg-type]
        bench.gossip(1, accusations=(charge,))
    assert bench.core.own_row is not None
    shown = bench.core.own_row.seq
    bench.run(3, bench.answer_pings_of(1))
    effects = bench.gossip(1, accusations=(charge,))
    rows = [row for send in sent(effects, GossipPush) for row in send.message.gossip.rows]  # type: ignore[union-attr]
    assert [label_of(row).version for row in rows] == [(5, shown + 1)]
    assert bench.gossip(1, accusations=(charge,)), "answered"
    assert bench.core.own_row.seq == shown + 1, "a burst makes one row"


def test_a_dead_node_that_is_connected_is_asked_for_the_row_that_others_tell_of() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    bench.kill(2)
    effects = bench.gossip(1, rows=(bench.row(2, 50),))
    assert [send.peer for send in sent(effects, RowRequest)] == [identity(2).node_id]
    bench.gossip(2, rows=(bench.row(2, 50),))
    assert bench.state(2) == "alive"


def test_a_higher_row_of_a_dead_node_told_by_others_is_held_back_until_contact() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    bench.core.on_disconnected(identity(2).node_id, bench.now_us)
    bench.kill(2)
    for _ in range(3):
        bench.gossip(1, rows=(bench.row(2, 50),), versions=())
        bench.run(30, bench.answer_pings_of(1))
        assert bench.state(2) == "dead"
    bench.gossip(1, refutations=(refutation(identity(2), 1, 7, 50),))
    assert bench.state(2) == "dead"
    effects = bench.connect(2, seq=50)
    assert MemberChanged(identity(2).node_id, "dead", "alive", "returned") in effects
    assert len(bench.core.members()[identity(2).node_id].flaps) == 1


def test_the_same_row_does_not_bring_a_dead_node_back_even_by_itself() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2, seq=7)
    bench.kill(2)
    effects = bench.connect(2, seq=7)
    assert bench.state(2) == "dead"
    told = [item for send in sent(effects, GossipPush) for item in send.message.gossip.accusations]  # type: ignore[union-attr]
    assert [(item.node_id, item.verdict) for item in told] == [(identity(2).node_id, "dead")]


def test_a_forged_refutation_clears_nobody() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    bench.run(4, bench.answer_pings_of(1))
    assert bench.state(2) == "suspect"
    forged = refutation(identity(2), 1, 5, 1).model_copy(update={"signature": bytes(64)})
    assert Rejected(identity(1).node_id, "refutation_signature") in bench.gossip(1, refutations=(forged,))
    assert bench.state(2) == "suspect"
    bench.gossip(1, refutations=(refutation(identity(2), 1, 5, 1),))
    assert bench.state(2) == "alive"
