"""Why this plan: the price of every stage and hop, its rivals, and what would change it (DESIGN §8).

Rivals are answers of the same planner to a slightly different question, so they are the best of their kind: the chosen
nodes in memory order with memory-only cuts, the best plan without each chosen node, the best plan with each node that
was left out, the best single node. Each carries its cost difference and the one stage or hop that accounts for most of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from coordinator.planner.assemble import assemble
from coordinator.planner.capacity import CapacityWalk
from coordinator.planner.diagnostics import milliseconds
from coordinator.planner.instance import Candidate, Instance, prepare
from coordinator.planner.memory import Shape
from coordinator.planner.plan import Plan, PlanRefused, SearchCertificate
from coordinator.planner.planning import plan as place
from coordinator.planner.problem import PlanningProblem
from coordinator.planner.span_costs import required_matrix

RivalKind = Literal["memory_order", "without_node", "with_node", "single_node"]
MAX_RIVALS_WITHOUT = 16
MAX_RIVALS_WITH = 8
"""Of the nodes left out, those with the most memory are asked about."""
UNMODELLED = SearchCertificate(proven_optimal=False, gap=None, expanded=0, elapsed_ms=0)


@dataclass(frozen=True, slots=True)
class Term:
    """One priced part of a plan: a stage (by node) or a hop (``a -> b``). ``cost_us`` is ``None`` when unknown."""

    kind: Literal["stage", "hop"]
    name: str
    cost_us: int | None


@dataclass(frozen=True, slots=True)
class Rival:
    """Another placement. ``difference_us`` > 0 means that the rival is slower; ``term`` explains most of it."""

    kind: RivalKind
    label: str
    plan: Plan | None
    difference_us: int | None
    term: Term | None
    term_difference_us: int | None
    reason: str
    """Why there is no plan, or an empty string."""
    also: tuple[str, ...] = ()
    """Labels of further questions with this very plan as their answer."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """``terms`` are the plan's own prices in the order a token meets them; ``changes`` are sentences for people."""

    plan: Plan
    terms: tuple[Term, ...]
    rivals: tuple[Rival, ...]
    changes: tuple[str, ...]


def explain(problem: PlanningProblem, plan: Plan, *, clock_us: Callable[[], int] | None = None) -> Explanation:
    """Explain ``plan``, which answers ``problem``. Chooses nothing; every rival is planned within the same budget."""
    instance = prepare(problem)
    rivals = (
        _memory_order(instance, plan),
        *(_without(problem, plan, stage.node_id, clock_us) for stage in plan.stages[:MAX_RIVALS_WITHOUT]),
        *(_with(problem, plan, node_id, clock_us) for node_id in _left_out(instance, plan)[:MAX_RIVALS_WITH]),
        _single(instance, plan),
    )
    distinct = _distinct(rivals)
    return Explanation(plan, terms_of(plan), distinct, _changes(plan, distinct))


def _distinct(rivals: tuple[Rival, ...]) -> tuple[Rival, ...]:
    """Each plan once: with two nodes, to leave one out and to take the other alone is the same."""
    found: list[Rival] = []
    for rival in rivals:
        same = [
            index
            for index, known in enumerate(found)
            if rival.plan is not None and known.plan is not None and known.plan.plan_hash == rival.plan.plan_hash
        ]
        if same:
            known = found[same[0]]
            found[same[0]] = replace(known, also=(*known.also, rival.label))
        else:
            found.append(rival)
    return tuple(found)


def terms_of(plan: Plan) -> tuple[Term, ...]:
    """Stages and hops of ``plan`` with their costs."""
    stages = [Term("stage", stage.node_id, stage.stage_us) for stage in plan.stages]
    hops = [Term("hop", f"{hop.source} -> {hop.target}", hop.hop_us) for hop in plan.hops]
    return (*stages, *hops)


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """JSON-ready form of ``explain --json``."""
    return {
        "plan_id": explanation.plan.plan_id,
        "decode_tpot_us": explanation.plan.modeled.decode_tpot_us,
        "terms": [_term(term) for term in explanation.terms],
        "rivals": [
            {
                "kind": rival.kind,
                "label": rival.label,
                "also": list(rival.also),
                "nodes": [] if rival.plan is None else [stage.node_id for stage in rival.plan.stages],
                "layers": []
                if rival.plan is None
                else [[stage.layer_start, stage.layer_end] for stage in rival.plan.stages],
                "decode_tpot_us": None if rival.plan is None else rival.plan.modeled.decode_tpot_us,
                "difference_us": rival.difference_us,
                "term": None if rival.term is None else _term(rival.term),
                "term_difference_us": rival.term_difference_us,
                "reason": rival.reason,
            }
            for rival in explanation.rivals
        ],
        "changes": list(explanation.changes),
    }


def _term(term: Term) -> dict[str, Any]:
    return {"kind": term.kind, "name": term.name, "cost_us": term.cost_us}


def _rival(kind: RivalKind, label: str, ours: Plan, found: Plan | PlanRefused | None) -> Rival:
    if found is None or isinstance(found, PlanRefused):
        reason = "does not fit" if found is None else found.message
        return Rival(kind, label, None, None, None, None, reason)
    mine, theirs = ours.modeled.decode_tpot_us, found.modeled.decode_tpot_us
    difference = None if mine is None or theirs is None else theirs - mine
    term, by = _largest_difference(ours, found)
    return Rival(kind, label, found, difference, term, by, "")


def _largest_difference(ours: Plan, rival: Plan) -> tuple[Term | None, int | None]:
    """The rival's term that differs most from ours in the direction of the whole; a term only one plan has counts fully."""
    mine = {(term.kind, term.name): term.cost_us for term in terms_of(ours)}
    theirs = {(term.kind, term.name): term.cost_us for term in terms_of(rival)}
    keys = [*theirs, *(key for key in mine if key not in theirs)]
    changed = [(key, (theirs.get(key, 0) or 0) - (mine.get(key, 0) or 0)) for key in keys]
    changed = [(key, by) for key, by in changed if by]
    if not changed:
        return None, None
    slower = sum(by for _, by in changed) >= 0
    key, by = max(changed, key=lambda item: item[1] if slower else -item[1])
    return Term("hop" if key[0] == "hop" else "stage", key[1], theirs.get(key, 0)), by


def _memory_order(instance: Instance, plan: Plan) -> Rival:
    label = "the same nodes in memory order"
    chosen = {stage.node_id for stage in plan.stages}
    indices = [index for index, node in enumerate(instance.nodes) if node.node_id in chosen]
    if len(indices) != len(chosen):
        return _rival("memory_order", label, plan, None)
    shape = Shape(plan.context_length, plan.parallel_lanes)
    candidate = _walk(instance, shape, indices)
    return _rival("memory_order", label, plan, None if candidate is None else _assembled(instance, candidate))


def _walk(instance: Instance, shape: Shape, indices: list[int]) -> Candidate | None:
    walk = CapacityWalk(instance)
    orders = np.array([indices], dtype=np.int64)
    cuts, feasible = walk.cuts(orders, required_matrix(instance, shape))
    if not feasible[0]:
        return None
    ids = tuple(instance.nodes[index].node_id for index in indices)
    return Candidate(shape, ids, tuple(int(cut) for cut in cuts[0]))


def _assembled(instance: Instance, candidate: Candidate) -> Plan:
    placement: Literal["performance_aware", "capacity_only"] = (
        "performance_aware" if all(instance.times[node_id] for node_id in candidate.sequence) else "capacity_only"
    )
    return assemble(instance, candidate, placement, UNMODELLED, "-")


def _without(problem: PlanningProblem, plan: Plan, node_id: str, clock_us: Callable[[], int] | None) -> Rival:
    request = problem.request
    other = replace(
        request,
        exclude_nodes=request.exclude_nodes | {node_id},
        require_nodes=request.require_nodes - {node_id},
        pin_stage0=None if request.pin_stage0 == node_id else request.pin_stage0,
        policy="best_effort",
        locked=None,
    )
    found = place(replace(problem, request=other), clock_us=clock_us)
    return _rival("without_node", f"without {node_id}", plan, found)


def _left_out(instance: Instance, plan: Plan) -> list[str]:
    chosen = {stage.node_id for stage in plan.stages}
    return [node.node_id for node in instance.nodes if node.node_id not in chosen]


def _with(problem: PlanningProblem, plan: Plan, node_id: str, clock_us: Callable[[], int] | None) -> Rival:
    required = problem.request.require_nodes | {node_id}
    other = replace(problem.request, require_nodes=required, policy="best_effort", locked=None)
    return _rival("with_node", f"with {node_id}", plan, place(replace(problem, request=other), clock_us=clock_us))


def _single(instance: Instance, plan: Plan) -> Rival:
    """The best single node at the plan's shape, by modelled time, else by memory."""
    shape = Shape(plan.context_length, plan.parallel_lanes)
    singles = [candidate for index in range(len(instance.nodes)) if (candidate := _walk(instance, shape, [index]))]
    plans = [_assembled(instance, candidate) for candidate in singles]
    if not plans:
        return _rival("single_node", "the best single node", plan, None)
    best = min(plans, key=lambda p: (p.modeled.decode_tpot_us is None, p.modeled.decode_tpot_us or 0, p.plan_id))
    return _rival("single_node", f"{best.stages[0].node_id} alone", plan, best)


def _changes(plan: Plan, rivals: tuple[Rival, ...]) -> tuple[str, ...]:
    sentences = []
    tpot = plan.modeled.decode_tpot_us
    if tpot is None:
        sentences.append(
            "With a trusted bandwidth of every node and an RTT of every hop the decode time could be modelled."
        )
        return tuple(sentences)
    dearest = max((term for term in terms_of(plan) if term.cost_us), key=lambda term: term.cost_us or 0, default=None)
    if dearest is not None:
        share = 100 * (dearest.cost_us or 0) // max(1, tpot)
        sentences.append(
            f"{dearest.kind} {dearest.name} is the dearest term: {milliseconds(dearest.cost_us or 0)} ms, {share} % of a token."
        )
    for rival in rivals:
        if rival.difference_us is None or rival.difference_us <= 0:
            continue
        by = milliseconds(rival.difference_us)
        if rival.kind == "without_node":
            node = rival.label.removeprefix("without ")
            sentences.append(
                f"{node} saves {by} ms per token; it would be left out once its stage and hops cost that much more."
            )
        elif rival.kind == "with_node" and rival.term is not None:
            node = rival.label.removeprefix("with ")
            sentences.append(
                f"{node} is left out: with it a token takes {by} ms more, mostly for {rival.term.kind} {rival.term.name}; "
                f"it would be used once its stage and hops cost that much less."
            )
    if plan.target.met is False:
        sentences.append(f"The target needs {milliseconds(tpot - plan.target.decode_tpot_us)} ms less per token.")
    return tuple(sentences)
