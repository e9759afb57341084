"""The planner as the daemon calls it: imported with the first plan.

The search and the arrays under it weigh 15 MB and take a third of a second to import, and most nodes never plan: only the
one that coordinates does, and whom somebody asks for a preview.
"""

from typing import Any

from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.problem import PlanningProblem
from stage_agent.clock import monotonic_us


def compute_plan(problem: PlanningProblem) -> Plan | PlanRefused:
    """See ``coordinator.planner.planning.plan``. Blocks for the search budget: run it in the planner's thread."""
    from coordinator.planner.planning import plan

    return plan(problem, clock_us=monotonic_us)


def explanation_of(problem: PlanningProblem, plan: Plan) -> dict[str, Any]:
    """The document of ``coordinator.planner.explain.explain``; blocks like ``compute_plan``."""
    from coordinator.planner.explain import explain, explanation_document

    return explanation_document(explain(problem, plan, clock_us=monotonic_us))


def document_of(plan: Plan) -> dict[str, Any]:
    """See ``coordinator.planner.document.plan_document``."""
    from coordinator.planner.document import plan_document

    return plan_document(plan)


def refusal_of(refused: PlanRefused) -> dict[str, Any]:
    """See ``coordinator.planner.document.refusal_document``."""
    from coordinator.planner.document import refusal_document

    return refusal_document(refused)
