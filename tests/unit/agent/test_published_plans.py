"""What a node keeps of the plans that coordinators publish."""

import json

from protocol.ballots import PublishedPlan
from protocol.ids import NodeId, Slot
from protocol.wire import Epoch
from stage_agent.documents import PublishedPlans

ALPHA, BETA = NodeId("a" * 32), NodeId("b" * 32)


def told(term: int, author: NodeId, document: object = None) -> PublishedPlan:
    raw = b"" if document is None else json.dumps(document).encode()
    ballot = Epoch(term=term, node_id=author, instance="f" * 32)
    return PublishedPlan(ballot=ballot, slot="default", generation=1, state="serving", document=raw)


def test_the_highest_ballot_is_kept_and_only_its_coordinator_is_believed() -> None:
    plans = PublishedPlans()
    assert plans.learn(ALPHA, told(2, ALPHA, {"stages": []}))
    assert plans.learn(BETA, told(3, ALPHA)), "it could be read, that is all"
    assert plans[Slot("default")].ballot.term == 2
    assert plans.learn(BETA, told(1, BETA))
    assert plans[Slot("default")].ballot.term == 2
    assert plans.learn(BETA, told(3, BETA))
    assert plans[Slot("default")].ballot.node_id == BETA


def test_what_cannot_be_read_is_said_and_changes_nothing() -> None:
    plans = PublishedPlans()
    assert not plans.learn(ALPHA, told(2, ALPHA, ["no", "plan"]))
    assert plans == {}


def test_a_newcomer_is_told_what_this_node_published_and_not_what_others_did() -> None:
    plans = PublishedPlans()
    plans.learn(ALPHA, told(2, ALPHA, {"stages": []}))
    assert [message.ballot.node_id for message in plans.messages_of(ALPHA)] == [ALPHA]
    assert plans.messages_of(BETA) == []
