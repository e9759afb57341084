"""Lower bounds for the ordered search: walks that may visit a node again, with a price on every visit.

Dropping "each node at most once" turns the best completion into a shortest walk over (node, layer), which one backward
pass over the layers solves exactly, hops, cuts, memory and the reply included. Charging a price λₙ ≥ 0 per visit and
refunding it once per unused node keeps the value a lower bound for any prices (Lagrangian relaxation), and good prices
make it tight: a walk that would use the fastest node three times pays for it. Prices stay valid for every shape.

``gin[f, n, b]`` bounds the cost of everything from layer b on, given that n's own stage starts there and f leads the
plan. A partial plan with cost u at (n, b) costs at least ``u + gin[f, n, b] − Σ λ over the nodes it has not used``.
"""

from dataclasses import dataclass

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.span_costs import HOPELESS, INFINITE, HopArrays

LAYER_WORK = 2_500
"""What one layer of a pass costs whatever its size, in elements."""
STALL_ROUNDS = 4
LEAST_PACE = 0.02
UNREACHED = 2**52
"""An upper bound from here on is no plan's cost: the ascent then aims 20 % above its own bound."""
PRICE_LIMIT = INFINITE >> 12
"""Keeps the sum of all prices far below ``INFINITE``."""


@dataclass(frozen=True)
class WalkBounds:
    """Completion bounds of one shape and reply mode."""

    gin: Matrix
    prices: Matrix


def walk_bounds(cost: Matrix, hops: HopArrays, prices: Matrix) -> WalkBounds:
    """The full table, one layer of start nodes per backward step. Values at or above ``INFINITE`` mean "cannot"."""
    nodes, count = cost.shape[0], cost.shape[1]
    last = count - 1
    gin: Matrix = np.full((nodes, nodes, count), INFINITE, dtype=np.int64)
    # follow[f, n, c]: best continuation once n's stage has ended at layer c
    follow: Matrix = np.full((nodes, nodes, count), INFINITE, dtype=np.int64)
    follow[:, :, last] = hops.final.T
    arc = hops.arc + prices[None, None, :]
    head = np.arange(nodes)
    for layer in range(last - 1, -1, -1):
        ends = slice(layer + 1, count)
        best = (cost[None, :, layer, ends] + follow[:, :, ends]).min(axis=2)
        gin[:, :, layer] = np.where(best >= HOPELESS, INFINITE, best)
        if layer:
            onward = best.copy()
            onward[head, head] = INFINITE  # the head never comes back
            follow[:, :, layer] = np.minimum((arc + onward[:, None, :]).min(axis=2), INFINITE)
    return WalkBounds(gin, prices)


@dataclass
class Pricing:
    """Outcome of an ascent: the best prices, the scaled lower bound they give for the whole problem, the work done."""

    prices: Matrix
    bound: int
    work: int


def price_nodes(cost: Matrix, hops: HopArrays, upper: int, rounds: int, known: Matrix | None = None) -> Pricing:
    """Prices by subgradient ascent on the head-free walk, and the lower bound they give for the whole problem.

    ``known`` prices of a similar problem are the start. Steps aim at ``upper``; the ascent ends when the bound reaches
    it, when the walk uses every node at most once, or after ``rounds``.
    """
    nodes = cost.shape[0]
    arc, reply = _head_free(hops)
    prices = np.zeros(nodes) if known is None else known.astype(np.float64)
    best_prices, best_bound, pace, stalled = prices.astype(np.int64), -1, 1.0, 0
    single = int((cost[:, 0, -1] + np.diagonal(hops.final)).min())
    work = 0
    for _ in range(rounds):
        work += walk_work(nodes, cost.shape[1])
        current = prices.astype(np.int64)
        value, visits = _cheapest_walk(cost, arc + current[None, :], reply, current)
        # a single stage pays no reply and its node's price is refunded at once, so it bounds on its own
        bound = min(single, value - int(current.sum()) if value < HOPELESS else INFINITE)
        stalled += 1
        if bound > best_bound:
            best_bound, best_prices, stalled = bound, current, 0
        if stalled == STALL_ROUNDS:
            pace, stalled = pace / 2, 0
        excess = visits - 1
        moving = (excess > 0) | (prices > 0)
        norm = float((excess * excess)[moving].sum())
        if bound >= min(upper, single) or norm == 0 or pace < LEAST_PACE:
            break
        aim = upper if upper < UNREACHED else bound + bound // 5
        step = pace * (aim - bound) / norm
        prices = np.maximum(0.0, prices + step * np.where(moving, excess, 0))
        prices = np.minimum(prices, float(PRICE_LIMIT))
    return Pricing(best_prices, min(best_bound, INFINITE), work)


def walk_work(nodes: int, count: int) -> int:
    """Elements touched by one backward pass, the calls of every layer included."""
    return count * (LAYER_WORK + nodes * count // 2 + 2 * nodes * nodes)


def node_bounds(cost: Matrix, hops: HopArrays, prices: Matrix) -> Matrix:
    """Per node, a lower bound (scaled) on every plan that uses it: its best priced walk, forwards and backwards joined."""
    nodes, count = cost.shape[0], cost.shape[1]
    arc, reply = _head_free(hops)
    arc = arc + prices[None, :]
    ahead, _ = _backward(cost, arc, reply)
    behind: Matrix = np.full((nodes, count), INFINITE, dtype=np.int64)
    behind[:, 0] = prices
    for layer in range(1, count - 1):
        closed = (behind[:, :layer] + cost[:, :layer, layer]).min(axis=1)
        behind[:, layer] = np.minimum((closed[:, None] + arc).min(axis=0), INFINITE)
    joined = (behind + ahead).min(axis=1)
    joined = np.where(joined >= HOPELESS, INFINITE, joined - int(prices.sum()))
    alone = cost[:, 0, -1] + np.diagonal(hops.final)
    bounds: Matrix = np.minimum(joined, alone)
    return bounds


def _head_free(hops: HopArrays) -> tuple[Matrix, Matrix]:
    """Hops and reply with the head left open: the cheapest over all heads."""
    reply = hops.final.copy()
    np.fill_diagonal(reply, INFINITE)
    return hops.arc.min(axis=0), reply.min(axis=1)


def _backward(cost: Matrix, arc: Matrix, reply: Matrix) -> tuple[Matrix, Matrix]:
    """Cheapest completion per (node, layer): with the node's stage starting there, and after it has ended there."""
    nodes, count = cost.shape[0], cost.shape[1]
    last = count - 1
    ahead: Matrix = np.full((nodes, count), INFINITE, dtype=np.int64)
    follow: Matrix = np.full((nodes, count), INFINITE, dtype=np.int64)
    follow[:, last] = reply
    for layer in range(last - 1, -1, -1):
        best = (cost[:, layer, layer + 1 :] + follow[:, layer + 1 :]).min(axis=1)
        ahead[:, layer] = best
        if layer:
            np.minimum((arc + best).min(axis=1), INFINITE, out=follow[:, layer])
    return ahead, follow


def _cheapest_walk(cost: Matrix, arc: Matrix, reply: Matrix, prices: Matrix) -> tuple[int, Matrix]:
    """Value of the best priced walk over all layers, and how often it visits each node."""
    ahead, follow = _backward(cost, arc, reply)
    node, layer, last = int((ahead[:, 0] + prices).argmin()), 0, cost.shape[1] - 1
    value = int(ahead[node, 0] + prices[node])
    visits = np.zeros(cost.shape[0], dtype=np.int64)
    if value >= HOPELESS:
        return INFINITE, visits
    while True:
        visits[node] += 1
        layer += 1 + int((cost[node, layer, layer + 1 :] + follow[node, layer + 1 :]).argmin())
        if layer == last:
            return value, visits
        node = int((arc[node] + ahead[:, layer]).argmin())
