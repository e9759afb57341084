"""Properties that hold for any input, not just for the cases somebody thought of."""

import json
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.settings import ElectionSettings
from coordinator.election.campaign import Campaign
from coordinator.election.canonical import canonical_coordinator
from coordinator.replan import damped
from coordinator.view import SignalQuantiser
from protocol.codec import decode, encode
from protocol.fencing import NO_EPOCH, PlanEpoch, epoch_from_wire, epoch_to_wire, next_term
from protocol.ids import Instance, NodeId
from stage_agent.stage.effects import Loaded, LoadFailed, Persist, Reply, RuntimeDied, Unload, Unloaded
from stage_agent.stage.record import SlotRecord
from tests.unit.coordination.builders import member, plan, view
from tests.unit.stage.builders import (
    SLOT,
    abort,
    activate,
    agent,
    assignment,
    ballot,
    keepalive,
    prepare,
    retire,
    stage,
)

EPOCHS = st.builds(
    ballot, st.integers(1, 4), st.sampled_from(["chief", "rival"]), st.sampled_from(["c" * 32, "d" * 32])
)
HASHES = st.sampled_from(["a" * 64, "b" * 64])
WORK = st.builds(
    assignment,
    st.integers(1, 700),
    st.integers(0, 2),
    st.integers(3, 5),
    instance=st.sampled_from(["1" * 32, "9" * 32]),
    first_request_id=st.integers(0, 5),
)
MESSAGES = st.one_of(
    st.builds(prepare, EPOCHS, force=st.booleans()),
    st.builds(stage, EPOCHS, HASHES, WORK),
    st.builds(activate, EPOCHS, HASHES),
    st.builds(abort, EPOCHS),
    st.builds(retire, EPOCHS, EPOCHS),
    st.builds(keepalive, EPOCHS),
)
EVENTS = st.one_of(
    st.builds(Loaded, st.just(SLOT), EPOCHS),
    st.builds(Unloaded, st.just(SLOT), EPOCHS),
    st.builds(LoadFailed, st.just(SLOT), EPOCHS),
    st.builds(RuntimeDied, st.just(SLOT), EPOCHS),
    st.just("restart"),
    st.just("time"),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(MESSAGES, MESSAGES, EVENTS), max_size=40))
def test_an_agents_word_never_goes_back_whatever_it_is_told(inputs):
    made, now_us, disk, promised_to = agent(), 0, SlotRecord(), NO_EPOCH
    plans: dict[PlanEpoch, str] = {}
    for item in inputs:
        now_us += 3_000_000
        before = made.record(SLOT)
        if item == "restart":
            made = agent(restored={SLOT: SlotRecord.from_document(json.loads(json.dumps(disk.to_document())))})
            effects = []
        elif item == "time":
            now_us += 700_000_000
            effects = made.on_timer(now_us)
        elif isinstance(item, Loaded | Unloaded | LoadFailed | RuntimeDied):
            effects = made.on_runtime(item, now_us)
        else:
            effects = made.on_message(NodeId(item.ballot.node_id), item, now_us)
        made.validate()
        for effect in effects:
            if isinstance(effect, Persist):
                disk = effect.record
            elif isinstance(effect, Reply) and effect.message.type in {"promise", "ready", "active"}:
                said = epoch_from_wire(effect.message.ballot)
                assert said >= promised_to, "nothing older after a promise"
                assert disk == made.record(SLOT), "an answer left before its record was written"
                promised_to = max(promised_to, said)
                if effect.message.type != "promise":
                    assert plans.setdefault(said, effect.message.plan_hash) == effect.message.plan_hash
        after = made.record(SLOT)
        assert (after.promised, after.last_active, after.closed) >= (before.promised, before.last_active, before.closed)
        assert after.cache_epoch >= before.cache_epoch
        assert after.first_request_id >= before.first_request_id


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(MESSAGES, EVENTS), max_size=30))
def test_loads_never_occupy_more_than_the_memory(inputs):
    made, occupied = agent(memory=1000), {}
    for item in inputs:
        if isinstance(item, str):
            continue
        if isinstance(item, Loaded | Unloaded | LoadFailed | RuntimeDied):
            if item.ballot not in occupied:
                continue  # a runtime speaks only of loads it was given
            if not isinstance(item, Loaded):
                del occupied[item.ballot]
            effects = made.on_runtime(item, 0)
        else:
            effects = made.on_message(NodeId(item.ballot.node_id), item, 0)
        for effect in effects:
            if type(effect).__name__ == "Load":
                shared = effect.reuse in occupied
                occupied[effect.ballot] = 0 if shared else effect.assignment.required_bytes
                if shared:  # both labels stand for one piece of memory
                    occupied[effect.ballot], occupied[effect.reuse] = occupied[effect.reuse], 0
            assert not isinstance(effect, Unload) or effect.ballot in occupied
        assert sum(occupied.values()) <= 1000


@given(st.lists(st.integers(9_200, 10_800), min_size=1, max_size=50), st.integers(1, 10**9))
def test_a_signal_inside_its_band_is_one_value(permille, base):
    quantiser, seen = SignalQuantiser(), set()
    quantiser.hold(("s",), base * 10_000)
    quantiser.finish()
    for each in permille:
        seen.add(quantiser.hold(("s",), base * each))
        quantiser.finish()
    assert seen == {base * 10_000}


@given(st.integers(0, 2**40), st.lists(st.integers(0, 2**40), max_size=20))
def test_terms_only_grow(last, seen):
    assert next_term(last, *seen) > max([last, *seen])
    made = Campaign(
        node_id=NodeId("a"), instance=Instance("0" * 32), last_term=last, settings=ElectionSettings(), random=Random(0)
    )
    terms = []
    for term in seen:
        made.learn(term)
        terms.append(made.next_ballot().term)
    assert terms == sorted(set(terms))


@given(st.permutations(["a", "b", "c", "d"]), st.lists(st.integers(1, 64), min_size=4, max_size=4))
def test_the_canonical_choice_does_not_depend_on_the_order_of_the_view(order, sizes):
    members = {name: member(name, gib=size) for name, size in zip("abcd", sizes, strict=True)}
    choices = {
        canonical_coordinator(view(*(members[name] for name in names)), counts=lambda _: True)
        for names in (order, "abcd")
    }
    assert len(choices) == 1


@st.composite
def cuts(draw, layers=40, stages=4):
    points = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)))
    edges = [0, *points, layers]
    return plan(*((f"n{index}", edges[index], edges[index + 1]) for index in range(stages)))


@given(cuts(), cuts())
def test_damped_cuts_are_contiguous_complete_and_between_both_plans(here, there):
    topology = damped(here, there)
    assert topology is not None
    position = 0
    for index, (part, old, new) in enumerate(zip(topology.stages, here.stages, there.stages, strict=True)):
        assert part.layer_start == position < part.layer_end
        position = part.layer_end
        low, high = sorted((old.layer_end, new.layer_end))
        assert low <= part.layer_end <= high, index
        assert abs(part.layer_end - old.layer_end) <= (abs(new.layer_end - old.layer_end) + 1) // 2
    assert position == here.layer_count


@given(EPOCHS, EPOCHS)
def test_a_ballot_is_the_same_after_the_wire(first, second):
    message = decode(encode(retire(first, second)))
    assert epoch_from_wire(message.ballot) == first
    assert epoch_from_wire(message.superseded_by) == second
    assert epoch_from_wire(epoch_to_wire(NO_EPOCH)) == NO_EPOCH
