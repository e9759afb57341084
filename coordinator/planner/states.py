"""What the ordered search works on: its problem, the states of a level, and the min-plus product that closes a stage.

A state is (first node, set of used nodes, last node) with a vector u over the layers: ``u[a]`` is the least cost of
having placed ``[0, a)`` on the used nodes except the last, the hop into the last included.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.planner.bounds import WalkBounds
from coordinator.planner.cost import Matrix
from coordinator.planner.span_costs import INFINITE, SCALE, HopArrays

CHUNK_ELEMENTS = 400_000
Mask = NDArray[np.bool_]


@dataclass
class Budget:
    """Work that may still be done, in matrix elements, and the states expanded. Shared by the searches of one call.

    Beams and pricing are always allowed and charged all the same; when nothing is left, proofs stop.
    """

    left: int
    expanded: int = 0
    overdue: Callable[[], bool] | None = None
    """A caller's clock, as a safety stop far beyond the budget; without one nothing but the work decides."""

    def charge(self, elements: int, states: int = 0) -> None:
        """Account for work done."""
        self.left = 0 if self.overdue is not None and self.overdue() else self.left - elements
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
    def remembers(self) -> bool:
        """A reply that walks back leaves the last stage towards its predecessor: the period then depends on it."""
        return self.period_limit_us is not None and self.hops.mode == "walk_back"

    @property
    def state_work(self) -> int:
        """Elements touched to expand one state: half a min-plus product and six passes over every possible child."""
        count = int(self.cost.shape[1])
        return count * count // 2 + 6 * count * self.nodes


@dataclass
class Level:
    """States with equally many nodes, sorted by (first, used, last). ``open_cost`` is u, ``closed`` the cost after.

    ``previous`` is the node before the last where that matters (``OrderedProblem.remembers``), else −1.
    """

    first: Matrix
    used: Matrix
    previous: Matrix
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
        return Level(
            self.first[keep],
            self.used[keep],
            self.previous[keep],
            self.last[keep],
            self.open_cost[keep],
            self.bound[keep],
        )


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


def closed_by(problem: OrderedProblem, level: Level, rows: Matrix, egress_us: Matrix) -> Matrix:
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


def last_egress(problem: OrderedProblem, first: Matrix, previous: Matrix, last: Matrix) -> Matrix:
    """What the last stage waits for (µs): its reply to the head, or walking back to its predecessor; alone for nothing."""
    towards = previous if problem.hops.mode == "walk_back" else first
    return np.where(first == last, 0, problem.hops.last_egress[last, towards])


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
