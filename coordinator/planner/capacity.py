"""Capacity-only placement (DESIGN §6): the legacy behaviour, the fallback without signals, and the kill switch.

Nodes by usable memory (pinned stage 0 first), each takes as many layers as fit while leaving one legal piece for each
later node. Without any latency the first feasible (context high → low, stages few → many, lanes high → low) wins and
within it the subset with the largest minimum, then total, remaining memory, then the smallest ids. With latencies all
subsets compete: a target missed by the network alone loses, then the lower network estimate, the larger context, the
more lanes, and memory and ids as before. The estimate is ``stages × max RTT``; once links are known it is the sum of
the hops in the order with the least adjacent hop cost (``edge_order``), and the walk follows that order.

Subsets are examined in blocks of numpy rows. ``SUBSET_LIMIT`` bounds how many of one size are looked at: beyond it only
the largest nodes by memory are combined, and the answer is no longer exact.
"""

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.edge_order import EdgeOrders, edge_orders
from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.memory import Shape
from coordinator.planner.span_costs import required_matrix
from coordinator.planner.states import Mask

SUBSET_LIMIT = 20_000
Rank = tuple[int, int, int, int, int, int, int, tuple[str, ...]]
"""Smaller is better."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A capacity-only placement and how many subsets were looked at."""

    candidate: Candidate
    examined: int


@dataclass
class CapacityWalk:
    """The greedy walk over one instance, vectorised over many node orders. Nodes are indices in capacity order."""

    instance: Instance

    def __post_init__(self) -> None:
        """Tables that do not depend on the shape."""
        nodes, count = self.instance.nodes, self.instance.layer_count
        self.usable = np.array([self.instance.usable[node.node_id] for node in nodes], dtype=np.int64)
        self.limits = np.array([self.instance.span_limit(node) for node in nodes], dtype=np.int64)
        legal = [cut for cut in range(count + 1) if cut not in self.instance.forbidden]
        self.legal = np.array(legal, dtype=np.int64)
        self.floor = np.searchsorted(self.legal, np.arange(count + 1), side="right") - 1
        self.examined = 0
        self.known: dict[int, tuple[Matrix, Matrix]] = {}

    def cuts(self, orders: Matrix, required: Matrix) -> tuple[Matrix, Matrix]:
        """Cuts (rows × stages+1) of every order, and which rows are feasible."""
        rows, stages = orders.shape
        last, pieces = self.instance.layer_count, len(self.legal) - 1
        cuts = np.zeros((rows, stages + 1), dtype=np.int64)
        feasible = np.full(rows, stages <= pieces)
        self.examined += rows
        for stage in range(stages):
            start, node = cuts[:, stage], orders[:, stage]
            later = stages - 1 - stage
            ceiling = np.minimum(self.legal[max(0, pieces - later)], start + self.limits[node])
            ceiling = self.legal[self.floor[np.minimum(ceiling, last)]]
            end = self._reach(required, start, self.usable[node], ceiling)
            if later == 0:
                end = np.where(end == last, last, start)
            feasible &= end > start
            cuts[:, stage + 1] = np.where(feasible, end, start)
        return cuts, feasible

    def _reach(self, required: Matrix, start: Matrix, capacity: Matrix, ceiling: Matrix) -> Matrix:
        """Largest legal end ≤ ``ceiling`` whose span fits; ``start`` when none does."""
        fits = required[start] <= capacity[:, None]
        index = np.arange(required.shape[1])[None, :]
        allowed = np.zeros(required.shape[1], dtype=bool)
        allowed[self.legal] = True
        fits &= allowed[None, :] & (index > start[:, None]) & (index <= ceiling[:, None])
        reached: Matrix = np.where(fits, index, start[:, None]).max(axis=1)
        return reached


def choose_capacity(instance: Instance, shapes: tuple[Shape, ...]) -> Placed | None:
    """The legacy choice, or ``None`` when nothing fits."""
    request = instance.problem.request
    ids = [node.node_id for node in instance.nodes]
    wanted = set(request.require_nodes) | ({request.pin_stage0} if request.pin_stage0 else set())
    if not ids or not wanted <= set(ids):
        return None
    walk = CapacityWalk(instance)
    links = bool(instance.signals.edges)
    latencies = links or any(instance.signals.nodes[node_id].coordinator_rtt_us is not None for node_id in ids)
    sizes = range(max(1, request.minimum_nodes, len(wanted)), min(len(ids), instance.layer_count) + 1)
    orders = edge_orders(instance) if links else None
    best: tuple[Rank, Candidate] | None = None
    for context in dict.fromkeys(shape.context_length for shape in shapes):
        for size in sizes:
            for shape in (shape for shape in shapes if shape.context_length == context):
                found = _best_of_size(walk, shape, size, orders, latencies=latencies, rival=best[0] if best else None)
                if found is None:
                    continue
                if not latencies:
                    return Placed(found[1], walk.examined)
                if best is None or found[0] < best[0]:
                    best = found
    return Placed(best[1], walk.examined) if best else None


def _best_of_size(
    walk: CapacityWalk, shape: Shape, size: int, links: EdgeOrders | None, *, latencies: bool, rival: Rank | None
) -> tuple[Rank, Candidate] | None:
    instance = walk.instance
    if rival is not None and _least_estimate(instance, size, links) > rival[1] and rival[0] == 0:
        return None
    required = required_matrix(instance, shape)
    if _hopeless(walk, size, required):
        return None
    orders, estimates = _orders(walk, size, links)
    if orders.shape[0] == 0:
        return None
    cuts, feasible = walk.cuts(orders, required)
    feasible &= _may_reply(instance, orders)
    if links is not None and not feasible.all():
        # the cheapest order may not fit where the capacity order does
        plain = _pinned_first(instance, np.sort(orders, axis=1))
        plain_cuts, plain_feasible = walk.cuts(plain, required)
        rescue = ~feasible & plain_feasible & _may_reply(instance, plain)
        orders, cuts = np.where(rescue[:, None], plain, orders), np.where(rescue[:, None], plain_cuts, cuts)
        estimates = np.where(rescue, links.network(orders), estimates)
        feasible = feasible | rescue
    rows = np.flatnonzero(feasible)
    if rows.size == 0:
        return None
    left = walk.usable[orders[rows]] - required[cuts[rows, :-1], cuts[rows, 1:]]
    target = instance.problem.request.target_decode_tpot_us
    costs = np.maximum(estimates[rows], 0)
    missed = (costs > target).astype(np.int64) if latencies else np.zeros(rows.size, dtype=np.int64)
    tail = (-left.sum(axis=1), -left.min(axis=1), costs, missed)
    order = np.lexsort(tail)
    leader = order[0]
    equal = [row for row in order if all(part[row] == part[leader] for part in tail)]
    ids = [node.node_id for node in instance.nodes]
    names, row = min((tuple(ids[node] for node in orders[rows[row]]), int(row)) for row in equal)
    candidate = Candidate(shape, names, tuple(int(cut) for cut in cuts[rows[row]]))
    rank: Rank = (
        int(missed[row]), int(costs[row]), -shape.context_length, -shape.lanes, size, -int(left[row].min()),
        -int(left[row].sum()), names,
    )  # fmt: skip
    return rank, candidate


def _may_reply(instance: Instance, orders: Matrix) -> Mask:
    """Rows whose last node may answer their first one (mode ``require``)."""
    ids = [node.node_id for node in instance.nodes]
    if instance.network.return_mode == "allow_fallback" or not instance.signals.return_refused:
        return np.ones(orders.shape[0], dtype=bool)
    return np.array([instance.network.allowed(tuple(ids[node] for node in row)) for row in orders], dtype=bool)


def _hopeless(walk: CapacityWalk, size: int, required: Matrix) -> bool:
    """No subset of ``size`` can fit: too little memory in total, or not even the largest nodes in capacity order.

    The second holds because a larger node reaches at least as far, unless the operator limits layers or picks nodes.
    """
    if int(walk.usable[:size].sum()) < int(required[0, -1]):
        return True
    request = walk.instance.problem.request
    if request.require_nodes or request.pin_stage0 is not None or walk.limits.min() < walk.instance.layer_count:
        return False
    _, feasible = walk.cuts(np.arange(size, dtype=np.int64)[None, :], required)
    return not feasible[0] and not walk.instance.signals.edges


def _orders(walk: CapacityWalk, size: int, links: EdgeOrders | None) -> tuple[Matrix, Matrix]:
    """Node orders of every subset of ``size`` that respects the operator, with their network estimates (µs)."""
    if size in walk.known:
        return walk.known[size]
    instance = walk.instance
    subsets = subsets_of(instance, size, None if links is None else links.nodes)
    if links is not None:
        orders = links.orders(subsets)
        walk.known[size] = orders, links.network(orders)
        return walk.known[size]
    rtts = np.array(
        [instance.signals.nodes[node.node_id].coordinator_rtt_us or 0 for node in instance.nodes], dtype=np.int64
    )
    orders = _pinned_first(instance, subsets)
    walk.known[size] = orders, rtts[orders].max(axis=1, initial=0) * size
    return walk.known[size]


def subsets_of(instance: Instance, size: int, pool: tuple[int, ...] | None = None) -> Matrix:
    """Index subsets of ``size`` in capacity order that contain every wanted node; at most about ``SUBSET_LIMIT``."""
    request = instance.problem.request
    ids = [node.node_id for node in instance.nodes]
    wanted = [
        index for index, node_id in enumerate(ids) if node_id in request.require_nodes or node_id == request.pin_stage0
    ]
    others = [index for index in (range(len(ids)) if pool is None else pool) if index not in wanted]
    free = size - len(wanted)
    if free < 0 or size > len(ids):
        return np.zeros((0, size), dtype=np.int64)
    if free > len(others):
        # more stages than are ordered exactly: the nodes with the most memory
        others = [index for index in range(len(ids)) if index not in wanted][:free]
    while comb(len(others), free) > SUBSET_LIMIT:
        others.pop()
    rows = [sorted((*wanted, *chosen)) for chosen in combinations(others, free)]
    return np.array(rows, dtype=np.int64).reshape(len(rows), size)


def _pinned_first(instance: Instance, orders: Matrix) -> Matrix:
    pin = instance.problem.request.pin_stage0
    if pin is None:
        return orders
    index = [node.node_id for node in instance.nodes].index(pin)
    moved = np.argsort(orders != index, axis=1, kind="stable")
    pinned: Matrix = np.take_along_axis(orders, moved, axis=1)
    return pinned


def _least_estimate(instance: Instance, size: int, links: EdgeOrders | None) -> int:
    """No subset of ``size`` has a smaller network estimate."""
    if links is not None:
        return links.least(size)
    rtts = sorted(instance.signals.nodes[node.node_id].coordinator_rtt_us or 0 for node in instance.nodes)
    return size * rtts[size - 1]
