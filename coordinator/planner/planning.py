"""``plan``: the planner's one entry point."""

from collections.abc import Callable

from coordinator.planner.any_order import fitting_candidate
from coordinator.planner.assemble import assemble
from coordinator.planner.capacity import choose_capacity
from coordinator.planner.instance import Instance, prepare
from coordinator.planner.locked import check_locked
from coordinator.planner.memory import Shape, candidate_shapes
from coordinator.planner.modelled import choose_interactive, choose_throughput, choose_unmodelled
from coordinator.planner.participants import participant_set_hash
from coordinator.planner.plan import Placement, Plan, PlanRefused, SearchCertificate
from coordinator.planner.problem import PlanningProblem
from coordinator.planner.refusal import no_valid_topology, target_missed
from coordinator.planner.searcher import searcher_for
from coordinator.planner.states import Budget
from coordinator.planner.validate import check_problem, missing_facts

CAPACITY_ONLY: Placement = "capacity_only"
PERFORMANCE_AWARE: Placement = "performance_aware"
ELEMENTS_PER_MS = 300_000
"""Matrix elements the proof search touches per millisecond of budget: what turns a time into a count (measured)."""
THROUGHPUT_SHARE = 4
"""A throughput value takes several serial searches; it is given this many budgets."""
SAFETY_FACTOR = 20
"""A given clock ends the search once it has run this many budgets: on a machine so slow, an answer matters more."""


def plan(problem: PlanningProblem, *, clock_us: Callable[[], int] | None = None) -> Plan | PlanRefused:
    """Place ``problem.model``. ``InvalidProblem`` for absurd input, ``PlanRefused`` for an honest no.

    The search is bounded by counted work, so the answer depends on the input alone. ``clock_us`` (monotonic µs) fills
    ``elapsed_ms`` and is a safety stop on machines many times slower than the budget assumes.
    """
    check_problem(problem)
    began = clock_us() if clock_us else 0
    refused = missing_facts(problem)
    if refused:
        return refused
    shapes = candidate_shapes(problem.model.native_context_length, problem.request)
    if isinstance(shapes, PlanRefused):
        return shapes
    instance = prepare(problem)
    digest = participant_set_hash(problem)

    def elapsed_ms() -> int:
        return (clock_us() - began) // 1_000 if clock_us else 0

    if problem.request.locked is not None:
        located = check_locked(instance, shapes, problem.request.locked)
        if isinstance(located, PlanRefused):
            return located
        certificate = SearchCertificate(proven_optimal=False, gap=None, expanded=0, elapsed_ms=elapsed_ms())
        return _judge(assemble(instance, located, "locked", certificate, digest), problem.request.policy)
    return _search(instance, shapes, digest, elapsed_ms)


def _search(
    instance: Instance, shapes: tuple[Shape, ...], digest: str, elapsed_ms: Callable[[], int]
) -> Plan | PlanRefused:
    request = instance.problem.request
    throughput = request.objective == "throughput"
    budget_ms = request.search_budget_ms * (THROUGHPUT_SHARE if throughput else 1)
    budget = Budget(budget_ms * ELEMENTS_PER_MS, overdue=lambda: elapsed_ms() > SAFETY_FACTOR * budget_ms)
    if request.objective != "capacity":
        searcher = searcher_for(instance, budget)
        choose = choose_throughput if throughput else choose_interactive
        choice = None if searcher is None else choose(searcher, shapes)
        if choice is not None:
            certificate = SearchCertificate(choice.proven, choice.gap, budget.expanded, elapsed_ms())
            return _judge(
                assemble(instance, choice.candidate, "performance_aware", certificate, digest), request.policy
            )
    placed = choose_capacity(instance, shapes)
    if placed is None:
        fitting = fitting_candidate(instance.problem, shapes, budget)
        if fitting is None:
            return no_valid_topology(instance, shapes)
        certificate = SearchCertificate(
            proven_optimal=False, gap=None, expanded=budget.expanded, elapsed_ms=elapsed_ms()
        )
        return _judge(assemble(instance, fitting, CAPACITY_ONLY, certificate, digest), request.policy)
    candidate, placement = placed.candidate, CAPACITY_ONLY
    if request.objective != "capacity":
        faster = choose_unmodelled(instance, candidate, budget)
        if faster is not None:
            candidate, placement = faster, PERFORMANCE_AWARE
    certificate = SearchCertificate(
        proven_optimal=False, gap=None, expanded=budget.expanded + placed.examined, elapsed_ms=elapsed_ms()
    )
    return _judge(assemble(instance, candidate, placement, certificate, digest), request.policy)


def _judge(found: Plan, policy: str) -> Plan | PlanRefused:
    """Policy ``must_meet_target`` takes nothing that is not shown to meet it."""
    return target_missed(found) if policy == "must_meet_target" and found.target.met is not True else found
