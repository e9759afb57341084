"""One shape solved: prices, bounds, a beam, then the proof; and what the shapes of one call share.

The node prices found at the first (smallest) shape start every later one, so most shapes are settled by their bound
alone. Fleets beyond ``SEARCH_NODES`` are searched on a shortlist; what the certificate says covers the whole fleet.
"""

from dataclasses import dataclass, field

import numpy as np

from coordinator.planner.bounds import price_nodes, walk_bounds
from coordinator.planner.cost import Matrix
from coordinator.planner.cuts import fixed_order
from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.memory import Shape
from coordinator.planner.ordered import search
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
from coordinator.planner.states import Budget, OrderedProblem, Outcome
from coordinator.planner.twins import twins_of

BEAM_WIDTH = 48
PRICE_ROUNDS = 80
REPRICE_ROUNDS = 16
SHARPEN_ROUNDS = 60
SEARCH_NODES = 40
"""Larger fleets are searched on a shortlist. (Used-node sets are bits of one int64: at most 62.)"""


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


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Scaled costs per node and span, and the bytes every span needs."""

    cost: Matrix
    required: Matrix


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
    minimum_stages: int
    fleet: Shortlist | None
    prices: dict[tuple[str, bool], Matrix] = field(default_factory=dict)

    def solve(self, shape: Shape, upper: int = INFINITE, *, period_us: int | None = None) -> Outcome:
        """Best plan of ``shape`` with scaled serial cost below ``upper`` over all reply modes.

        ``period_us`` bounds the pipelined period.
        """
        result = Outcome(INFINITE, INFINITE)
        for mode in self.modes:
            found = self._solve_mode(shape, mode, min(upper, result.best), period_us)
            if found.best < result.best:
                result.best, result.sequence, result.cuts = found.best, found.sequence, found.cuts
            result.lower = min(result.lower, found.lower)
        if self.fleet is not None:
            if self.fleet.outside < result.best < INFINITE:
                self.fleet.price(result.best)
            result.lower = min(result.lower, self.fleet.outside)
        return result

    def fewest(self, shape: Shape, upper: int, period_us: int) -> Outcome:
        """The plan below ``upper`` and within ``period_us`` with the fewest stages, then the least cost."""
        outcomes = [
            search(self.ordered(mode, self.costs(shape, mode, period_us), period_us), upper, self.budget, fewest=True)
            for mode in self.modes
        ]
        return min(outcomes, key=lambda outcome: (outcome.best >= INFINITE, len(outcome.sequence), outcome.best))

    def costs(self, shape: Shape, mode: HopArrays, period_us: int | None = None) -> SpanTable:
        """Span costs and memory of ``shape``, without spans that no successor could keep within the period."""
        required = required_matrix(self.instance, shape)
        cost = self.spans.at(required)
        if max(self.minimum_stages, self.must.bit_count()) > 1:
            cost[:, 0, -1] = INFINITE  # no single stage may even bound the others
        if period_us is not None:
            single = np.where(cost[:, 0, -1] <= period_us * SCALE + 1, cost[:, 0, -1], INFINITE)
            most = (period_us - _least_egress(mode)) * SCALE + 1
            cost = np.where(cost <= most[:, None, None], cost, INFINITE)
            cost[:, 0, -1] = single
        return SpanTable(cost, required)

    def ordered(
        self, mode: HopArrays, table: SpanTable, period_us: int | None = None, *, priced: bool = True
    ) -> OrderedProblem:
        """The search problem of one mode under the prices known so far, or under none."""
        known = self.prices.get((mode.mode, period_us is not None)) if priced else None
        nodes, count = table.cost.shape[0], table.cost.shape[1]
        self.budget.charge(count * (nodes * nodes * count // 2 + nodes**3))
        prices = np.zeros(len(self.spans.ids), dtype=np.int64) if known is None else known
        return OrderedProblem(
            cost=table.cost,
            hops=mode,
            bounds=walk_bounds(table.cost, mode, prices),
            twins=self.twins,
            starts=self.starts,
            usable=self.spans.usable,
            suffix=table.required[:, -1].copy(),
            must=self.must,
            minimum_stages=self.minimum_stages,
            period_limit_us=period_us,
        )

    def candidate(self, shape: Shape, outcome: Outcome) -> Candidate:
        """The outcome with node ids."""
        return Candidate(shape, tuple(self.spans.ids[index] for index in outcome.sequence), outcome.cuts)

    def _solve_mode(self, shape: Shape, mode: HopArrays, upper: int, period_us: int | None) -> Outcome:
        key, table = (mode.mode, period_us is not None), self.costs(shape, mode, period_us)
        known, first = self.prices.get(key), Outcome(INFINITE, 0)
        if known is None:
            # a plan found without prices gives the prices a value to aim at
            first = self._beam(self.ordered(mode, table, period_us, priced=False), upper)
            if first.best >= INFINITE and first.lower >= upper:
                return Outcome(INFINITE, first.lower)
            running = self._running(mode, table) if period_us is None else first
            first = running if running.best < min(first.best, upper) else first
        aim = min(upper, first.best)
        priced = price_nodes(table.cost, mode, aim, PRICE_ROUNDS if known is None else REPRICE_ROUNDS, known)
        self.budget.charge(priced.work)
        if known is None or priced.bound < aim:
            self.prices[key] = priced.prices
        if priced.bound >= aim:
            return Outcome(first.best, priced.bound, first.sequence, first.cuts)
        problem = self.ordered(mode, table, period_us)
        beam = self._beam(problem, aim)
        best = beam if beam.best < first.best else first
        if best.best < INFINITE and priced.bound * 1_000 < best.best * 995:
            # the bound is loose: aim again, now at a plan that is probably the best
            priced = price_nodes(table.cost, mode, best.best, SHARPEN_ROUNDS, priced.prices)
            self.budget.charge(priced.work)
            if known is None:
                self.prices[key] = priced.prices
            problem = self.ordered(mode, table, period_us)
        proof = search(problem, min(aim, beam.best), self.budget)
        best = proof if proof.best < best.best else best
        return Outcome(best.best, min(proof.lower, best.best), best.sequence, best.cuts)

    def _running(self, mode: HopArrays, table: SpanTable) -> Outcome:
        """The order that runs now, cut anew, where it is still possible: a first plan, better or not."""
        wanted = self.instance.problem.request.incumbent
        if not wanted or not set(wanted) <= set(self.spans.ids) or len(set(wanted)) != len(wanted):
            return Outcome(INFINITE, 0)
        sequence = tuple(self.spans.ids.index(node_id) for node_id in wanted)
        used = sum(1 << node for node in sequence)
        if len(sequence) < self.minimum_stages or used & self.must != self.must or sequence[0] not in self.starts:
            return Outcome(INFINITE, 0)
        order = fixed_order(table.cost, mode, sequence)
        best = order.best()
        return Outcome(best, 0, sequence, order.cuts()) if best < INFINITE else Outcome(INFINITE, 0)

    def _beam(self, problem: OrderedProblem, upper: int) -> Outcome:
        return search(problem, upper, self.budget, width=BEAM_WIDTH)


def _least_egress(mode: HopArrays) -> Matrix:
    """The cheapest hop (µs) over which each node can leave, as a middle stage or as the last one."""
    middle = np.where(mode.arc < INFINITE, mode.egress, INFINITE).min(axis=(0, 2))
    last = mode.last_egress.copy()
    np.fill_diagonal(last, INFINITE)
    least = np.minimum(middle, last.min(axis=1))
    return np.where(least < INFINITE, least, 0)


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
        modes = tuple(mode.take(fleet.chosen) for mode in modes)
    return Searcher(
        instance=instance,
        budget=budget,
        spans=spans,
        modes=modes,
        twins=twins_of(instance, ids, modes),
        starts=tuple(range(len(ids))) if request.pin_stage0 is None else (ids.index(request.pin_stage0),),
        must=sum(1 << ids.index(node_id) for node_id in request.require_nodes),
        minimum_stages=max(1, request.minimum_nodes),
        fleet=fleet,
    )
