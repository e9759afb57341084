"""Large fleets: which nodes are worth ordering exactly, and a lower bound over all of them.

The head-free walk (``bounds``) prices the whole fleet in a few rounds. Its value is the certificate's lower bound; the
nodes its walks visit, wanted nodes, and the best of the rest by bandwidth × memory form the shortlist.
"""

from dataclasses import dataclass, field

import numpy as np

from coordinator.planner.bounds import price_nodes
from coordinator.planner.cost import Matrix
from coordinator.planner.instance import Instance
from coordinator.planner.memory import Shape
from coordinator.planner.span_costs import INFINITE, HopArrays, SpanCosts

SHORTLIST_NODES = 40
PAIR_ROUNDS = 8_000_000
"""Pricing rounds are this over the number of node pairs, at least ``LEAST_ROUNDS``: a round looks at every pair."""
LEAST_ROUNDS = 6
MOST_ROUNDS = 60


@dataclass
class Shortlist:
    """``chosen`` are positions in the full tables, ascending; ``lower`` bounds every plan of the whole fleet."""

    instance: Instance
    spans: SpanCosts
    modes: tuple[HopArrays, ...]
    chosen: tuple[int, ...]
    visits: Matrix
    known: dict[Shape, int] = field(default_factory=dict)
    prices: dict[str, Matrix] = field(default_factory=dict)

    def lower(self, shape: Shape) -> int:
        """Scaled lower bound at ``shape``."""
        if shape not in self.known:
            cost = self.spans.at(self.instance, shape)
            self.known[shape] = min(self._bound(mode, cost) for mode in self.modes)
        return self.known[shape]

    def _bound(self, mode: HopArrays, cost: Matrix) -> int:
        known = self.prices.get(mode.mode)
        rounds = _rounds(cost.shape[0]) if known is None else 1
        priced = price_nodes(cost, mode, INFINITE, rounds, known)
        self.prices[mode.mode] = priced.prices
        self.visits += priced.visits
        return priced.bound


def shortlist(instance: Instance, spans: SpanCosts, modes: tuple[HopArrays, ...]) -> Shortlist:
    """Choose the nodes. The shape with the least memory is priced, since its bound holds for all others."""
    request = instance.problem.request
    native = instance.problem.model.native_context_length
    context = request.context_length or min(native, 65_536)
    shape = Shape(context, request.parallel_lanes or 1)
    found = Shortlist(instance, spans, modes, (), np.zeros(len(spans.ids), dtype=np.int64))
    found.lower(shape)
    wanted = set(request.require_nodes) | {request.pin_stage0}
    rate = np.where(spans.base[:, 0, -1] < INFINITE, spans.base[:, 0, -1], INFINITE)[spans.group]
    appeal = spans.usable / np.maximum(1, rate)
    ranked = sorted(
        range(len(spans.ids)),
        key=lambda index: (spans.ids[index] not in wanted, -int(found.visits[index]), -float(appeal[index]), index),
    )
    found.chosen = tuple(sorted(ranked[:SHORTLIST_NODES]))
    return found


def _rounds(nodes: int) -> int:
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, PAIR_ROUNDS // (nodes * nodes)))
