"""The table of the protocol, row by row, at the agent."""

import pytest

from protocol.ballots import Active, Promise, Ready, StageProgress
from protocol.fencing import epoch_from_wire
from protocol.ids import NodeId
from stage_agent.stage.effects import ActivateRuntime, Count, Load, LoadFailed, Persist, Reply, Unload
from tests.unit.stage.builders import (
    HASH,
    MINE,
    OTHER_HASH,
    SECOND,
    SLOT,
    abort,
    activate,
    agent,
    assignment,
    ballot,
    finish,
    keepalive,
    prepare,
    refusal,
    replies,
    retire,
    serve,
    stage,
    tell,
)


def test_a_promise_is_persisted_before_it_is_given():
    effects = tell(agent(), prepare(ballot(1)))
    assert isinstance(effects[0], Persist)
    assert effects[0].record.promised == ballot(1)
    assert isinstance(effects[1], Reply)
    assert isinstance(effects[1].message, Promise)


def test_a_promise_says_what_is_active_and_how_much_memory_is_left():
    made = agent(memory=1000)
    serve(made, ballot(1), assignment(300))
    (promise,) = replies(tell(made, prepare(ballot(2))))
    assert epoch_from_wire(promise.active) == ballot(1)
    assert promise.active_hash == HASH
    assert (promise.usable_memory_bytes, promise.replaceable_bytes) == (700, 300)


@pytest.mark.parametrize("lower", [ballot(2, "a"), ballot(1, "z"), ballot(2, "chief", "b" * 32)])
def test_a_lower_ballot_is_refused_with_the_promised_one(lower):
    made = agent()
    tell(made, prepare(ballot(2)))
    nack = refusal(tell(made, prepare(lower))[1:])
    assert (nack.claim, nack.reason) == ("prepare", "older_ballot")
    assert epoch_from_wire(nack.promised) == ballot(2)


def test_an_equal_term_of_a_greater_node_is_evaluated_and_granted():
    made = agent()
    tell(made, prepare(ballot(5, "chief")))
    later = 11 * SECOND
    (promise,) = replies(tell(made, prepare(ballot(5, "rival")), later))
    assert isinstance(promise, Promise)


def test_a_repeated_prepare_gets_the_promise_again_without_a_write():
    made = agent()
    tell(made, prepare(ballot(1)))
    effects = tell(made, prepare(ballot(1)))
    assert [type(effect) for effect in effects] == [Reply]
    assert isinstance(effects[0].message, Promise)


def test_a_rival_is_kept_out_while_the_current_coordinator_was_heard_lately():
    made = agent()
    tell(made, prepare(ballot(1)), 0)
    tell(made, keepalive(ballot(1)), 4 * SECOND)
    nack = refusal(tell(made, prepare(ballot(2, "rival")), 9 * SECOND)[1:])
    assert (nack.reason, nack.retry_after_us) == ("sticky", 5 * SECOND)
    (promise,) = replies(tell(made, prepare(ballot(2, "rival")), 14 * SECOND))
    assert isinstance(promise, Promise)


def test_force_and_the_death_of_the_coordinator_end_stickiness():
    forced, orphaned = agent(), agent()
    for made in (forced, orphaned):
        tell(made, prepare(ballot(1)), 0)
    orphaned.on_members(frozenset({NodeId("rival")}))
    assert isinstance(replies(tell(forced, prepare(ballot(2, "rival"), force=True), SECOND))[0], Promise)
    assert isinstance(replies(tell(orphaned, prepare(ballot(2, "rival")), SECOND))[0], Promise)


def test_a_ballot_that_was_given_up_keeps_no_rival_out():
    made = agent()
    tell(made, prepare(ballot(1)), 0)
    tell(made, abort(ballot(1)), SECOND)
    (promise,) = replies(tell(made, prepare(ballot(2, "rival")), 2 * SECOND))
    assert isinstance(promise, Promise)


def test_after_a_failed_replacement_the_coordinator_of_what_serves_still_keeps_rivals_out():
    made = agent()
    serve(made, ballot(1))
    tell(made, prepare(ballot(2)), 60 * SECOND)
    tell(made, abort(ballot(2)), 61 * SECOND)
    tell(made, keepalive(ballot(1)), 80 * SECOND)
    nack = refusal(tell(made, prepare(ballot(3, "rival")), 85 * SECOND)[1:])
    assert (nack.reason, nack.retry_after_us) == ("sticky", 5 * SECOND)
    assert isinstance(replies(tell(made, prepare(ballot(3, "rival")), 90 * SECOND))[0], Promise)


def test_a_restarted_coordinator_is_not_kept_out_by_its_own_past():
    made = agent()
    tell(made, prepare(ballot(1, instance="c" * 32)), 0)
    (promise,) = replies(tell(made, prepare(ballot(2, instance="e" * 32)), SECOND))
    assert isinstance(promise, Promise)


def test_a_stage_is_persisted_then_loaded_then_answered():
    made = agent()
    tell(made, prepare(ballot(1)))
    effects = tell(made, stage(ballot(1)))
    assert [type(effect) for effect in effects] == [Persist, Load, Reply]
    assert isinstance(effects[2].message, StageProgress)
    (ready,) = replies(finish(made, effects))
    assert isinstance(ready, Ready)
    assert (epoch_from_wire(ready.ballot), ready.plan_hash, ready.instance) == (ballot(1), HASH, MINE)


def test_a_second_plan_under_the_same_ballot_is_refused():
    made = agent()
    tell(made, prepare(ballot(1)))
    tell(made, stage(ballot(1)))
    assert refusal(tell(made, stage(ballot(1), OTHER_HASH))[1:]).reason == "other_plan_accepted"
    serve(made, ballot(2))
    assert refusal(tell(made, stage(ballot(2), OTHER_HASH))[1:]).reason == "other_plan_accepted"


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (assignment(instance="9" * 32), "wrong_instance"),
        (assignment(node_id="other"), "wrong_instance"),
        (assignment(start=4, end=4), "range_invalid"),
        (assignment(lanes=0), "range_invalid"),
        (assignment(required=1001), "insufficient_memory"),
    ],
)
def test_an_assignment_that_cannot_run_here_is_refused_and_nothing_is_accepted(work, reason):
    made = agent()
    tell(made, prepare(ballot(1)))
    effects = tell(made, stage(ballot(1), work=work))
    assert refusal(effects[1:]).reason == reason
    assert made.record(SLOT).accepted is None


def test_a_draining_node_takes_no_new_stage_but_keeps_serving():
    made = agent()
    serve(made, ballot(1))
    made.drain()
    tell(made, prepare(ballot(2)))
    assert refusal(tell(made, stage(ballot(2)))[1:]).reason == "draining"
    assert made.accept_frame(SLOT, ballot(1), 1 << 30, None, 0).accepted
    made.resume()
    assert isinstance(replies(tell(made, stage(ballot(2))))[-1], StageProgress)


def test_readiness_is_not_said_after_a_newer_promise():
    made = agent()
    tell(made, prepare(ballot(1)))
    effects = tell(made, stage(ballot(1)))
    tell(made, prepare(ballot(2)), 0)
    assert replies(finish(made, effects)) == []
    assert refusal(tell(made, activate(ballot(1)))[1:]).reason == "older_ballot"


def test_activation_is_persisted_before_the_runtime_switches_and_the_answer_leaves():
    made = agent()
    done = serve(made, ballot(1))
    kinds = [type(effect) for effect in done]
    assert kinds == [Persist, ActivateRuntime, Reply]
    assert done[0].record.active.ballot == ballot(1)
    assert isinstance(done[2].message, Active)


def test_activation_needs_the_promised_ballot_the_accepted_hash_this_instance_and_a_finished_load():
    made = agent()
    tell(made, prepare(ballot(1)))
    assert refusal(tell(made, activate(ballot(1)))[1:]).reason == "not_accepted"
    effects = tell(made, stage(ballot(1)))
    assert refusal(tell(made, activate(ballot(1)))[1:]).reason == "not_accepted", "it is still loading"
    finish(made, effects)
    assert refusal(tell(made, activate(ballot(1), OTHER_HASH))[1:]).reason == "other_plan_accepted"
    assert refusal(tell(made, activate(ballot(1), instance="9" * 32))[1:]).reason == "wrong_instance"
    assert refusal(tell(made, activate(ballot(2)))[1:]).reason == "not_accepted"
    assert isinstance(replies(tell(made, activate(ballot(1))))[0], Active)


def test_a_late_duplicate_of_an_activation_is_not_confirmed_after_a_newer_promise():
    made = agent()
    serve(made, ballot(1))
    assert isinstance(replies(tell(made, activate(ballot(1))))[0], Active)
    tell(made, prepare(ballot(2)))
    assert refusal(tell(made, activate(ballot(1)))[1:]).reason == "older_ballot"


def test_abort_forgets_what_was_accepted_and_leaves_the_active_plan_alone():
    made = agent()
    serve(made, ballot(1))
    tell(made, prepare(ballot(2)))
    finish(made, tell(made, stage(ballot(2), OTHER_HASH, assignment(start=4, end=8))))
    effects = tell(made, abort(ballot(2)))
    assert [type(effect) for effect in effects] == [Persist, Unload]
    record = made.record(SLOT)
    assert (record.accepted, record.active.ballot, record.promised) == (None, ballot(1), ballot(2))
    assert refusal(tell(made, stage(ballot(2), OTHER_HASH))[1:]).reason == "older_ballot", "an aborted ballot is closed"


def test_abort_of_the_active_ballot_changes_nothing():
    made = agent()
    serve(made, ballot(1))
    assert tell(made, abort(ballot(1))) == []
    assert made.facts(0)[0].state == "serving"


def test_retirement_needs_the_ballots_owner_or_a_newer_claim():
    made = agent()
    serve(made, ballot(3))
    assert tell(made, retire(ballot(3)), sender="rival") == [Count("ballot_sender_mismatch")]
    assert tell(made, retire(ballot(3), superseded_by=ballot(2, "rival")), sender="rival")[0] == Count(
        "ballot_sender_mismatch"
    )
    effects = tell(made, retire(ballot(3), superseded_by=ballot(4, "rival")), sender="rival")
    assert [type(effect) for effect in effects] == [Persist, Unload]
    assert made.facts(0)[0].state == "draining"


def test_a_retired_ballot_never_comes_back():
    made = agent()
    serve(made, ballot(1))
    tell(made, retire(ballot(1)))
    assert refusal(tell(made, stage(ballot(1)))[1:]).reason == "older_ballot"
    assert refusal(tell(made, activate(ballot(1)))[1:]).reason == "not_accepted"
    assert made.record(SLOT).last_active == ballot(1)


def test_a_message_in_the_name_of_another_node_is_dropped_and_counted():
    made = agent()
    assert tell(made, prepare(ballot(1)), sender="rival") == [Count("ballot_sender_mismatch")]
    assert made.record(SLOT).promised.term == 0
    tell(made, prepare(ballot(1)))
    tell(made, stage(ballot(1)))
    assert tell(made, abort(ballot(1)), sender="rival") == [Count("ballot_sender_mismatch")]
    assert made.record(SLOT).accepted is not None


def test_keepalives_say_when_the_agent_does_not_hold_the_plan():
    made = agent()
    assert refusal(tell(made, keepalive(ballot(1)))[1:]).reason == "not_accepted"
    serve(made, ballot(2))
    assert tell(made, keepalive(ballot(2))) == []
    assert refusal(tell(made, keepalive(ballot(1)))).reason == "older_ballot"


def test_an_orphan_unloads_after_ten_minutes_without_keepalive_and_without_frames():
    made = agent()
    serve(made, ballot(1))
    tell(made, keepalive(ballot(1)), 100 * SECOND)
    made.accept_frame(SLOT, ballot(1), 1 << 30, None, 300 * SECOND)
    assert made.next_deadline() == 900 * SECOND
    assert made.on_timer(899 * SECOND) == []
    effects = made.on_timer(900 * SECOND)
    assert [type(effect) for effect in effects] == [Count, Persist, Unload]
    assert made.next_deadline() is None


def test_more_slots_than_a_row_can_state_are_refused():
    made = agent()
    for number in range(16):
        tell(made, prepare(ballot(1), slot=f"s{number}"))
    nack = refusal(tell(made, prepare(ballot(1), slot="one-more"))[1:])
    assert nack.reason == "state_unavailable"


def test_an_unwritable_store_refuses_every_ballot_and_rewrites_all_when_it_is_back():
    made = agent()
    tell(made, prepare(ballot(1)))
    made.next_deadline()  # the driver is done with it
    made.on_state(available=False)
    assert refusal(tell(made, prepare(ballot(2)))).reason == "state_unavailable"
    (again,) = made.on_state(available=True)
    assert isinstance(again, Persist)
    assert again.record.promised == ballot(1)


def test_an_input_whose_record_cannot_be_written_is_taken_back_and_what_serves_serves_on():
    made = agent()
    serve(made, ballot(1))
    before = made.record(SLOT), made.facts(0)
    for message in (prepare(ballot(2)), stage(ballot(2), OTHER_HASH, assignment(start=4, end=8))):
        tell(made, message)
        made.on_state(available=False)
        assert (made.record(SLOT), made.facts(0)) == before
        assert made.accept_frame(SLOT, ballot(1), 1 << 30, None, 0).accepted
        made.on_state(available=True)


def test_an_activation_that_cannot_be_written_can_be_repeated():
    made = agent()
    tell(made, prepare(ballot(1)))
    finish(made, tell(made, stage(ballot(1))))
    tell(made, activate(ballot(1)))
    made.on_state(available=False)
    assert made.facts(0)[0].state == "ready"
    made.on_state(available=True)
    assert [type(effect) for effect in tell(made, activate(ballot(1)))] == [Persist, ActivateRuntime, Reply]


def test_a_failed_load_that_could_not_be_recorded_is_told_once_the_store_works():
    made = agent()
    tell(made, prepare(ballot(1)))
    tell(made, stage(ballot(1)))
    made.on_runtime(LoadFailed(SLOT, ballot(1)), 0)
    made.on_state(available=False)
    assert made.next_deadline() is None
    made.on_state(available=True)
    assert made.next_deadline() == 0
    (nack,) = replies(made.on_timer(0))
    assert nack.reason == "load_failed"
    assert made.record(SLOT).accepted is None


def test_a_slot_whose_first_promise_cannot_be_written_is_unknown_again():
    made = agent()
    tell(made, prepare(ballot(1)))
    made.on_state(available=False)
    assert made.facts(0) == ()
