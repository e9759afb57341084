"""``simulate``: a scenario's plan under the scenario's traffic and events, in virtual time."""

import random
from collections.abc import Callable
from dataclasses import replace

from coordinator.planner.memory import usable_bytes
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.planning import plan as plan_problem
from coordinator.planner.problem import Participant, PlanningProblem
from coordinator.simulator.arrivals import Arrivals
from coordinator.simulator.conditions import Conditions
from coordinator.simulator.engine import Engine
from coordinator.simulator.operations import Operations, Planner
from coordinator.simulator.outcome import Outcome, outcome_of
from coordinator.simulator.replan_policy import ReplanPolicy, production_policy
from coordinator.simulator.scenario import Scenario
from coordinator.simulator.scenario_workload import within_context

UNLIMITED_BYTES = 2**50
PROGRESS_STEPS = 200
OVERLOAD_FACTOR = 4
"""Median wait for a lane, in answer times, above which traffic exceeds what the plan serves."""

ProgressCallback = Callable[[int, int], None]


def planned_for_execution(
    problem: PlanningProblem | PlanRefused, planner: Planner
) -> tuple[Plan | PlanRefused, frozenset[str]]:
    """The plan to execute and the flags that making it raised.

    A locked split that is too large for its nodes is not refused here, as ``plan`` refuses it: what it would cost is
    what the operator wants to know. It runs from disk and is flagged ``disk_bound``; ``does_not_fit`` says that no other
    split of these nodes would fit either.
    """
    if isinstance(problem, PlanRefused):
        return problem, frozenset()
    answer = planner(problem)
    if not isinstance(answer, PlanRefused) or problem.request.locked is None:
        flags = frozenset({"does_not_fit"}) if isinstance(answer, PlanRefused) and too_large(problem) else frozenset()
        return answer, flags
    roomy = planner(replace(problem, participants=tuple(_roomy(node) for node in problem.participants)))
    if isinstance(roomy, PlanRefused):
        return answer, frozenset()
    usable = {node.node_id: usable_bytes(node) for node in problem.participants}
    stages = tuple(replace(stage, usable_bytes=usable[stage.node_id]) for stage in roomy.stages)
    raised = ["disk_bound", "does_not_fit"] if too_large(problem) else ["disk_bound"]
    return replace(roomy, stages=stages), frozenset(raised)


def _roomy(node: Participant) -> Participant:
    return replace(node, detected_memory_bytes=UNLIMITED_BYTES, operator_cap_bytes=None, runtime_headroom_bytes=0)


def too_large(problem: PlanningProblem) -> bool:
    """The weights alone exceed all usable memory together: no split can fit."""
    return problem.model.weight_bytes > sum(usable_bytes(node) for node in problem.participants)


def simulate(
    scenario: Scenario,
    *,
    seed: int = 0,
    planner: Planner = plan_problem,
    policy: ReplanPolicy | None = None,
    on_progress: ProgressCallback | None = None,
    skip_rounds: bool = True,
) -> Outcome | PlanRefused:
    """Run ``scenario`` to the end of its last request.

    Deterministic in the scenario and ``seed``. ``planner`` answers the first plan and every replan. ``skip_rounds`` =
    False walks every token one by one; the result is the same.
    """
    answer, flags = planned_for_execution(scenario.problem, planner)
    if isinstance(answer, PlanRefused):
        return answer
    assert isinstance(scenario.problem, PlanningProblem)
    traffic = within_context(scenario.traffic, answer.context_length)
    arrivals = Arrivals(traffic, random.Random(seed))  # noqa: S311 - a simulation, not a secret
    total = scenario.traffic.requests
    report = None if on_progress is None else _throttled(on_progress, total)
    engine = Engine(arrivals, report, skip=skip_rounds, draw=bool(scenario.events))
    operations = Operations(
        engine=engine,
        conditions=Conditions(scenario.problem),
        plan=answer,
        planner=planner,
        policy=policy or production_policy(),
        load_bytes_per_s=scenario.traffic.load_bytes_per_s,
    )
    operations.run(scenario.events)
    tally = engine.finish()
    raised = set(flags) | operations.flags
    if answer.target.met is False:
        raised.add("target_missed")
    if tally.failed:
        raised.add("requests_failed")
    if tally.too_long:
        raised.add("exceeds_context")
    outcome = outcome_of(
        answer,
        seed,
        tally,
        events=tuple(operations.history),
        flags=frozenset(raised),
        downtime_us=operations.downtime_us,
        serving_us=engine.serving_us,
    )
    return replace(outcome, flags=tuple(sorted({*outcome.flags, "overloaded"}))) if _overloaded(outcome) else outcome


def _overloaded(outcome: Outcome) -> bool:
    if outcome.ttft_us.p50 is None or outcome.tpot_us.p50 is None or outcome.latency_us.p50 is None:
        return False
    answer_us = outcome.latency_us.p50 - outcome.ttft_us.p50
    return outcome.ttft_us.p50 > OVERLOAD_FACTOR * max(answer_us, 1)


def _throttled(callback: ProgressCallback, total: int) -> Callable[[int], None]:
    step = max(1, total // PROGRESS_STEPS)

    def report(done: int) -> None:
        if done % step == 0 or done == total:
            callback(done, total)

    return report
