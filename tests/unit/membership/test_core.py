"""One core, fed by hand: what it says to whom."""

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

from config.settings import LinkSettings, MembershipSettings
from protocol.codec import encode_row
from protocol.ids import NodeId
from protocol.membership import (
    AdmissionLearned,
    CloseConnection,
    Conflict,
    Dial,
    MemberChanged,
    Membership,
    Rejected,
    Send,
    Tombstone,
)
from protocol.membership.effects import Effect
from protocol.membership.signing import refutation_bytes
from protocol.messages import (
    Ack,
    DigestRequest,
    Gossip,
    GossipPush,
    MembershipMessage,
    Ping,
    PingRequest,
    RowRequest,
    RowVersion,
)
from protocol.rows import Accusation, Admission, Refutation, SignedRow
from tests.simulation.membership_mesh import Identity, identity, row_of, verify

SECOND = 1_000_000
HOUR = 3_600 * SECOND
INSTANCE = "a" * 32


class Bench:
    """The core of node 0, a clock, and hands to play everybody else with."""

    def __init__(self, **options: Any) -> None:
        self.now_us = 10 * SECOND
        self.admitted = {identity(number).node_id for number in range(10)}
        self.me = identity(0)
        settings = options.pop("settings", MembershipSettings())
        self.core = Membership(
            node_id=self.me.node_id,
            public_key=self.me.public_key,
            sign=self.me.sign,
            verify=verify,
            settings=settings,
            link_settings=LinkSettings(),
            random=Random(1),
            boot_counter=5,
            instance=INSTANCE,
            is_admitted=self.admitted.__contains__,
            now_us=self.now_us,
            **options,
        )
        self.effects: list[Effect] = self.core.publish(row_of(self.me, "me", ("10.0.0.1:1",)), self.now_us)

    def row(self, number: int, seq: int, boot: int = 1, **fields: Any) -> SignedRow:
        who = identity(number)
        plain = row_of(who, f"n{number}", (f"10.0.0.{number + 1}:1",)).model_copy(
            update={"boot_counter": boot, "seq": seq, **fields}
        )
        payload = encode_row(plain)
        return SignedRow(payload=payload, signature=who.sign(payload))

    def connect(self, number: int, *, seq: int = 1) -> list[Effect]:
        """The peer connects and shows its row."""
        effects = self.core.on_connected(identity(number).node_id, f"10.0.0.{number + 1}:1", self.now_us)
        return [*effects, *self.gossip(number, rows=(self.row(number, seq),))]

    def say(self, number: int, message: MembershipMessage, lane: str = "stream") -> list[Effect]:
        effects = self.core.on_message(identity(number).node_id, message, self.now_us, lane=lane)  # type: ignore[arg-type]
        self.core.validate()
        return effects

    def gossip(self, number: int, **items: Any) -> list[Effect]:
        return self.say(number, GossipPush(gossip=Gossip(**items)))

    def run(self, seconds: float, answer: Callable[[Send], None] = lambda _: None) -> list[Effect]:
        """Let timers fire on time; ``answer`` sees every message and may feed the core."""
        end_us, seen = self.now_us + int(seconds * SECOND), list[Effect]()
        while (due_us := self.core.next_deadline()) is not None and due_us <= end_us:
            self.now_us = max(self.now_us, due_us)
            effects = self.core.on_timer(self.now_us)
            seen += effects
            for effect in effects:
                if isinstance(effect, Send):
                    answer(effect)
            self.core.validate()
        self.now_us = end_us
        return seen

    def answer_pings_of(self, *numbers: int, rtt_us: int = 400) -> Callable[[Send], None]:
        who = {identity(number).node_id for number in numbers}

        def answer(send: Send) -> None:
            if send.peer in who and isinstance(send.message, Ping):
                self.core.on_message(send.peer, Ack(seq=send.message.seq), self.now_us + rtt_us, lane=send.lane)

        return answer

    def state(self, number: int) -> str | None:
        member = self.core.members().get(identity(number).node_id)
        return None if member is None else member.state

    def kill(self, number: int) -> None:
        """Nobody answers until the node is dead; others keep talking."""
        others = [other for other in range(1, 10) if other != number and self.state(other) == "alive"]
        for _ in range(60):
            self.run(1, self.answer_pings_of(*others))
            if self.state(number) == "dead":
                return
        raise AssertionError("it never died")


def sent(effects: list[Effect], kind: type) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def accusation(number: int, accuser: int, verdict: str = "suspect", incarnation: int = 0, boot: int = 1) -> Accusation:
    return Accusation(
        node_id=identity(number).node_id,
        boot_counter=boot,
        incarnation=incarnation,
        verdict=verdict,  # type: ignore[arg-type]
        accuser=identity(accuser).node_id,
    )


def refutation(who: Identity, boot: int, incarnation: int, seq: int) -> Refutation:
    payload = refutation_bytes(who.node_id, boot, incarnation, seq)
    return Refutation(
        node_id=who.node_id, boot_counter=boot, incarnation=incarnation, seq=seq, signature=who.sign(payload)
    )


def test_a_connected_peer_gets_the_own_row_and_a_digest_at_once() -> None:
    bench = Bench()
    effects = bench.core.on_connected(identity(1).node_id, "10.0.0.2:1", bench.now_us)
    assert [type(effect.message) for effect in effects if isinstance(effect, Send)] == [GossipPush, DigestRequest]


def test_nothing_goes_out_for_a_publication_that_says_nothing_new() -> None:
    bench = Bench()
    bench.connect(1)
    bench.run(3, bench.answer_pings_of(1))
    before = bench.core.own_row
    bench.core.publish(row_of(bench.me, "me", ("10.0.0.1:1",)), bench.now_us)
    assert bench.core.own_row == before
    bench.core.publish(row_of(bench.me, "me", ("10.0.0.1:1",), status="draining"), bench.now_us)
    assert before is not None
    assert bench.core.own_row is not None
    assert bench.core.own_row.seq == before.seq + 1


def test_a_row_of_a_node_that_was_not_admitted_waits_for_its_admission() -> None:
    bench = Bench()
    bench.connect(1)
    stranger = identity(42)
    effects = bench.gossip(1, rows=(bench.row(42, 1),))
    assert Rejected(identity(1).node_id, "row_unadmitted") in effects
    assert stranger.node_id not in bench.core.members()
    admission = Admission(
        mesh_id="m",
        node_id=stranger.node_id,
        public_key=stranger.public_key,
        version=1,
        signer=identity(1).node_id,
        signer_public_key=identity(1).public_key,
        signature=bytes(64),
    )
    assert bench.gossip(1, admissions=(admission,)) == [AdmissionLearned(admission)]
    bench.admitted.add(stranger.node_id)
    effects = bench.core.spread_admission(admission, bench.now_us, told_by=identity(1).node_id)
    assert MemberChanged(stranger.node_id, None, "alive", "joined") in effects
    assert bench.gossip(1, admissions=(admission,)) == []


def test_a_revoked_member_is_dropped_and_its_connection_closed() -> None:
    bench = Bench()
    bench.connect(1)
    revoked = identity(1)
    bench.admitted.discard(revoked.node_id)
    admission = Admission(
        mesh_id="m",
        node_id=revoked.node_id,
        public_key=revoked.public_key,
        version=2,
        revoked=True,
        signer=bench.me.node_id,
        signer_public_key=bench.me.public_key,
        signature=bytes(64),
    )
    effects = bench.core.spread_admission(admission, bench.now_us)
    assert MemberChanged(revoked.node_id, "alive", None, "revoked") in effects
    assert CloseConnection(revoked.node_id, "revoked") in effects
    assert bench.say(1, PingRequest(seq=1, target="x")) == [Rejected(revoked.node_id, "unadmitted")]


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
    bench = Bench()
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
    assert bench.core.local_health == 1


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


def test_a_forgotten_node_is_still_not_brought_back_by_hearsay() -> None:
    bench = Bench(settings=MembershipSettings(tombstone_left_us=10 * SECOND))
    bench.connect(1)
    bench.connect(2)
    bench.gossip(2, rows=(bench.row(2, 2, status="left"),))
    assert bench.state(2) == "left"
    bench.core.on_disconnected(identity(2).node_id, bench.now_us)
    bench.run(20, bench.answer_pings_of(1))
    assert bench.state(2) is None
    for seq in (1, 2, 9):
        assert Rejected(identity(1).node_id, "row_buried") in bench.gossip(1, rows=(bench.row(2, seq),)) or seq <= 2
        assert bench.state(2) is None
    bench.connect(2, seq=10)
    assert bench.state(2) == "alive"


def test_tombstones_survive_a_restart() -> None:
    bench = Bench(tombstones=(Tombstone(identity(2).node_id, 1, 9),))
    bench.connect(1)
    bench.gossip(1, rows=(bench.row(2, 12),))
    assert bench.state(2) is None
    assert Tombstone(identity(2).node_id, 1, 9) in bench.core.tombstones()


def test_two_processes_with_one_identity_are_a_conflict_and_a_restart_clears_it() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    effects = bench.gossip(1, rows=(bench.row(2, 2, instance="b" * 32),))
    assert Conflict(identity(2).node_id, 1) in effects
    assert bench.core.members()[identity(2).node_id].conflict
    bench.gossip(2, rows=(bench.row(2, 1, boot=2, instance="c" * 32),))
    assert not bench.core.members()[identity(2).node_id].conflict


def test_a_clone_of_this_very_node_is_noticed_and_said() -> None:
    bench = Bench()
    bench.connect(1)
    effects = bench.gossip(1, rows=(bench.row(0, 3, boot=5, instance="b" * 32),))
    assert Conflict(bench.me.node_id, 5) in effects
    bench.run(3, bench.answer_pings_of(1))
    own = bench.core.members()[bench.me.node_id]
    assert own.conflict
    assert "duplicate_identity" in own.row.degraded
    assert bench.gossip(1, rows=(bench.row(0, 3, boot=4, instance="d" * 32),)) == []


def test_a_restart_without_a_goodbye_counts_as_a_flap() -> None:
    bench = Bench()
    bench.connect(1)
    bench.gossip(1, rows=(bench.row(1, 1, boot=2, instance="e" * 32),))
    assert len(bench.core.members()[identity(1).node_id].flaps) == 1


def test_a_version_that_is_news_is_asked_for_once_a_second() -> None:
    bench = Bench()
    bench.connect(1)
    news = RowVersion(node_id=identity(1).node_id, boot_counter=1, seq=9)
    assert len(sent(bench.gossip(1, versions=(news,)), RowRequest)) == 1
    assert sent(bench.gossip(1, versions=(news,)), RowRequest) == []
    bench.now_us += SECOND
    assert len(sent(bench.gossip(1, versions=(news,)), RowRequest)) == 1


def test_a_digest_is_answered_with_what_is_newer_here_and_a_request_for_what_is_newer_there() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        bench.connect(number, seq=5)
    digest = DigestRequest(
        rows=(
            RowVersion(node_id=identity(1).node_id, boot_counter=1, seq=5),
            RowVersion(node_id=identity(2).node_id, boot_counter=1, seq=9),
            RowVersion(node_id=identity(3).node_id, boot_counter=1, seq=1),
        )
    )
    effects = bench.say(1, digest)
    rows = [row for send in sent(effects, GossipPush) for row in send.message.gossip.rows]  # type: ignore[union-attr]
    assert rows[0] == bench.row(3, 5)
    assert len(rows) == 2, "the own row is missing there, too"
    assert [send.message.rows for send in sent(effects, RowRequest)] == [(identity(2).node_id,)]  # type: ignore[union-attr]


def test_a_digest_that_holds_a_dead_node_alive_is_answered_by_the_accusation_and_not_the_row() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    bench.kill(2)
    effects = bench.say(1, DigestRequest(rows=(RowVersion(node_id=identity(2).node_id, boot_counter=1, seq=1),)))
    pushes = [send.message.gossip for send in sent(effects, GossipPush)]  # type: ignore[union-attr]
    assert [item.node_id for push in pushes for item in push.accusations] == [identity(2).node_id]
    assert bench.row(2, 1) not in [row for push in pushes for row in push.rows]
    assert sent(bench.say(1, RowRequest(rows=(identity(2).node_id,))), GossipPush) == []


def test_a_late_loop_accuses_nobody_rests_and_says_so() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    bench.run(5, bench.answer_pings_of(1, 2))
    bench.now_us += 9 * SECOND
    effects = bench.core.on_timer(bench.now_us)
    assert not [effect for effect in effects if isinstance(effect, MemberChanged)]
    assert bench.core.local_health > 0
    pings = sent(bench.run(0.9), Ping)
    assert pings == []
    bench.run(5, bench.answer_pings_of(1, 2))
    assert (bench.state(1), bench.state(2)) == ("alive", "alive")
    assert bench.core.own_row is not None
    assert "loop_lag" in bench.core.own_row.degraded


def test_a_loop_that_is_seconds_late_sheds_connections_it_can_spare() -> None:
    bench = Bench()
    bench.admitted.update(identity(number).node_id for number in range(40))
    for number in range(1, 33):
        bench.connect(number)
    effects = bench.core.on_loop_lag(1_500_000, bench.now_us)
    assert len([effect for effect in effects if isinstance(effect, CloseConnection)]) == 4
    assert bench.core.on_loop_lag(1_500_000, bench.now_us + 1) == []


def test_after_a_clock_gap_connections_close_samples_are_void_and_a_new_row_goes_out() -> None:
    bench = Bench()
    bench.connect(1)
    bench.run(10, bench.answer_pings_of(1))
    before = bench.core.own_row
    assert bench.core.link_facts(bench.now_us)
    effects = bench.core.on_clock_gap(HOUR, bench.now_us)
    assert CloseConnection(identity(1).node_id, "clock_gap") in effects
    assert bench.core.link_facts(bench.now_us) == ()
    assert before is not None
    assert bench.core.own_row is not None
    assert bench.core.own_row.seq == before.seq + 1
    assert bench.state(1) == "alive"


def test_leaving_tells_everybody_connected_and_silences_the_core() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    effects = bench.core.leave(bench.now_us)
    assert {send.peer for send in sent(effects, GossipPush)} == {identity(1).node_id, identity(2).node_id}
    assert bench.core.next_deadline() is None
    assert bench.core.leave(bench.now_us) == []


def test_a_failed_dial_is_repeated_sooner_than_an_unanswered_one_and_for_ever() -> None:
    bench = Bench(seeds=("10.9.9.9:1",))
    times: list[int] = []
    while len(times) < 200:
        effects = bench.core.on_timer(bench.core.next_deadline() or 0)
        bench.now_us = max(bench.now_us, bench.core._ground.now_us)
        if Dial(None, "10.9.9.9:1", "join") in effects:
            times.append(bench.now_us)
            bench.core.on_dial_failed("10.9.9.9:1", bench.now_us)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) <= 60 * SECOND
    assert min(gaps) >= SECOND


def test_a_table_that_is_full_refuses_newcomers_and_keeps_the_rest() -> None:
    bench = Bench(settings=MembershipSettings(max_members=2))
    bench.connect(1)
    bench.connect(2)
    assert Rejected(identity(3).node_id, "table_full") in bench.connect(3)
    assert set(bench.core.members()) == {identity(number).node_id for number in range(3)}


def test_members_show_this_node_and_are_frozen() -> None:
    bench = Bench()
    bench.connect(1)
    members = bench.core.members()
    own, other = members[bench.me.node_id], members[identity(1).node_id]
    assert (own.is_self, own.direct, own.row.boot_counter, own.row.instance) == (True, True, 5, INSTANCE)
    assert (other.is_self, other.direct, other.address) == (False, True, "10.0.0.2:1")


def test_a_peer_may_not_use_this_node_to_flood_others_with_pings() -> None:
    bench = Bench()
    bench.connect(1)
    bench.connect(2)
    effects: list[Effect] = []
    for seq in range(400):
        effects += bench.say(1, PingRequest(seq=seq, target=identity(2).node_id))
    assert len(sent(effects, Ping)) == 256
    assert Rejected(NodeId(identity(1).node_id), "relay_limit") in effects
