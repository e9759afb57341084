"""Large fleets: which nodes are worth ordering exactly, and a lower bound over all the others.

The head-free walk (``bounds``) prices the whole fleet in a few rounds; joined forwards and backwards it bounds every
plan that uses a given node. The nodes with the least bounds, and wanted ones, form the shortlist; the least bound among
the rest is what the certificate owes them. With good prices it exceeds the plan found, and the fleet's optimum is proven.
"""

from dataclasses import dataclass, field

import numpy as np

from coordinator.planner.bounds import node_bounds, price_nodes
from coordinator.planner.cost import Matrix
from coordinator.planner.instance import Instance
from coordinator.planner.memory import Shape, minimum_context
from coordinator.planner.span_costs import INFINITE, HopArrays, SpanCosts, required_matrix

SHORTLIST_NODES = 32
PAIR_ROUNDS = 120_000
"""Pricing rounds are this over the number of node pairs: a round looks at every pair."""
LEAST_ROUNDS = 6
MOST_ROUNDS = 32


@dataclass
class Shortlist:
    """``chosen`` are positions in the full tables, ascending; every plan with another node costs at least ``outside``.

    The bounds are those of the shape with the least memory, which hold for every other shape.
    """

    cost: Matrix
    modes: tuple[HopArrays, ...]
    wanted: Matrix
    chosen: tuple[int, ...] = ()
    outside: int = 0
    prices: dict[str, Matrix] = field(default_factory=dict)

    def price(self, upper: int = INFINITE) -> Matrix:
        """More pricing rounds, aimed at ``upper``; raises ``outside`` when nodes are chosen. Returns every node's bound."""
        nodes = self.cost.shape[0]
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, PAIR_ROUNDS // (nodes * nodes)))
        bounds: Matrix = np.full(nodes, INFINITE, dtype=np.int64)
        for mode in self.modes:
            priced = price_nodes(self.cost, mode, upper, rounds, self.prices.get(mode.mode))
            self.prices[mode.mode] = priced.prices
            bounds = np.minimum(bounds, node_bounds(self.cost, mode, priced.prices))
        if self.chosen:
            others = np.delete(bounds, np.array(self.chosen))
            self.outside = max(self.outside, int(others.min()))
        return bounds


def shortlist(instance: Instance, spans: SpanCosts, modes: tuple[HopArrays, ...]) -> Shortlist:
    """Price the fleet and choose."""
    request = instance.problem.request
    context = request.context_length or minimum_context(instance.problem.model.native_context_length)
    required = required_matrix(instance, Shape(context, request.parallel_lanes or 1))
    names = set(request.require_nodes) | {request.pin_stage0}
    wanted = np.array([node_id in names for node_id in spans.ids])
    fleet = Shortlist(spans.at(required), modes, wanted)
    bounds = fleet.price()
    ranked = sorted(range(len(spans.ids)), key=lambda index: (not wanted[index], int(bounds[index]), index))
    fleet.chosen = tuple(sorted(ranked[:SHORTLIST_NODES]))
    fleet.outside = int(np.delete(bounds, np.array(fleet.chosen)).min())
    return fleet
