"""A node whose state was lost may have promised what it does not know: it listens before it promises again."""

from protocol.fencing import epoch_from_wire
from stage_agent.stage.effects import Persist
from tests.unit.stage.builders import SLOT, agent, ballot, prepare, refusal, replies, tell

SETTLE_US = 8_000_000
NOBODY: frozenset[str] = frozenset()


def test_it_listens_for_the_settle_time_first():
    made = agent(amnesia=True)
    nack = refusal(tell(made, prepare(ballot(7)), SETTLE_US - 5)[1:])
    assert (nack.reason, nack.retry_after_us) == ("state_unavailable", 5)
    assert not made.remembers
    effects = tell(made, prepare(ballot(7)), SETTLE_US)
    assert isinstance(effects[0], Persist)
    assert replies(effects)[0].type == "promise"
    assert made.remembers


def test_a_term_below_one_that_is_shown_is_refused_and_the_refusal_teaches_it():
    made = agent(amnesia=True)
    made.on_members(NOBODY, 9)
    made.on_members(NOBODY, 4)
    nack = refusal(tell(made, prepare(ballot(8)), SETTLE_US)[1:])
    assert (nack.reason, epoch_from_wire(nack.promised).term) == ("older_ballot", 9)
    assert replies(tell(made, prepare(ballot(9)), SETTLE_US))[0].type == "promise"


def test_a_promise_whose_write_failed_leaves_the_node_forgetful():
    made = agent(amnesia=True)
    made.on_members(NOBODY, 9)
    tell(made, prepare(ballot(9)), SETTLE_US)
    made.on_state(available=False)
    assert not made.remembers
    made.on_state(available=True)
    assert refusal(tell(made, prepare(ballot(8)), SETTLE_US)[1:]).reason == "older_ballot"


def test_who_lost_nothing_promises_at_once():
    made = agent()
    made.on_members(NOBODY, 9)
    assert made.remembers
    assert replies(tell(made, prepare(ballot(1)), 0))[0].type == "promise"
    assert made.record(SLOT).promised == ballot(1)
