from dataclasses import replace

import pytest

from config.settings import ReplanSettings
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import PlanningProblem
from coordinator.simulator.replan_policy import Situation, production_policy
from tests.unit.simulator.scenarios import PAIR, read


def made(tpot_us: int, plan_hash: str) -> Plan:
    problem = read(PAIR).problem
    assert isinstance(problem, PlanningProblem)
    answer = plan(problem)
    assert isinstance(answer, Plan)
    return replace(answer, plan_hash=plan_hash, modeled=replace(answer.modeled, decode_tpot_us=tpot_us))


def situation(candidate_us: int | None = 80_000, **changes: object) -> Situation:
    usual = Situation(
        now_us=1_000_000_000,
        active_since_us=0,
        broken=False,
        locked=False,
        current=made(100_000, "running"),
        candidate=None if candidate_us is None else made(candidate_us, "better"),
        tokens=100_000,
        load_bytes_per_s=1_000_000_000,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("candidate_us", "changes", "kind", "words"),
    [
        (80_000, {}, "replace", "gains 20.0 ms per token"),
        (91_000, {}, "keep", "less than 10 %"),
        (90_000, {}, "replace", "gains 10.0 ms"),
        (110_000, {}, "keep", "still the best"),
        (None, {}, "keep", "no other plan"),
        (80_000, {"locked": True}, "keep", "locked"),
        (80_000, {"tokens": 30}, "keep", "too little traffic"),
        (80_000, {"active_since_us": 900_000_000}, "keep", "active for 300 s"),
        (80_000, {"broken": True}, "replace", "broken"),
        (None, {"broken": True}, "withdraw", "no other node"),
        (80_000, {"broken": True, "locked": True}, "withdraw", "never replaced"),
    ],
)
def test_a_plan_is_replaced_only_when_it_pays(
    candidate_us: int | None, changes: dict[str, object], kind: str, words: str
) -> None:
    decision = production_policy(ReplanSettings())(situation(candidate_us, **changes))
    assert decision.kind == kind
    assert words in decision.reason


def test_a_better_plan_that_must_wait_is_looked_at_again_when_the_dwell_is_over() -> None:
    decision = production_policy()(situation(active_since_us=900_000_000))
    assert decision.review_at_us == 1_200_000_000


def test_the_same_plan_is_kept() -> None:
    asked = situation()
    assert production_policy()(replace(asked, candidate=asked.current)).kind == "keep"
