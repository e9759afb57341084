"""The placement simulator: a scenario through the production planner, and the answer held against its ``[expect]``."""

from dataclasses import dataclass

from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.planning import plan as plan_problem
from coordinator.simulator.execution import planned_for_execution
from coordinator.simulator.operations import Planner
from coordinator.simulator.scenario import Scenario
from coordinator.simulator.scenario_expectation import Expectation


@dataclass(frozen=True, slots=True)
class Placement:
    """``answer`` is the production planner's. ``disappointments`` are sentences; empty = as the file expects."""

    answer: Plan | PlanRefused
    flags: frozenset[str]
    disappointments: tuple[str, ...]


def place_scenario(scenario: Scenario, *, planner: Planner = plan_problem) -> Placement:
    """Plan ``scenario`` and check it."""
    problem = scenario.problem
    answer = problem if isinstance(problem, PlanRefused) else planner(problem)
    _, flags = planned_for_execution(problem, planner)
    return Placement(answer, flags, tuple(_disappointments(scenario.expectation, answer, flags)))


def _disappointments(expected: Expectation, answer: Plan | PlanRefused, flags: frozenset[str]) -> list[str]:
    found = [f"flag {flag} is missing, there are: {sorted(flags)}" for flag in expected.flags if flag not in flags]
    if isinstance(answer, PlanRefused):
        if expected.refusal is None:
            return [*found, f"refused: {answer.code}: {answer.message}"]
        if expected.refusal != answer.code:
            return [*found, f"refused with {answer.code}, expected {expected.refusal}"]
        return found
    if expected.refusal is not None:
        return [*found, f"a plan was made, expected the refusal {expected.refusal}"]
    return [*found, *_of_plan(expected, answer)]


def _of_plan(expected: Expectation, plan: Plan) -> list[str]:
    found: list[str] = []
    order = tuple(stage.node_id for stage in plan.stages)
    layers = {stage.node_id: stage.layer_end - stage.layer_start for stage in plan.stages}
    tpot = plan.modeled.decode_tpot_us

    def want(name: str, wanted: object, got: object) -> None:
        if wanted is not None and wanted != got:
            found.append(f"{name} is {got}, expected {wanted}")

    want("placement", expected.placement, plan.placement)
    want("order", expected.order or None, order)
    want("number of stages", expected.stage_count, len(order))
    want("target met", expected.target_met, plan.target.met)
    want("context", expected.context_length, plan.context_length)
    if expected.target_unknown and plan.target.met is not None:
        found.append(f"target met is {plan.target.met}, expected unknown")
    found += [f"{node} is used, expected to be left out" for node in expected.unused if node in layers]
    for node, count in expected.layers.items():
        want(f"layers of {node}", count, layers.get(node, 0))
    for node, most in expected.layers_at_most.items():
        if layers.get(node, 0) > most:
            found.append(f"{node} has {layers[node]} layers, expected at most {most}")
    low, high = expected.tpot_us_min, expected.tpot_us_max
    if (low is not None or high is not None) and tpot is None:
        found.append("the time per token is not modelled")
    elif tpot is not None and not (low or 0) <= tpot <= (tpot if high is None else high):
        found.append(f"time per token is {tpot} µs, expected {low} to {high}")
    codes = {diagnostic.code for diagnostic in plan.diagnostics}
    found += [f"diagnostic {code} is missing" for code in expected.diagnostics if code not in codes]
    return found
