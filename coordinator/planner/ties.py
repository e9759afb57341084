"""Equal plans: steps 6 and 7 of the comparison, for one shape and one scaled cost (so equal time and stages).

Every order of nodes that reaches the optimum is read back from the search's states. For each, the cuts that lose nothing
form a small graph (an arc is tight when the best cost before it, its own, and the best after it add up to the optimum);
the widest path through it leaves the most memory on its fullest node. Then more memory in total, then smaller ids.
``ORDER_LIMIT`` bounds how many orders are compared; they are read in a fixed order. A plan that is not proven optimal
keeps its own order, and only its cuts are settled. With a period, spans that exceed it with their egress hop do not count.
"""

from itertools import pairwise

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.cuts import fixed_order
from coordinator.planner.instance import Candidate
from coordinator.planner.memory import Shape
from coordinator.planner.ordered import parents, search
from coordinator.planner.searcher import Searcher
from coordinator.planner.span_costs import INFINITE
from coordinator.planner.states import Level, OrderedProblem, Outcome, last_egress, within_period

ORDER_LIMIT = 128
TIE_WIDTH = 1_024
Rank = tuple[int, int, int, tuple[str, ...]]


def roomiest(searcher: Searcher, shape: Shape, outcome: Outcome, period_us: int | None = None) -> Candidate:
    """The preferred plan among those as good as ``outcome`` at ``shape``, and within ``period_us``.

    With a period ``outcome`` is one of ``Searcher.fewest``: longer plans are not looked at, whatever they cost.
    """
    best: tuple[Rank, Candidate] | None = None
    for mode in searcher.modes:
        table = searcher.costs(shape, mode, period_us)
        required, problem = table.required, searcher.ordered(mode, table, period_us)
        orders = dict.fromkeys(_orders(problem, outcome.best, searcher) if outcome.lower >= outcome.best else ())
        orders.setdefault(outcome.sequence)
        for sequence in orders:
            found = _widest(searcher, problem, sequence, outcome.best, required)
            if found is not None:
                ranked = _rank(searcher, shape, sequence, found, required)
                if best is None or ranked[0] < best[0]:
                    best = ranked
    assert best is not None, "the outcome itself is among its equals"
    return best[1]


def _rank(
    searcher: Searcher, shape: Shape, sequence: tuple[int, ...], cuts: tuple[int, ...], required: Matrix
) -> tuple[Rank, Candidate]:
    ids = tuple(searcher.spans.ids[node] for node in sequence)
    left = [
        int(searcher.spans.usable[node] - required[start, end])
        for node, start, end in zip(sequence, cuts[:-1], cuts[1:], strict=True)
    ]
    cached = 0
    if searcher.instance.problem.request.prefer_cached:
        held = {node.node_id: node.cached_bytes or 0 for node in searcher.instance.nodes}
        cached = sum(held[node_id] for node_id in ids)
    return (-cached, -min(left), -sum(left), ids), Candidate(shape, ids, cuts)


def _orders(problem: OrderedProblem, best: int, searcher: Searcher) -> list[tuple[int, ...]]:
    fewest = problem.period_limit_us is not None
    outcome = search(problem, best, searcher.budget, width=TIE_WIDTH, ties=True, fewest=fewest)
    found: list[tuple[int, ...]] = []
    for depth, level in enumerate(outcome.levels):
        if depth + 1 < problem.minimum_stages:
            continue
        assert level.total is not None
        complete = (level.total == best) & ((level.used & problem.must) == problem.must)
        for row in np.flatnonzero(complete):
            node, first = int(level.last[row]), int(level.first[row])
            spans = within_period(problem, node, _last_egress(problem, first, int(level.previous[row]), node))
            layers = np.flatnonzero(level.open_cost[row] + spans[:, -1] + problem.hops.final[node, first] == best)
            _read_back(problem, outcome.levels, depth, int(row), layers, (), found)
    return found


def _read_back(
    problem: OrderedProblem,
    levels: list[Level],
    depth: int,
    row: int,
    layers: Matrix,
    later: tuple[int, ...],
    found: list[tuple[int, ...]],
) -> None:
    """Collect orders that end in ``later`` and reach state ``row`` at one of ``layers`` with its least cost."""
    if len(found) >= ORDER_LIMIT:
        return
    level = levels[depth]
    order = (int(level.last[row]), *later)
    if depth == 0:
        found.append(order)
        return
    above = levels[depth - 1]
    reached: dict[int, list[int]] = {}
    for layer in layers:
        for parent in parents(problem, above, level, row, int(layer)):
            reached.setdefault(parent, []).append(int(layer))
    lead = int(level.first[row]) if problem.hops.arc.shape[0] > 1 else 0
    for parent in sorted(reached):
        node, ends = int(above.last[parent]), np.array(reached[parent])
        matrix = within_period(problem, node, int(problem.hops.egress[lead, node, order[0]]))
        spans = above.open_cost[parent][:, None] + matrix[:, ends]
        begins = np.flatnonzero((spans == spans.min(axis=0)[None, :]).any(axis=1))
        _read_back(problem, levels, depth - 1, parent, begins, order, found)


def _widest(
    searcher: Searcher, problem: OrderedProblem, sequence: tuple[int, ...], best: int, required: Matrix
) -> tuple[int, ...] | None:
    """Cuts of cost ``best`` on ``sequence`` that leave the most memory on the fullest node; ``None`` if none cost that."""
    order = fixed_order(_within_period(problem, sequence), problem.hops, sequence)
    if order.best() != best:
        return None
    return _widest_path(order.rooms(best, [searcher.spans.usable[node] - required for node in sequence]))


def _within_period(problem: OrderedProblem, sequence: tuple[int, ...]) -> Matrix:
    """The span costs when every stage of ``sequence`` leaves to the next one."""
    if problem.period_limit_us is None:
        return problem.cost
    cost = problem.cost.copy()
    lead = sequence[0] if problem.hops.arc.shape[0] > 1 else 0
    for node, heir in pairwise(sequence):
        cost[node] = within_period(problem, node, int(problem.hops.egress[lead, node, heir]))
    previous = sequence[-2] if len(sequence) > 1 else -1
    cost[sequence[-1]] = within_period(
        problem, sequence[-1], _last_egress(problem, sequence[0], previous, sequence[-1])
    )
    return cost


def _last_egress(problem: OrderedProblem, first: int, previous: int, last: int) -> int:
    if problem.period_limit_us is None:
        return 0
    return int(last_egress(problem, np.array([first]), np.array([previous]), np.array([last]))[0])


def _widest_path(rooms: list[Matrix]) -> tuple[int, ...]:
    """Layers of the path 0 → last through ``rooms`` (−1 = no arc) whose narrowest arc is widest; ties: later cuts first."""
    count = rooms[0].shape[0]
    width = np.full(count, -1, dtype=np.int64)
    width[0] = INFINITE
    came: list[Matrix] = []
    for room in rooms:
        through = np.minimum(width[:, None], room)
        back = count - 1 - through[::-1].argmax(axis=0)
        came.append(back)
        width = through[back, np.arange(count)]
    cuts = [count - 1]
    for back in reversed(came):
        cuts.append(int(back[cuts[-1]]))
    return tuple(reversed(cuts))
