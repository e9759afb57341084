"""A coordinator that an operator pinned is obeyed at once, also by agents that still listen to the one before it."""

import pytest

from coordinator.assignment.effects import ComputePlan, PersistTerm, Send
from coordinator.assignment.moment import ServedModelSpec
from protocol.ballots import Nack, Prepare, Promise
from protocol.ids import NodeId
from protocol.orders import PIN_COORDINATOR
from tests.simulation.ballot_orders import lock, pin_coordinator
from tests.simulation.test_ballots_reports import A, B, C, decided, leader, mesh, operate, run, slot
from tests.unit.coordination.builders import MODEL, SECOND, SLOT, ballot, member, plan
from tests.unit.coordination.test_orders import coordinator, order
from tests.unit.stage.builders import agent, keepalive, replies, serve, tell

CHIEFS = ballot(1, "chief", "c" * 32)


def prepares(pins: tuple[str, ...]) -> list[Prepare]:
    """What node ``a`` asks when it wants its first plan, with these orders about who coordinates."""
    core = coordinator()
    core.on_orders(tuple(order(PIN_COORDINATOR, value=pin) for pin in pins), 0)
    core.serve((ServedModelSpec(SLOT, "/m", MODEL),), 0)
    effects = core.on_members(tuple(member(node, max_term=1) for node in "abc"), 1)
    (wanted,) = [effect for effect in effects if isinstance(effect, ComputePlan)]
    split = plan(("b", 0, 3), ("a", 3, 8))
    effects = core.on_planned(wanted.request_id, split, 2)
    (term,) = [effect.term for effect in effects if isinstance(effect, PersistTerm)]
    effects = core.on_term_persisted(term, 3)
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Prepare)]


def test_a_pinned_coordinator_asks_by_force_and_one_that_was_elected_does_not():
    assert [asked.force for asked in prepares(("a",))] == [True, True]
    assert [asked.force for asked in prepares(())] == [False, False]


@pytest.mark.parametrize("ago_us", [0, 10 * SECOND - 1])
def test_within_ten_seconds_of_anothers_keepalive_only_a_pinned_coordinator_is_promised_anything(ago_us):
    """The agent serves a plan of ``chief``, which is there and says so."""

    def answer_to(claim: Prepare):
        listener, heard_us = agent(), 100 * SECOND
        listener.on_members(frozenset({NodeId("chief"), NodeId("a")}))
        serve(listener, CHIEFS)
        tell(listener, keepalive(CHIEFS), heard_us)
        (answer,) = replies(tell(listener, claim, heard_us + ago_us))
        return answer

    assert isinstance(answer_to(prepares(("a",))[0]), Promise)
    refused = answer_to(prepares(())[0])
    assert isinstance(refused, Nack)
    assert (refused.reason, refused.retry_after_us) == ("sticky", 10 * SECOND - ago_us)


def test_a_plan_that_an_operator_pins_and_moves_is_moved_at_once():
    made = mesh({A: 16, B: 8, C: 8}, 10)
    run(made, 30)
    assert leader(made).node_id == A
    assert A in slot(made).nodes
    operate(made, pin_coordinator(C), lock(slot(made).slot, (B, 0, 4), (A, 4, 8)))
    run(made, 8)
    assert (leader(made).node_id, slot(made).nodes) == (C, (B, A)), made.history[-20:]
    assert slot(made).routable
    assert decided(made, "attempt_failed") == []
