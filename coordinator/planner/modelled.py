"""Choosing among placements whose decode time is modelled: every node has a bandwidth, every hop an RTT.

Memory is the only thing a shape changes, so a smaller shape (context and lanes) admits every plan of a larger one.
The smallest shape is therefore solved first: its optimum bounds all others, and its node prices and bounds serve them.
Steps 2–4 of the comparison then read: if that optimum meets the target, only plans that meet it count; values within
``objective_tolerance`` of it count as equal; of the shapes that reach such a value the one with the largest context,
then the most lanes, wins, and gives its own best plan.
"""

from dataclasses import dataclass, field

from coordinator.planner.bounds import price_nodes, walk_bounds
from coordinator.planner.cost import Matrix
from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.memory import Shape
from coordinator.planner.ordered import Budget, OrderedProblem, Outcome, search
from coordinator.planner.span_costs import INFINITE, SCALE, HopArrays, SpanCosts, hop_arrays, span_costs
from coordinator.planner.twins import twins_of

BEAM_WIDTH = 48


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement with its certificate: ``lower`` bounds the chosen value (µs) from below within its shape."""

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
    """Everything that the shapes of one call share."""

    instance: Instance
    budget: Budget
    spans: SpanCosts
    modes: tuple[HopArrays, ...]
    twins: Matrix
    starts: tuple[int, ...]
    must: int
    minimum_stages: int
    prices: dict[str, Matrix] = field(default_factory=dict)

    def problem(self, mode: HopArrays, cost: Matrix, upper: int) -> tuple[OrderedProblem | None, int]:
        """The ordered problem of one shape and mode, or ``None`` with a bound that already reaches ``upper``."""
        prices = self.prices.get(mode.mode)
        found, bound = (
            price_nodes(cost, mode, upper, rounds=24 if prices is None else 1) if prices is None else (prices, 0)
        )
        self.prices[mode.mode] = found
        if bound >= upper:
            return None, bound
        bounds = walk_bounds(cost, mode, found)
        return (
            OrderedProblem(cost, mode, bounds, self.twins, self.starts, self.must, self.minimum_stages),
            bound,
        )

    def solve(self, shape: Shape, upper: int = INFINITE) -> Outcome:
        """Best plan of ``shape`` with scaled cost below ``upper`` over all reply modes."""
        cost = self.spans.at(self.instance, shape)
        result = Outcome(INFINITE, INFINITE)
        for mode in self.modes:
            problem, bound = self.problem(mode, cost, min(upper, 2**52))
            if problem is None:
                result.lower = min(result.lower, bound)
                continue
            beam = search(problem, upper, Budget(10**9), width=BEAM_WIDTH)
            proof = search(problem, min(upper, beam.best), self.budget)
            better = proof if proof.best < beam.best else beam
            lower = min(proof.lower, better.best)
            if better.best < result.best:
                result.best, result.sequence, result.cuts = better.best, better.sequence, better.cuts
                upper = min(upper, better.best)
            result.lower = min(result.lower, lower)
        return result

    def choice(self, shape: Shape, outcome: Outcome) -> Choice:
        """The outcome in the caller's terms."""
        ids = tuple(self.spans.ids[index] for index in outcome.sequence)
        return Choice(
            Candidate(shape, ids, outcome.cuts), outcome.best // SCALE, min(outcome.best, outcome.lower) // SCALE
        )


def searcher_for(instance: Instance, budget: Budget, *, pessimistic: bool = False) -> Searcher | None:
    """``None`` when no modelled plan can respect the operator's wishes (a wanted node has no bandwidth)."""
    ids = tuple(node.node_id for node in instance.nodes if instance.times[node.node_id] is not None)
    request = instance.problem.request
    wanted = set(request.require_nodes) | ({request.pin_stage0} if request.pin_stage0 else set())
    if not ids or not wanted <= set(ids):
        return None
    modes = hop_arrays(instance.network, ids, pessimistic=pessimistic)
    starts = tuple(range(len(ids))) if request.pin_stage0 is None else (ids.index(request.pin_stage0),)
    return Searcher(
        instance=instance,
        budget=budget,
        spans=span_costs(instance, ids),
        modes=modes,
        twins=twins_of(instance, ids, modes),
        starts=starts,
        must=sum(1 << ids.index(node_id) for node_id in request.require_nodes),
        minimum_stages=max(1, request.minimum_nodes),
    )


def choose_interactive(searcher: Searcher, shapes: tuple[Shape, ...]) -> Choice | None:
    """The winner over all shapes, or ``None`` when no modelled plan is feasible."""
    request = searcher.instance.problem.request
    smallest = min(shapes, key=lambda shape: (shape.context_length, shape.lanes))
    best = searcher.solve(smallest)
    if best.best >= INFINITE:
        return None
    value = best.best // SCALE
    ceiling = value * (1_000 + request.objective_tolerance_milli) // 1_000
    if value <= request.target_decode_tpot_us:
        preferred = request.target_decode_tpot_us if request.prefer == "context" else ceiling
        ceiling = min(preferred, request.target_decode_tpot_us)
    for shape in shapes:
        if shape == smallest:
            break
        found = searcher.solve(shape, (ceiling + 1) * SCALE)
        if found.best < INFINITE:
            return searcher.choice(shape, found)
    return searcher.choice(smallest, best)
