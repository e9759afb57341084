"""Every refusal explains itself: which claim, why, what was promised instead, and a sentence where one helps."""

import pytest

from protocol.fencing import epoch_from_wire
from protocol.ids import Instance
from tests.unit.stage.builders import (
    HASH,
    OTHER_HASH,
    SLOT,
    activate,
    agent,
    assignment,
    ballot,
    keepalive,
    prepare,
    refusal,
    serve,
    stage,
    tell,
)

AT = ballot(5)


def promised(**arguments):
    """An agent that promised ``AT``."""
    made = agent(**arguments)
    tell(made, prepare(AT))
    return made


def accepted():
    made = promised()
    tell(made, stage(AT))
    return made


def draining():
    made = promised()
    made.drain()
    return made


def unwritable():
    made = promised()
    made.next_deadline()  # the promise is carried out
    made.on_state(available=False)
    return made


CASES = {
    "an older ballot": (promised, prepare(ballot(4)), "older_ballot"),
    "an older ballot's stage": (promised, stage(ballot(4)), "older_ballot"),
    "an older ballot's activation": (accepted, activate(ballot(4)), "older_ballot"),
    "a rival while the coordinator speaks": (promised, prepare(ballot(6, "rival")), "sticky"),
    "another plan at one ballot": (accepted, stage(AT, OTHER_HASH), "other_plan_accepted"),
    "too large": (promised, stage(AT, HASH, assignment(5000)), "insufficient_memory"),
    "for another process start": (promised, stage(AT, HASH, assignment(instance="2" * 32)), "wrong_instance"),
    "an empty range": (promised, stage(AT, HASH, assignment(start=4, end=4)), "range_invalid"),
    "no new stage while draining": (draining, stage(AT), "draining"),
    "activation of another start": (accepted, activate(AT, HASH, Instance("2" * 32)), "wrong_instance"),
    "activation of another plan": (accepted, activate(AT, OTHER_HASH), "other_plan_accepted"),
    "activation before the load": (accepted, activate(AT), "not_accepted"),
    "keepalive of an older plan": (promised, keepalive(ballot(4)), "older_ballot"),
    "keepalive of a plan it has not": (promised, keepalive(ballot(9)), "not_accepted"),
    "prepare on a dead disk": (unwritable, prepare(ballot(6)), "state_unavailable"),
    "stage on a dead disk": (unwritable, stage(AT), "state_unavailable"),
    "activation on a dead disk": (unwritable, activate(AT), "state_unavailable"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_the_claim_the_reason_and_the_promise(name):
    made, message, reason = CASES[name][0](), CASES[name][1], CASES[name][2]
    effects = tell(made, message)
    nack = refusal([effect for effect in effects if hasattr(effect, "message")])
    assert (nack.claim, nack.reason, nack.slot) == (message.type, reason, SLOT)
    assert epoch_from_wire(nack.promised) == AT
    assert nack.ballot == message.ballot, "whose claim it was"
    assert (nack.retry_after_us > 0) == (reason == "sticky"), "how long to wait, when waiting helps"


def test_a_keepalive_for_a_plan_that_a_restart_lost_says_that_it_is_not_loaded():
    before = agent()
    serve(before, AT)
    after = agent(restored={SLOT: before.record(SLOT)}, instance=Instance("3" * 32))
    nack = refusal(tell(after, keepalive(AT)))
    assert (nack.claim, nack.reason, nack.detail) == ("keepalive", "wrong_instance", "not loaded in this process")
