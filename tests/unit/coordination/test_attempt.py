"""One ballot's way to a serving plan."""

from dataclasses import replace

import pytest

from config.settings import AssignmentSettings
from coordinator.assignment.attempt import Attempt, AttemptFailed
from coordinator.assignment.effects import Route, Send
from coordinator.assignment.running import Former, RunningPlan, RunningStage
from protocol.ballots import Activate, Active, FormerSplit, Nack, Prepare, Promise, Ready, Retire, Stage, StageProgress
from protocol.fencing import epoch_to_wire
from protocol.ids import NodeId
from tests.unit.coordination.builders import DIGEST, SECOND, SLOT, ballot, member, plan, view

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
AT = ballot(5, "a")
PLAN = plan(("b", 0, 3), ("a", 3, 5), ("c", 5, 8))
INSTANCE = {A: "a" * 32, B: "b" * 32, C: "c" * 32}


class Rig:
    """Collects what is sent; answers as the agents would."""

    def __init__(self, running=None, wanted=PLAN):
        self.attempt = Attempt(
            slot=SLOT, source="/m", ballot=AT, plan=wanted, running=running, settings=AssignmentSettings()
        )
        self.wanted = wanted
        self.sent = list(self.attempt.start(0))

    def reply(self, node_id, kind, now_us=0, **fields):
        values = {"ballot": epoch_to_wire(AT), "slot": SLOT, "instance": INSTANCE[node_id]}
        if kind in {Ready, Active}:
            values["plan_hash"] = self.wanted.plan_hash
        if kind is Promise:
            values["usable_memory_bytes"] = 1000
        if kind is StageProgress:
            values.pop("instance")
        effects = self.attempt.on_reply(node_id, kind(**{**values, **fields}), now_us)
        self.sent += effects
        return effects

    def nack(self, node_id, reason, claim="prepare", term=9):
        message = Nack(
            ballot=epoch_to_wire(AT), slot=SLOT, claim=claim, promised=epoch_to_wire(ballot(term)), reason=reason
        )
        effects = self.attempt.on_reply(node_id, message, 0)
        self.sent += effects
        return effects

    def promised(self, **fields):
        for node_id in self.attempt.nodes:
            self.reply(node_id, Promise, **fields)
        return self

    def ready(self):
        self.promised()
        for node_id in self.attempt.nodes:
            self.reply(node_id, Ready)
        return self

    def of(self, kind):
        return [
            (effect.peer, effect.message)
            for effect in self.sent
            if isinstance(effect, Send) and isinstance(effect.message, kind)
        ]


def peers(effects):
    return [(effect.peer, type(effect.message).__name__) for effect in effects if isinstance(effect, Send)]


def test_promises_are_asked_of_exactly_the_participants():
    assert [peer for peer, _ in Rig().of(Prepare)] == [B, A, C]


def test_nothing_is_staged_before_all_have_promised():
    rig = Rig()
    rig.reply(A, Promise)
    rig.reply(B, Promise)
    assert rig.of(Stage) == []
    rig.reply(C, Promise)
    stages = dict(rig.of(Stage))
    assert {
        node_id: (stages[node_id].assignment.layer_start, stages[node_id].assignment.layer_end) for node_id in stages
    } == {
        B: (0, 3),
        A: (3, 5),
        C: (5, 8),
    }
    first = stages[B].assignment
    assert (first.previous, first.next, first.driver, first.instance) == ("", "a", "b", INSTANCE[B])
    assert first.first_request_id == 5 << 28


def test_nothing_is_activated_before_all_are_ready_and_then_the_last_stage_is_first():
    rig = Rig().promised()
    rig.reply(C, Ready)
    rig.reply(B, Ready)
    assert rig.of(Activate) == []
    assert peers(rig.reply(A, Ready)) == [(C, "Activate")]
    assert peers(rig.reply(C, Active)) == [(A, "Activate")]
    assert peers(rig.reply(A, Active)) == [(B, "Activate")]
    assert rig.attempt.outcome is None
    rig.reply(B, Active)
    outcome = rig.attempt.outcome
    assert isinstance(outcome, RunningPlan)
    assert (outcome.ballot, outcome.nodes) == (AT, (B, A, C))


@pytest.mark.parametrize("kind", [Ready, Active])
def test_the_word_of_another_process_start_does_not_count(kind):
    rig = Rig().promised() if kind is Ready else Rig().ready()
    rig.reply(C, kind, instance="f" * 32)
    assert rig.attempt.outcome == AttemptFailed("c restarted")


def test_answers_about_another_plan_ballot_or_from_a_stranger_change_nothing():
    rig = Rig().promised()
    rig.reply(C, Ready, plan_hash="f" * 64)
    rig.reply(C, Ready, ballot=epoch_to_wire(ballot(4, "a")))
    rig.attempt.on_reply(
        NodeId("stranger"), Ready(ballot=epoch_to_wire(AT), slot=SLOT, plan_hash=PLAN.plan_hash, instance="f" * 32), 0
    )
    for node_id in (A, B):
        rig.reply(node_id, Ready)
    assert rig.of(Activate) == []


@pytest.mark.parametrize("reason", ["older_ballot", "sticky"])
def test_a_contested_ballot_is_given_up_everywhere_and_the_term_is_learned(reason):
    rig = Rig()
    assert peers(rig.nack(B, reason)) == [(B, "Abort"), (A, "Abort"), (C, "Abort")]
    failed = rig.attempt.outcome
    assert (failed.contested, failed.culprits, failed.learned_term) == (True, (), 9)
    assert reason in failed.reason
    assert "b refused to prepare" in failed.reason


@pytest.mark.parametrize(
    "reason", ["load_failed", "model_mismatch", "insufficient_memory", "draining", "engine_mismatch"]
)
def test_a_refusal_to_load_names_its_culprit(reason):
    rig = Rig().promised()
    rig.nack(C, reason, claim="stage")
    assert (rig.attempt.outcome.culprits, rig.attempt.outcome.contested) == ((C,), False)


def test_silence_is_asked_again_three_times_and_then_blamed():
    rig = Rig()
    rig.reply(A, Promise)
    assert peers(rig.attempt.on_timer(3 * SECOND)) == [(B, "Prepare"), (C, "Prepare")]
    assert rig.attempt.next_deadline() == 6 * SECOND
    rig.attempt.on_timer(6 * SECOND)
    rig.attempt.on_timer(9 * SECOND)
    assert rig.attempt.outcome.culprits == (B, C)


def test_a_load_may_take_as_long_as_its_bytes_grow():
    rig = Rig().promised()
    for second in range(50, 500, 50):
        rig.reply(C, StageProgress, now_us=second * SECOND, loaded_bytes=second, total_bytes=1000)
        for node_id in (A, B):
            rig.reply(node_id, Ready, now_us=second * SECOND)
        rig.attempt.on_timer(second * SECOND)
        assert rig.attempt.outcome is None
    rig.reply(C, StageProgress, now_us=480 * SECOND, loaded_bytes=450, total_bytes=1000)
    rig.attempt.on_timer(510 * SECOND - 1)
    assert rig.attempt.outcome is None
    rig.attempt.on_timer(510 * SECOND)
    assert rig.attempt.outcome.culprits == (C,)


def test_large_loads_get_longer_deadlines():
    large = replace(PLAN, stages=tuple(replace(stage, parameter_bytes=4 * 10**9) for stage in PLAN.stages))
    rig = Rig(wanted=large).promised()
    assert {message.assignment.load_deadline_us for _, message in rig.of(Stage)} == {200 * SECOND}


@pytest.mark.parametrize(
    "change",
    [{"state": "dead"}, {"status": "draining"}, {"status": "leaving"}, {"conflict": True}, {"instance": "f" * 32}],
)
def test_a_participant_that_goes_ends_the_attempt_at_once(change):
    rig = Rig()
    members = {node_id: member(node_id, instance=INSTANCE[node_id]) for node_id in (A, B, C)}
    rig.attempt.on_view(view(*members.values()), 0)
    rig.promised()
    rig.attempt.on_view(view(members[A], members[B], member("c", **{"instance": INSTANCE[C], **change})), 0)
    assert isinstance(rig.attempt.outcome, AttemptFailed)


def test_an_exclusion_ends_the_attempt_at_once():
    rig = Rig()
    everybody = view(*(member(node_id, instance=INSTANCE[node_id]) for node_id in (A, B, C)))
    rig.attempt.on_view(everybody, 0, frozenset({NodeId("elsewhere")}))
    assert rig.attempt.outcome is None
    rig.attempt.on_view(everybody, 0, frozenset({C}))
    assert rig.attempt.outcome == AttemptFailed("c is excluded")


def test_a_row_that_lags_behind_the_promise_is_no_restart():
    rig = Rig()
    old = view(*(member(node_id, instance="0" * 32) for node_id in (A, B, C)))
    rig.attempt.on_view(old, 0)
    rig.promised()
    rig.attempt.on_view(old, 0)
    assert rig.attempt.outcome is None


def running(*spans):
    stages = tuple(
        RunningStage(NodeId(node), INSTANCE[NodeId(node)], start, end, 10 * (end - start)) for node, start, end in spans
    )
    return RunningPlan(SLOT, ballot(3), "e" * 64, DIGEST, stages, 512, 1, 0)


def test_where_both_do_not_fit_the_old_plan_is_cut_off_and_retired_there_before_staging():
    rig = Rig(running(("a", 0, 4), ("b", 4, 8)))
    old = epoch_to_wire(ballot(3))
    rig.reply(A, Promise, usable_memory_bytes=5, replaceable_bytes=40, active=old, active_hash="e" * 64)
    rig.reply(B, Promise, usable_memory_bytes=50, replaceable_bytes=40, active=old, active_hash="e" * 64)
    effects = rig.reply(C, Promise)
    assert effects[0] == Route(SLOT, None, ballot(3))
    assert peers(effects)[0] == (A, "Retire")
    assert len(rig.of(Retire)) == 1
    assert rig.attempt.retired == {A}
    rig.nack(A, "insufficient_memory", claim="stage")
    assert rig.attempt.outcome is None, "it is still unloading"


def test_a_stage_that_stays_needs_no_memory_and_keeps_its_cache_epoch():
    rig = Rig(running(("b", 0, 3), ("c", 3, 8)))
    old = epoch_to_wire(ballot(3))
    rig.reply(B, Promise, usable_memory_bytes=0, active=old, active_hash="e" * 64, cache_epoch={"value": 7})
    rig.reply(C, Promise, active=old, active_hash="e" * 64, cache_epoch={"value": 7})
    rig.reply(A, Promise)
    stages = dict(rig.of(Stage))
    assert rig.of(Retire) == []
    assert (stages[B].assignment.cache_epoch.value, stages[C].assignment.cache_epoch.value) == (7, 8)


def test_another_cache_type_makes_the_caches_of_a_stage_that_stays_meaningless():
    rig = Rig(running(("b", 0, 3), ("c", 3, 8)), replace(PLAN, cache_type="q8_0"))
    old = epoch_to_wire(ballot(3))
    for node_id in (B, C, A):
        rig.reply(node_id, Promise, active=old, active_hash="e" * 64, cache_epoch={"value": 7})
    told = dict(rig.of(Stage))[B].assignment
    assert (told.cache_type, told.cache_epoch.value) == ("q8_0", 8)


def test_only_stage_0_is_told_what_the_move_replaced():
    rig = Rig()
    rig.attempt = Attempt(
        slot=SLOT,
        source="/m",
        ballot=AT,
        plan=PLAN,
        running=None,
        settings=AssignmentSettings(),
        former=Former((2, 5, 8), 7),
    )
    rig.attempt.start(0)
    rig.ready()
    told = {peer: message.assignment.former for peer, message in rig.of(Stage)}
    assert told == {B: FormerSplit(layer_ends=(2, 5, 8), tpot_us=7), A: None, C: None}
    for node_id in (C, A, B):
        rig.reply(node_id, Active)
    assert rig.attempt.outcome.former == Former((2, 5, 8), 7)


def test_memory_that_not_even_retirement_would_free_is_refused_before_anything_is_loaded():
    rig = Rig()
    rig.reply(A, Promise, usable_memory_bytes=5, replaceable_bytes=5)
    rig.reply(B, Promise)
    rig.reply(C, Promise)
    assert rig.attempt.outcome.culprits == (A,)
    assert rig.of(Stage) == []
