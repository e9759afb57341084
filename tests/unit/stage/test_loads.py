"""Loads against memory, progress, failures and restarts."""

import json

import pytest

from protocol.ballots import FormerSplit, Nack, Ready, StageProgress
from protocol.ids import Instance, Slot
from stage_agent.stage.effects import (
    ActivateRuntime,
    Load,
    Loaded,
    LoadFailed,
    LoadProgress,
    Persist,
    RuntimeDied,
    Unload,
    Unloaded,
)
from stage_agent.stage.record import SlotRecord
from tests.unit.stage.builders import (
    HASH,
    OTHER_HASH,
    SECOND,
    SLOT,
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


def kinds(effects):
    return [type(effect) for effect in effects]


def test_the_old_plan_serves_until_the_new_one_is_active_when_both_fit():
    made = agent(memory=250)
    serve(made, ballot(1), assignment(100))
    tell(made, prepare(ballot(2)))
    effects = tell(made, stage(ballot(2), OTHER_HASH, assignment(150, start=4, end=8)))
    assert Load in kinds(effects)
    assert made.accept_frame(SLOT, ballot(1), 1 << 30, None, 0).accepted
    finish(made, effects)
    done = tell(made, activate(ballot(2), OTHER_HASH))
    assert kinds(done)[:3] == [Persist, ActivateRuntime, Unload]
    assert not made.accept_frame(SLOT, ballot(1), 1 << 30, None, 0).accepted


def test_a_load_that_fits_only_without_the_old_one_waits_until_that_memory_is_free():
    made = agent(memory=250)
    serve(made, ballot(1), assignment(200))
    tell(made, prepare(ballot(2)))
    crowded = tell(made, stage(ballot(2), OTHER_HASH, assignment(150, start=4, end=8)))
    assert refusal(crowded[1:]).reason == "insufficient_memory"
    tell(made, retire(ballot(1), superseded_by=ballot(2)))
    waiting = tell(made, stage(ballot(2), OTHER_HASH, assignment(150, start=4, end=8)))
    assert Load not in kinds(waiting)
    started = made.on_runtime(Unloaded(SLOT, ballot(1)), 0)
    assert kinds(started) == [Load]


def test_equal_range_model_and_context_keep_weights_and_caches():
    made = agent(memory=150)
    serve(made, ballot(1), assignment(100, next="old-neighbour"))
    kept = made.record(SLOT).cache_epoch
    tell(made, prepare(ballot(2)))
    effects = tell(made, stage(ballot(2), OTHER_HASH, assignment(100, next="new-neighbour")))
    (load,) = [effect for effect in effects if isinstance(effect, Load)]
    assert load.reuse == ballot(1)
    finish(made, effects)
    (runtime,) = [
        effect for effect in tell(made, activate(ballot(2), OTHER_HASH)) if isinstance(effect, ActivateRuntime)
    ]
    assert runtime.cache_epoch == kept


def test_an_engine_that_reloads_says_so_and_gets_no_shared_memory():
    made = agent(memory=150, keeps_loads=False)
    serve(made, ballot(1), assignment(100))
    (promise,) = replies(tell(made, prepare(ballot(2))))
    assert (promise.keeps_loads, promise.usable_memory_bytes, promise.replaceable_bytes) == (False, 50, 100)
    crowded = tell(made, stage(ballot(2), OTHER_HASH, assignment(100, next="new-neighbour")))
    assert refusal(crowded[1:]).reason == "insufficient_memory"
    finish(made, tell(made, retire(ballot(1), superseded_by=ballot(2))))
    effects = tell(made, stage(ballot(2), OTHER_HASH, assignment(100, next="new-neighbour")))
    (load,) = [effect for effect in effects if isinstance(effect, Load)]
    assert load.reuse is None


def test_what_a_move_of_cuts_replaced_is_kept_and_told_until_the_next_plan():
    made, former = agent(), FormerSplit(layer_ends=(2, 4), tpot_us=900)
    serve(made, ballot(1), assignment(former=former))
    assert made.facts(0)[0].former == former
    kept = SlotRecord.from_document(json.loads(json.dumps(made.record(SLOT).to_document())))
    assert kept.active.assignment.former == former
    serve(made, ballot(2), plan_hash=OTHER_HASH)
    assert made.facts(0)[0].former is None


@pytest.mark.parametrize(
    "change", [{"end": 5}, {"context_length": 1024}, {"lanes": 2}, {"cache_type": "q8_0"}, {"model_digest": "e" * 64}]
)
def test_a_change_that_makes_caches_meaningless_raises_the_cache_epoch(change):
    made = agent()
    serve(made, ballot(1))
    before = made.record(SLOT).cache_epoch
    serve(made, ballot(2), assignment(**change), OTHER_HASH)
    assert made.record(SLOT).cache_epoch == before + 1


def test_two_slots_share_the_memory():
    made = agent(memory=250)
    serve(made, ballot(1), assignment(200))
    other = assignment(100, slot="second")
    tell(made, prepare(ballot(1), slot="second"))
    assert refusal(tell(made, stage(ballot(1), work=other, slot="second"))[1:]).reason == "insufficient_memory"
    serve(made, ballot(2), assignment(50, slot="second"))
    assert {fact.slot: fact.state for fact in made.facts(0)} == {"default": "serving", "second": "serving"}


def test_progress_is_reported_while_bytes_grow_and_not_more_often_than_twice_a_second():
    made = agent()
    tell(made, prepare(ballot(1)))
    tell(made, stage(ballot(1)), 0)
    assert made.on_runtime(LoadProgress(SLOT, ballot(1), 10, 100), 100_000) == []
    (report,) = replies(made.on_runtime(LoadProgress(SLOT, ballot(1), 20, 100), SECOND))
    assert (report.loaded_bytes, report.total_bytes) == (20, 100)
    assert made.on_runtime(LoadProgress(SLOT, ballot(1), 20, 100), 3 * SECOND) == []
    assert made.facts(0)[0].loaded_bytes == 20


def test_a_failed_load_is_told_to_the_coordinator_and_repeated_when_it_asks_again():
    made = agent()
    tell(made, prepare(ballot(1)))
    tell(made, stage(ballot(1)))
    effects = made.on_runtime(LoadFailed(SLOT, ballot(1), "model_mismatch", "other digest"), 0)
    (nack,) = replies(effects)
    assert isinstance(nack, Nack)
    assert (nack.reason, nack.detail) == ("model_mismatch", "other digest")
    assert refusal(tell(made, stage(ballot(1)))[1:]).reason == "model_mismatch"
    assert made.facts(0)[0].state == "failed"


def test_a_runtime_that_dies_while_serving_is_said_in_the_row_and_its_frames_are_refused():
    made = agent()
    serve(made, ballot(1))
    made.on_runtime(RuntimeDied(SLOT, ballot(1), "killed"), 0)
    made.validate()
    fact = made.facts(0)[0]
    assert (fact.state, fact.detail) == ("failed", "load_failed: killed")
    assert made.accept_frame(SLOT, ballot(1), 1 << 30, None, 0).outcome == "not_serving"
    assert refusal(tell(made, keepalive(ballot(1)))).reason == "wrong_instance"


def test_events_of_loads_that_are_gone_change_nothing():
    made = agent()
    serve(made, ballot(2))
    for event in (Loaded(SLOT, ballot(1)), RuntimeDied(SLOT, ballot(1)), Loaded(Slot("never"), ballot(1))):
        assert made.on_runtime(event, 0) == []
    assert made.facts(0)[0].state == "serving"


def test_after_a_restart_the_promise_holds_and_the_stage_is_failed_until_a_newer_ballot():
    before = agent()
    serve(before, ballot(3))
    made = agent(restored={SLOT: before.record(SLOT)}, instance=Instance("2" * 32))
    fact = made.facts(0)[0]
    assert fact.state == "failed"
    assert "restarted" in fact.detail
    assert refusal(tell(made, prepare(ballot(2)))[1:]).reason == "older_ballot"
    assert refusal(tell(made, activate(ballot(3)))[1:]).reason == "wrong_instance"
    tell(made, prepare(ballot(4)))
    effects = tell(made, stage(ballot(4), work=assignment(instance="2" * 32)))
    assert isinstance(replies(finish(made, effects))[0], Ready)
    tell(made, activate(ballot(4), instance="2" * 32))
    assert made.facts(0)[0].state == "serving"


def test_dueling_coordinators_do_not_restart_a_load_that_both_want():
    made = agent()
    tell(made, prepare(ballot(1)))
    first = tell(made, stage(ballot(1)))
    tell(made, prepare(ballot(2, "rival"), force=True))
    second = tell(made, stage(ballot(2, "rival")))
    (load,) = [effect for effect in second if isinstance(effect, Load)]
    assert load.reuse == ballot(1)
    assert [type(reply) for reply in replies(second)] == [StageProgress]
    finish(made, first)
    (ready,) = replies(finish(made, second))
    assert ready.ballot.node_id == "rival"
    assert ready.plan_hash == HASH


def test_memory_that_another_program_took_is_promised_to_nobody_and_refused():
    made = agent(memory=250)
    made.on_memory(60)
    (promise,) = replies(tell(made, prepare(ballot(1))))
    assert promise.usable_memory_bytes == 60
    refused = refusal(tell(made, stage(ballot(1), HASH, assignment(100))))
    assert (refused.reason, refused.detail) == ("insufficient_memory", "needs 100 bytes, 60 are free")


def test_what_this_node_loaded_itself_is_not_taken_for_another_programs():
    made = agent(memory=250)
    serve(made, ballot(1), assignment(100))
    made.on_memory(150)
    (promise,) = replies(tell(made, prepare(ballot(2))))
    assert (promise.usable_memory_bytes, promise.replaceable_bytes) == (150, 100)


def test_memory_that_is_free_beyond_what_is_offered_stays_the_owners():
    made = agent(memory=250)
    made.on_memory(10_000)
    (promise,) = replies(tell(made, prepare(ballot(1))))
    assert promise.usable_memory_bytes == 250
