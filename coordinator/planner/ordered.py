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

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.planner.bounds import WalkBounds
from coordinator.planner.cost import Matrix
from coordinator.planner.span_costs import HOPELESS, INFINITE, SCALE, HopArrays

CHUNK_ELEMENTS = 400_000
LEVEL_WORK = 200_000
"""What a level costs whatever its size, in elements: the calls rather than the data."""
Mask = NDArray[np.bool_]


@dataclass
class Budget:
    """Work that may still be done, in matrix elements, and the states expanded. Shared by the searches of one call.

    Beams and pricing are always allowed and charged all the same; when nothing is left, proofs stop.
    """

    left: int
    expanded: int = 0

    def charge(self, elements: int, states: int = 0) -> None:
        """Account for work done."""
        self.left -= elements
        self.expanded += states


@dataclass(frozen=True)
class OrderedProblem:
    """One shape and reply mode. ``must`` and ``starts`` carry the operator's wishes; indices are capacity order."""

    cost: Matrix
    hops: HopArrays
    bounds: WalkBounds
    twins: Matrix
    """``twins[n]`` = the interchangeable node that must be used before n, or −1."""
    starts: tuple[int, ...]
    usable: Matrix
    """Usable bytes per node."""
    suffix: Matrix
    """Bytes that the layers from each one on need."""
    must: int = 0
    minimum_stages: int = 1
    period_limit_us: int | None = None
    """Every stage with its egress hop stays within this; ``None`` = no limit."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.cost.shape[0])

    @property
    def state_work(self) -> int:
        """Elements touched to expand one state: half a min-plus product and six passes over every possible child."""
        count = int(self.cost.shape[1])
        return count * count // 2 + 6 * count * self.nodes


@dataclass
class Level:
    """States with equally many nodes, sorted by (first, used, last). ``open_cost`` is u, ``closed`` the cost after."""

    first: Matrix
    used: Matrix
    last: Matrix
    open_cost: Matrix
    bound: Matrix
    closed: Matrix | None = None
    total: Matrix | None = None

    @property
    def size(self) -> int:
        """Number of states."""
        return int(self.first.shape[0])

    def subset(self, keep: Matrix | Mask) -> "Level":
        """The states ``keep`` selects, in order."""
        return Level(self.first[keep], self.used[keep], self.last[keep], self.open_cost[keep], self.bound[keep])


@dataclass
class Outcome:
    """``best`` is the scaled cost of the best plan found (``INFINITE`` = none), ``lower`` a bound on any plan's.

    ``levels`` keeps the states for ``ties``; ``sequence`` and ``cuts`` describe the plan.
    """

    best: int
    lower: int
    sequence: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    levels: list[Level] = field(default_factory=list)


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
    level = Level(starts, np.left_shift(np.int64(1), starts), starts, open_cost, bound)
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
    level.closed = final = _closed(problem, level, every, np.zeros(level.size, dtype=np.int64))
    if problem.period_limit_us is not None:
        final = _closed(problem, level, every, last_egress(problem, level.first, level.last, level.used))
    level.total = _capped(final[:, -1] + problem.hops.final[level.last, level.first])


def _capped(costs: Matrix) -> Matrix:
    capped: Matrix = np.where(costs >= HOPELESS, INFINITE, costs)
    return capped


def _closed(problem: OrderedProblem, level: Level, rows: Matrix, egress_us: Matrix) -> Matrix:
    """The vectors after the last stage of ``rows``, each leaving over a hop of ``egress_us``."""
    out: Matrix = np.empty((rows.size, level.open_cost.shape[1]), dtype=np.int64)
    last = level.last[rows]
    keys = last if problem.period_limit_us is None else last * np.int64(2**46) + egress_us
    _, heads, group = np.unique(keys, return_index=True, return_inverse=True)
    for index, head in enumerate(heads):
        members = np.flatnonzero(group == index)
        matrix = within_period(problem, int(last[head]), int(egress_us[head]))
        out[members] = min_plus(level.open_cost[rows[members]], matrix)
    return out


def within_period(problem: OrderedProblem, node: int, egress_us: int) -> Matrix:
    """The node's span costs without the spans that, with their egress, exceed the period."""
    cost: Matrix = problem.cost[node]
    if problem.period_limit_us is None:
        return cost
    most = (problem.period_limit_us - egress_us) * SCALE + 1
    return np.where(cost <= most, cost, INFINITE)


def last_egress(problem: OrderedProblem, first: Matrix, last: Matrix, used: Matrix) -> Matrix:
    """What the last stage waits for (µs); a single stage for nothing. Walking back: at least its cheapest step."""
    table = problem.hops.last_egress
    if problem.hops.mode == "walk_back":
        inside = (used[:, None] >> np.arange(problem.nodes)[None, :]) & 1 == 1
        inside[np.arange(last.size), last] = False
        steps = np.where(inside, table[last], INFINITE).min(axis=1)
        return np.where(steps < INFINITE, steps, 0)
    return np.where(first == last, 0, table[last, first])


def min_plus(vectors: Matrix, matrix: Matrix) -> Matrix:
    """``out[i, b] = min over a of vectors[i, a] + matrix[a, b]``, capped at ``INFINITE``; looks at finite parts only."""
    out: Matrix = np.full((vectors.shape[0], matrix.shape[1]), INFINITE, dtype=np.int64)
    begins = np.flatnonzero((vectors.min(axis=0) < INFINITE) & (matrix.min(axis=1) < INFINITE))
    if begins.size == 0:
        return out
    block = matrix[begins]
    ends = np.flatnonzero(block.min(axis=0) < INFINITE)
    if ends.size == 0:
        return out
    low, high = int(ends[0]), int(ends[-1]) + 1
    block = np.ascontiguousarray(block[:, low:high])
    chosen = np.ascontiguousarray(vectors[:, begins])
    step = max(1, CHUNK_ELEMENTS // block.size)
    for start in range(0, chosen.shape[0], step):
        part = chosen[start : start + step, :, None] + block[None]
        out[start : start + step, low:high] = np.minimum(part.min(axis=1), INFINITE)
    return out


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
        limited = _closed(problem, level, rows, problem.hops.egress[egress])
        limited[closed >= INFINITE] = INFINITE
        estimate, closed = estimate + (limited - closed), limited
    open_cost = closed + problem.hops.arc[egress][:, None]
    open_cost[estimate >= limit] = INFINITE
    bound = estimate.min(axis=1)
    used = level.used[rows] | np.left_shift(np.int64(1), heirs)
    children = Level(level.first[rows], used, heirs, open_cost, bound)
    return children if problem.period_limit_us is None else children.subset(np.flatnonzero(bound < limit))


def _lead(problem: OrderedProblem, first: Matrix) -> Matrix:
    """Index of the head in the hop arrays: only a star's hops depend on it."""
    return first if problem.hops.arc.shape[0] > 1 else np.zeros_like(first)


def _merge(parts: list[Level]) -> Level:
    first = np.concatenate([part.first for part in parts])
    used = np.concatenate([part.used for part in parts])
    last = np.concatenate([part.last for part in parts])
    open_cost = np.concatenate([part.open_cost for part in parts])
    bound = np.concatenate([part.bound for part in parts])
    if first.size == 0:
        return Level(first, used, last, open_cost, bound)
    order = np.lexsort((last, used, first))
    first, used, last = first[order], used[order], last[order]
    fresh = np.ones(first.size, dtype=bool)
    fresh[1:] = (first[1:] != first[:-1]) | (used[1:] != used[:-1]) | (last[1:] != last[:-1])
    starts = np.flatnonzero(fresh)
    return Level(
        first[starts],
        used[starts],
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
        return int(last_egress(problem, level.first[row], level.last[row], level.used[row])[0])
    lead = int(level.first[state]) if problem.hops.arc.shape[0] > 1 else 0
    return int(problem.hops.egress[lead, later[-1], later[-2]])


def parents(problem: OrderedProblem, above: Level, level: Level, state: int, layer: int) -> list[int]:
    """States of the level above from which ``state``'s cost at ``layer`` was reached; never empty."""
    node, first = int(level.last[state]), int(level.first[state])
    rest = int(level.used[state]) & ~(1 << node)
    lead = first if problem.hops.arc.shape[0] > 1 else 0
    rows = np.flatnonzero((above.used == rest) & (above.first == first))
    assert above.closed is not None
    closed = above.closed[rows, layer]
    if problem.period_limit_us is not None:
        closed = _closed(problem, above, rows, problem.hops.egress[lead, above.last[rows], node])[:, layer]
    reached = closed + problem.hops.arc[lead, above.last[rows], node]
    found = [int(row) for row in rows[reached == level.open_cost[state, layer]]]
    assert found, "a state without the state it came from"
    return found
