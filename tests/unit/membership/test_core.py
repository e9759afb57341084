"""One core, fed by hand: what it says to whom, and when."""

import itertools
from typing import TYPE_CHECKING

from config.settings import MembershipSettings
from protocol.ids import NodeId
from protocol.membership import (
    AdmissionLearned,
    CloseConnection,
    Conflict,
    Dial,
    MemberChanged,
    Rejected,
    Send,
    Tombstone,
)
from protocol.messages import (
    DigestRequest,
    GossipPush,
    Ping,
    PingRequest,
    RowRequest,
    RowVersion,
)
from protocol.rows import Admission
from tests.simulation.membership_mesh import identity, row_of
from tests.unit.membership.hands import HOUR, INSTANCE, SECOND, Bench, sent

if TYPE_CHECKING:
    from protocol.membership.effects import Effect


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
    assert bench.health(1) > 0
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
