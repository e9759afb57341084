"""Adopting and judging the plan that serves."""

import pytest

from coordinator.assignment.running import READINESS_GRACE_US, adopt, health
from protocol.fencing import epoch_to_wire
from protocol.ids import NodeId
from tests.unit.coordination.builders import DIGEST, SLOT, ballot, member, serving, view

B1 = ballot(1, "a")


def two(first=None, second=None, **second_fields):
    return view(
        member("a", stages=(first or serving(B1, 0, 5, 0, 2),)),
        member("b", stages=(second or serving(B1, 5, 8, 1, 2),), **second_fields),
    )


def adopted(cluster):
    return adopt(cluster, SLOT, model_digest=DIGEST, layer_count=8, now_us=0)


def judged(cluster, *, confirmed=(), now_us=READINESS_GRACE_US, excluded=()):
    running = adopted(two())
    return health(
        running,
        cluster,
        excluded=frozenset(map(NodeId, excluded)),
        confirmed=frozenset(map(NodeId, confirmed)),
        now_us=now_us,
    )


def test_stages_that_cover_the_model_at_one_ballot_are_a_running_plan():
    running = adopted(two())
    assert (running.ballot, running.nodes, running.context_length) == (B1, ("a", "b"), 512)
    assert [(stage.layer_start, stage.layer_end) for stage in running.stages] == [(0, 5), (5, 8)]


@pytest.mark.parametrize(
    "second",
    [
        serving(ballot(2), 5, 8, 1, 2),
        serving(B1, 5, 7, 1, 2),
        serving(B1, 6, 8, 1, 2),
        serving(B1, 5, 8, 1, 3),
        serving(B1, 5, 8, 1, 2, plan_hash="b" * 64),
        serving(B1, 5, 8, 1, 2, model_digest="e" * 64),
        serving(B1, 5, 8, 1, 2, state="ready"),
    ],
)
def test_a_gap_another_ballot_hash_or_model_or_a_stage_that_only_stands_by_is_no_plan(second):
    assert adopted(two(second=second)) is None


def test_a_stage_on_a_dead_node_is_no_plan():
    assert adopted(two(state="dead")) is None


def test_the_highest_complete_ballot_is_adopted():
    b2 = ballot(2, "c")
    lonely = view(
        *two().members.values(),
        member("c", stages=(serving(b2, 0, 8),)),
        member("d", stages=(serving(ballot(3), 0, 4, 0, 2),)),
    )
    assert adopted(lonely).ballot == b2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": "dead"}, "node_lost"),
        ({"state": "left"}, "node_lost"),
        ({"instance": "2" * 32}, "node_restarted"),
        ({"second": serving(B1, 5, 8, 1, 2, state="failed")}, "stage_failed"),
        (
            {"second": serving(B1, 5, 8, 1, 2, state="failed", detail="load_failed: stage_lost: the head aborted")},
            "lost_a_stage",
        ),
        ({"second": serving(B1, 5, 8, 1, 2, state="idle", active=None)}, "not_serving"),
        ({"second": serving(ballot(4), 5, 8, 1, 2)}, "superseded"),
    ],
)
def test_a_lost_stage_says_why(change, why):
    state = judged(two(**change))
    assert (dict(state.lost), state.broken) == ({"b": why}, True)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"status": "draining"}, "draining"), ({"status": "leaving"}, "leaving"), ({"conflict": True}, "conflict")],
)
def test_a_stage_that_must_go_still_works(change, why):
    state = judged(two(**change))
    assert (dict(state.lost), dict(state.leaving), state.broken) == ({}, {"b": why}, True)
    assert dict(judged(two(), excluded=("b",)).leaving) == {"b": "excluded"}


def test_a_row_that_lags_behind_the_activation_is_forgiven_for_a_while_but_not_one_that_was_confirmed():
    lagging = two(second=serving(B1, 5, 8, 1, 2, state="ready", active=None, accepted=epoch_to_wire(B1)))
    assert not judged(lagging, now_us=READINESS_GRACE_US - 1).broken
    assert judged(lagging, now_us=READINESS_GRACE_US).broken
    assert judged(lagging, now_us=1, confirmed=("b",)).broken


def test_a_suspect_or_unsettled_node_is_waited_for_not_lost():
    for change in ({"state": "suspect"}, {"settled": False}):
        state = judged(two(**change))
        assert (state.broken, state.unsure) == (False, ("b",))
