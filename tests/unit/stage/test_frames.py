"""The stage fence of frames."""

from dataclasses import dataclass

from stage_agent.stage.frames import MAX_FLOWS, FrameFence
from tests.unit.stage.builders import SLOT, agent, assignment, ballot, serve


@dataclass(frozen=True)
class Flow:
    request_id: int
    session_id: int
    step: int

    def is_stale_for(self, newest):
        return (self.request_id, self.session_id) == (newest.request_id, newest.session_id) and self.step < newest.step


def test_a_frame_of_any_other_epoch_is_refused_with_the_active_one():
    made = agent()
    serve(made, ballot(2))
    for other in (ballot(1), ballot(3), ballot(2, "rival"), ballot(2, instance="d" * 32)):
        verdict = made.accept_frame(SLOT, other, 5, None, 0)
        assert (verdict.outcome, verdict.active) == ("stale_epoch", ballot(2))
    assert made.accept_frame(SLOT, ballot(2), 5, None, 0).accepted


def test_a_request_below_the_plans_first_id_is_refused():
    made = agent()
    serve(made, ballot(2), assignment(first_request_id=1000))
    assert made.accept_frame(SLOT, ballot(2), 999, None, 0).outcome == "old_request"
    assert made.accept_frame(SLOT, ballot(2), 1000, None, 0).accepted


def test_the_first_request_id_never_goes_back():
    made = agent()
    serve(made, ballot(2), assignment(first_request_id=1000))
    serve(made, ballot(3), assignment(first_request_id=10))
    assert made.accept_frame(SLOT, ballot(3), 500, None, 0).outcome == "old_request"


def test_staleness_is_judged_only_within_a_flow():
    fence = FrameFence(ballot(1), 0)
    assert fence.judge(ballot(1), 1, Flow(1, 1, 5)).accepted
    assert fence.judge(ballot(1), 1, Flow(1, 1, 4)).outcome == "stale_request"
    assert fence.judge(ballot(1), 1, Flow(1, 2, 0)).accepted
    assert fence.judge(ballot(1), 1, Flow(1, 1, 5)).accepted, "an equal epoch is a repetition, not stale"
    assert fence.judge(ballot(1), 1, Flow(1, 1, 6)).accepted


def test_a_refused_frame_leaves_no_trace():
    fence = FrameFence(ballot(1), 0)
    fence.judge(ballot(2), 1, Flow(1, 1, 9))
    assert fence.judge(ballot(1), 1, Flow(1, 1, 0)).accepted


def test_the_memory_of_flows_is_bounded_and_forgets_the_least_recently_used():
    fence = FrameFence(ballot(1), 0)
    for number in range(MAX_FLOWS + 1):
        fence.judge(ballot(1), number, Flow(number, 0, 5))
    assert fence.judge(ballot(1), 0, Flow(0, 0, 1)).accepted, "flow 0 was forgotten"
    assert fence.judge(ballot(1), 9, Flow(9, 0, 1)).outcome == "stale_request"


def test_a_node_without_a_stage_serves_nothing():
    assert agent().accept_frame(SLOT, ballot(1), 1, None, 0).outcome == "not_serving"
