"""The joint search over subset, order and cuts for one shape, one reply mode and the serial cost.

Dynamic programming by number of stages. A state is (first node, set of used nodes, last node): its vector u gives, for
every layer a, the least cost of having placed ``[0, a)`` on the used nodes except the last, the hop into the last
included. One min-plus product with the last node's span costs closes its stage; adding a hop opens the next. States
reached by different orders merge element-wise, which is what turns k! orders into subsets.

Each element is dropped once its cost plus the walk bound reaches the incumbent, so a level holds only what could still
win. Interchangeable nodes (equal costs, memory and hops) are used in id order. The work is counted in expanded states;
when it runs out, the states with the worst bounds are dropped and the least dropped bound becomes the certificate. The
same input and budget therefore give the same answer on every machine.
"""

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.span_costs import HOPELESS, INFINITE
from coordinator.planner.states import (
    CHUNK_ELEMENTS,
    Budget,
    Level,
    Mask,
    OrderedProblem,
    Outcome,
    closed_by,
    last_egress,
    within_period,
)

LEVEL_WORK = 200_000
"""What a level costs whatever its size, in elements: the calls rather than the data."""


def search(
    problem: OrderedProblem,
    upper: int,
    budget: Budget,
    *,
    width: int | None = None,
    ties: bool = False,
    fewest: bool = False,
) -> Outcome:
    """Best plan of cost < ``upper`` (≤ with ``ties``, and then all states of such plans are kept).

    With ``fewest`` the search ends at the first number of stages that has such a plan. ``width`` bounds the states of a
    level (a beam). The outcome's ``lower`` accounts for everything dropped.
    """
    limit = upper + 1 if ties else upper
    outcome = Outcome(INFINITE, INFINITE)
    level = _roots(problem, limit)
    for stages in range(1, min(problem.nodes, problem.cost.shape[1] - 1) + 1):
        affordable = budget.left // problem.state_work if width is None else width
        level = _trim(level, outcome, affordable)
        if level.size == 0:
            break
        budget.charge(LEVEL_WORK + level.size * problem.state_work, level.size)
        outcome.levels.append(level)
        _close(problem, level)
        _record(problem, level, stages, outcome, limit)
        if fewest and outcome.best < limit:
            break
        if not ties:
            limit = min(limit, outcome.best)
        level = _children(problem, level, limit)
    outcome.lower = min(outcome.lower, max(outcome.best, 0), upper)
    return outcome


def _roots(problem: OrderedProblem, limit: int) -> Level:
    starts = np.array([n for n in problem.starts if problem.twins[n] < 0 or len(problem.starts) == 1], dtype=np.int64)
    open_cost = np.full((len(starts), problem.cost.shape[1]), INFINITE, dtype=np.int64)
    open_cost[:, 0] = 0
    spare = int(problem.bounds.prices.sum())
    bound = problem.bounds.gin[starts, starts, 0] + problem.bounds.prices[starts] - spare
    nobody = np.full_like(starts, -1)
    level = Level(starts, np.left_shift(np.int64(1), starts), nobody, starts, open_cost, bound)
    return level.subset(bound < limit)


def _trim(level: Level, outcome: Outcome, affordable: int) -> Level:
    room = max(0, affordable)
    if level.size <= room:
        return level
    order = np.argsort(level.bound, kind="stable")
    dropped = level.bound[order[room:]]
    outcome.lower = min(outcome.lower, int(dropped.min()))
    return level.subset(np.sort(order[:room]))


def _close(problem: OrderedProblem, level: Level) -> None:
    """Fill ``closed`` (the last node's stage ends at each layer) and ``total`` (it ends at the last layer and replies)."""
    every = np.arange(level.size)
    level.closed = final = closed_by(problem, level, every, np.zeros(level.size, dtype=np.int64))
    if problem.period_limit_us is not None:
        final = closed_by(problem, level, every, last_egress(problem, level.first, level.previous, level.last))
    level.total = _capped(final[:, -1] + problem.hops.final[level.last, level.first])


def _capped(costs: Matrix) -> Matrix:
    capped: Matrix = np.where(costs >= HOPELESS, INFINITE, costs)
    return capped


def _record(problem: OrderedProblem, level: Level, stages: int, outcome: Outcome, limit: int) -> None:
    assert level.total is not None
    if stages < problem.minimum_stages:
        return
    total = level.total
    if problem.must:
        total = np.where((level.used & problem.must) == problem.must, total, INFINITE)
    row = int(total.argmin())
    if int(total[row]) < min(outcome.best, limit):
        outcome.best = int(total[row])
        outcome.sequence, outcome.cuts = trace(problem, outcome.levels, row)


def _children(problem: OrderedProblem, level: Level, limit: int) -> Level:
    """Every state one hop further that may still beat ``limit``; equal states merged."""
    nodes = np.arange(problem.nodes)
    unused: Matrix = 1 - ((level.used[:, None] >> nodes[None, :]) & 1)
    spare, room = unused @ problem.bounds.prices, unused @ problem.usable
    twins = np.maximum(problem.twins, 0)
    free: Mask = np.equal(unused, 1) & (np.less(problem.twins, 0)[None, :] | np.equal(unused[:, twins], 0))
    # layers that even all unused memory cannot hold may not remain
    beyond = problem.suffix[None, :] > room[:, None]
    assert level.closed is not None
    level.closed[beyond] = INFINITE
    free &= np.less(level.closed[:, :-1].min(axis=1), INFINITE)[:, None]
    rows, heirs = np.nonzero(free)
    step = max(1, CHUNK_ELEMENTS // level.open_cost.shape[1])
    parts = [
        _offspring(problem, level, rows[start : start + step], heirs[start : start + step], limit, spare)
        for start in range(0, rows.size, step)
    ]
    if not parts:
        return level.subset(np.zeros(0, dtype=np.int64))
    return _merge(parts)


def _offspring(problem: OrderedProblem, level: Level, rows: Matrix, heirs: Matrix, limit: int, spare: Matrix) -> Level:
    assert level.closed is not None
    egress = _lead(problem, level.first[rows]), level.last[rows], heirs
    # the heir's own price is paid by using it: it is no longer refunded
    ahead = problem.hops.arc[egress] - (spare[rows] - problem.bounds.prices[heirs])
    closed = level.closed[rows]
    estimate = closed + problem.bounds.gin[level.first[rows], heirs] + ahead[:, None]
    keep = np.flatnonzero(estimate.min(axis=1) < limit)
    rows, heirs, closed, estimate = rows[keep], heirs[keep], closed[keep], estimate[keep]
    egress = _lead(problem, level.first[rows]), level.last[rows], heirs
    if problem.period_limit_us is not None:
        # only now, for the few that remain, look at the hop that each stage really leaves over
        limited = closed_by(problem, level, rows, problem.hops.egress[egress])
        limited[closed >= INFINITE] = INFINITE
        estimate, closed = estimate + (limited - closed), limited
    open_cost = closed + problem.hops.arc[egress][:, None]
    open_cost[estimate >= limit] = INFINITE
    bound = estimate.min(axis=1)
    used = level.used[rows] | np.left_shift(np.int64(1), heirs)
    previous = level.last[rows] if problem.remembers else np.full_like(heirs, -1)
    children = Level(level.first[rows], used, previous, heirs, open_cost, bound)
    return children if problem.period_limit_us is None else children.subset(np.flatnonzero(bound < limit))


def _lead(problem: OrderedProblem, first: Matrix) -> Matrix:
    """Index of the head in the hop arrays: only a star's hops depend on it."""
    return first if problem.hops.arc.shape[0] > 1 else np.zeros_like(first)


def _merge(parts: list[Level]) -> Level:
    first = np.concatenate([part.first for part in parts])
    used = np.concatenate([part.used for part in parts])
    previous = np.concatenate([part.previous for part in parts])
    last = np.concatenate([part.last for part in parts])
    open_cost = np.concatenate([part.open_cost for part in parts])
    bound = np.concatenate([part.bound for part in parts])
    if first.size == 0:
        return Level(first, used, previous, last, open_cost, bound)
    order = np.lexsort((previous, last, used, first))
    first, used, previous, last = first[order], used[order], previous[order], last[order]
    fresh = np.ones(first.size, dtype=bool)
    fresh[1:] = (first[1:] != first[:-1]) | (used[1:] != used[:-1]) | (last[1:] != last[:-1])
    fresh[1:] |= previous[1:] != previous[:-1]
    starts = np.flatnonzero(fresh)
    return Level(
        first[starts],
        used[starts],
        previous[starts],
        last[starts],
        np.minimum.reduceat(open_cost[order], starts, axis=0),
        np.minimum.reduceat(bound[order], starts),
    )


def trace(problem: OrderedProblem, levels: list[Level], row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes in stage order and cuts of the plan that state ``row`` of the last level completes."""
    depth = len(levels) - 1
    layer = problem.cost.shape[1] - 1
    sequence, cuts = [], [layer]
    level, state = levels[depth], row
    while True:
        node = int(level.last[state])
        sequence.append(node)
        egress = _egress_of(problem, level, state, sequence)
        spans = level.open_cost[state] + within_period(problem, node, egress)[:, layer]
        layer = int(spans.argmin())
        cuts.append(layer)
        if depth == 0:
            return tuple(reversed(sequence)), tuple(reversed(cuts))
        state = parents(problem, levels[depth - 1], level, state, layer)[0]
        depth -= 1
        level = levels[depth]


def _egress_of(problem: OrderedProblem, level: Level, state: int, later: list[int]) -> int:
    """Egress (µs) of ``state``'s stage, given the nodes after it in reverse order (its own last in ``later``)."""
    if problem.period_limit_us is None:
        return 0
    row = np.array([state])
    if len(later) == 1:
        return int(last_egress(problem, level.first[row], level.previous[row], level.last[row])[0])
    lead = int(level.first[state]) if problem.hops.arc.shape[0] > 1 else 0
    return int(problem.hops.egress[lead, later[-1], later[-2]])


def parents(problem: OrderedProblem, above: Level, level: Level, state: int, layer: int) -> list[int]:
    """States of the level above from which ``state``'s cost at ``layer`` was reached; never empty."""
    node, first = int(level.last[state]), int(level.first[state])
    rest = int(level.used[state]) & ~(1 << node)
    lead = first if problem.hops.arc.shape[0] > 1 else 0
    rows = np.flatnonzero((above.used == rest) & (above.first == first))
    if problem.remembers:
        rows = rows[above.last[rows] == level.previous[state]]
    assert above.closed is not None
    closed = above.closed[rows, layer]
    if problem.period_limit_us is not None:
        closed = closed_by(problem, above, rows, problem.hops.egress[lead, above.last[rows], node])[:, layer]
    reached = closed + problem.hops.arc[lead, above.last[rows], node]
    found = [int(row) for row in rows[reached == level.open_cost[state, layer]]]
    assert found, "a state without the state it came from"
    return found
