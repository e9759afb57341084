"""One shape solved: prices, bounds, a beam, then the proof; and what the shapes of one call share.

The node prices found at the first (smallest) shape start every later one, so most shapes are settled by their bound
alone. Fleets beyond ``SEARCH_NODES`` are searched on a shortlist, the nodes that the priced walks over the *whole* fleet
use plus the fastest and largest others; the lower bound still comes from the whole fleet.
"""

from dataclasses import dataclass, field

import numpy as np

from coordinator.planner.bounds import price_nodes, walk_bounds
from coordinator.planner.cost import Matrix
from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.memory import Shape
from coordinator.planner.ordered import Budget, OrderedProblem, Outcome, search
from coordinator.planner.shortlist import Shortlist, shortlist
from coordinator.planner.span_costs import (
    INFINITE,
    SCALE,
    HopArrays,
    SpanCosts,
    hop_arrays,
    required_matrix,
    span_costs,
)
from coordinator.planner.twins import twins_of

BEAM_WIDTH = 48
PRICE_ROUNDS = 80
REPRICE_ROUNDS = 24
SEARCH_NODES = 62
"""Used-node sets are bits of one int64."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement with its certificate: no plan of its shape has a value (µs) below ``lower_us``."""

    candidate: Candidate
    value_us: int
    lower_us: int

    @property
    def proven(self) -> bool:
        """No plan of this shape is better."""
        return self.lower_us >= self.value_us

    @property
    def gap(self) -> float:
        """(value − lower) / lower."""
        return 0.0 if self.proven else (self.value_us - self.lower_us) / max(1, self.lower_us)


@dataclass
class Searcher:
    """Solves shapes of one instance. Stateful only in prices and budget, both deterministic."""

    instance: Instance
    budget: Budget
    spans: SpanCosts
    modes: tuple[HopArrays, ...]
    twins: Matrix
    starts: tuple[int, ...]
    must: int
    fleet: Shortlist | None
    prices: dict[tuple[str, bool], Matrix] = field(default_factory=dict)

    def solve(
        self, shape: Shape, upper: int = INFINITE, *, period_us: int | None = None, fewest: bool = False
    ) -> Outcome:
        """Best plan of ``shape`` with scaled serial cost below ``upper`` over all reply modes.

        ``period_us`` bounds the pipelined period; ``fewest`` asks for the fewest stages before the least cost.
        """
        result = Outcome(INFINITE, INFINITE)
        for mode in self.modes:
            found = self._solve_mode(shape, mode, min(upper, result.best), period_us, fewest=fewest)
            if found.best < result.best:
                result.best, result.sequence, result.cuts = found.best, found.sequence, found.cuts
            result.lower = min(result.lower, found.lower)
        if self.fleet is not None:
            result.lower = min(result.lower, self.fleet.lower(shape))
        return result

    def ordered(
        self, shape: Shape, mode: HopArrays, period_us: int | None = None, *, free: bool = False
    ) -> OrderedProblem:
        """The search problem of one shape and mode under the prices known so far (none with ``free``)."""
        cost = self.spans.at(self.instance, shape)
        if period_us is not None:
            # whatever follows, a stage leaves over its cheapest hop
            least = np.where(mode.arc.min(axis=0) < INFINITE, mode.egress.min(axis=0), INFINITE).min(axis=1)
            slack = np.where(least < INFINITE, np.minimum(least, self._least_last(mode)), 0)
            most = np.maximum(period_us - slack, -1) * SCALE + 1
            single = cost[:, 0, -1].copy()
            cost = np.where(cost <= most[:, None, None], cost, INFINITE)
            cost[:, 0, -1] = np.where(single <= period_us * SCALE + 1, single, INFINITE)
        known = self.prices.get((mode.mode, period_us is not None))
        prices = np.zeros(cost.shape[0], dtype=np.int64) if free or known is None else known
        required = required_matrix(self.instance, shape)
        return OrderedProblem(
            cost=cost,
            hops=mode,
            bounds=walk_bounds(cost, mode, prices),
            twins=self.twins,
            starts=self.starts,
            usable=self.spans.usable,
            suffix=required[:, -1].copy(),
            must=self.must,
            minimum_stages=max(1, self.instance.problem.request.minimum_nodes),
            period_limit_us=period_us,
        )

    def candidate(self, shape: Shape, outcome: Outcome) -> Candidate:
        """The outcome with node ids."""
        return Candidate(shape, tuple(self.spans.ids[index] for index in outcome.sequence), outcome.cuts)

    def _solve_mode(self, shape: Shape, mode: HopArrays, upper: int, period_us: int | None, *, fewest: bool) -> Outcome:
        key = (mode.mode, period_us is not None)
        first, problem = Outcome(INFINITE, 0), None
        if key not in self.prices:
            # a plan found without prices gives the prices a value to aim at
            problem = self.ordered(shape, mode, period_us, free=True)
            first = self._beam(problem, upper, fewest=fewest)
            if first.best >= INFINITE and first.lower >= upper:
                return Outcome(INFINITE, first.lower)
        aim = min(upper, first.best)
        cost = self.spans.at(self.instance, shape) if problem is None else problem.cost
        if problem is None and period_us is not None:
            cost = self.ordered(shape, mode, period_us).cost
        rounds = REPRICE_ROUNDS if key in self.prices else PRICE_ROUNDS
        priced = price_nodes(cost, mode, aim, rounds, self.prices.get(key))
        if priced.bound >= aim:
            self.prices.setdefault(key, priced.prices)
            return Outcome(first.best, priced.bound, first.sequence, first.cuts)
        self.prices[key] = priced.prices
        problem = self.ordered(shape, mode, period_us)
        beam = self._beam(problem, aim, fewest=fewest)
        best = beam if beam.best < first.best else first
        proof = search(problem, min(aim, beam.best), self.budget, fewest=fewest)
        best = proof if proof.best < best.best else best
        return Outcome(best.best, min(proof.lower, best.best), best.sequence, best.cuts)

    def _beam(self, problem: OrderedProblem, upper: int, *, fewest: bool) -> Outcome:
        return search(problem, upper, self.budget.aside(), width=BEAM_WIDTH, fewest=fewest)

    def _least_last(self, mode: HopArrays) -> Matrix:
        off = mode.last_egress.copy()
        np.fill_diagonal(off, INFINITE)
        least: Matrix = off.min(axis=1)
        return least


def searcher_for(instance: Instance, budget: Budget, *, pessimistic: bool = False) -> Searcher | None:
    """``None`` when no modelled plan can respect the operator's wishes (a wanted node has no bandwidth)."""
    ids = tuple(node.node_id for node in instance.nodes if instance.times[node.node_id] is not None)
    request = instance.problem.request
    wanted = set(request.require_nodes) | ({request.pin_stage0} if request.pin_stage0 else set())
    if not ids or not wanted <= set(ids):
        return None
    spans, fleet = span_costs(instance, ids), None
    modes = hop_arrays(instance.network, ids, pessimistic=pessimistic)
    if len(ids) > SEARCH_NODES:
        fleet = shortlist(instance, spans, modes)
        spans = spans.take(fleet.chosen)
        ids = spans.ids
        modes = hop_arrays(instance.network, ids, pessimistic=pessimistic)
    return Searcher(
        instance=instance,
        budget=budget,
        spans=spans,
        modes=modes,
        twins=twins_of(instance, ids, modes),
        starts=tuple(range(len(ids))) if request.pin_stage0 is None else (ids.index(request.pin_stage0),),
        must=sum(1 << ids.index(node_id) for node_id in request.require_nodes),
        fleet=fleet,
    )
