"""The last look before a refusal: the legacy capacity order found no cut, but another order of the nodes may have one.

The proof search is asked for any placement that fits, with every node equally fast and every hop free, so that memory,
legality and the request's wishes alone decide. Only for what capacity order refuses; where it answers, its answer stands.
"""

from dataclasses import replace

from coordinator.planner.instance import Candidate, prepare
from coordinator.planner.memory import Shape
from coordinator.planner.modelled import choose_interactive
from coordinator.planner.problem import Edge, PlanningProblem
from coordinator.planner.searcher import searcher_for
from coordinator.planner.states import Budget

MAX_NODES = 40
"""Above this the pretended links alone would cost more than the search; capacity order's refusal then stands."""
EQUAL_SPEED = 1_000_000_000


def fitting_candidate(problem: PlanningProblem, shapes: tuple[Shape, ...], budget: Budget) -> Candidate | None:
    """A placement that fits at one of ``shapes``; ``None`` when there is none or the budget ended first."""
    if len(problem.participants) > MAX_NODES:
        return None
    nodes = tuple(
        replace(
            node,
            memory_bandwidth_bytes_per_s=EQUAL_SPEED,
            compute_flops_per_s=None,
            observed_decode_us_per_layer=None,
            signals_trusted=True,
        )
        for node in problem.participants
    )
    names = [node.node_id for node in nodes]
    mute = {(edge.source, edge.target) for edge in problem.edges if not edge.direct_prediction_return_supported}
    edges = tuple(
        Edge(a, b, rtt_us=0, direct_prediction_return_supported=(a, b) not in mute)
        for a in names
        for b in names
        if a != b
    )
    searcher = searcher_for(prepare(replace(problem, participants=nodes, edges=edges)), budget)
    choice = None if searcher is None else choose_interactive(searcher, shapes)
    return None if choice is None else choice.candidate
