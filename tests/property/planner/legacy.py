"""Capacity-only placement written as plainly as the design states it, for comparison."""

from itertools import combinations, pairwise, permutations

from coordinator.planner.problem import PlanningProblem
from tests.property.planner.oracle import Oracle

UNKNOWN_US = 10_000_000


def legacy_choice(problem: PlanningProblem):
    """(context, lanes, ids, cuts) of the legacy choice without links, or ``None``."""
    oracle, request = Oracle(problem), problem.request
    ranked = sorted(
        (name for name in oracle.nodes if oracle.usable(name)), key=lambda name: (-oracle.usable(name), name)
    )
    shapes = oracle.shapes()
    rtts = {name: oracle.nodes[name].coordinator_rtt_us for name in ranked}
    latencies = any(rtt is not None for rtt in rtts.values())
    best = None
    for context in dict.fromkeys(context for context, _ in shapes):
        for size in range(max(1, request.minimum_nodes), min(len(ranked), oracle.layers) + 1):
            for lanes in [lanes for each, lanes in shapes if each == context]:
                for chosen in combinations(ranked, size):
                    subset = chosen
                    if not request.require_nodes <= set(subset):
                        continue
                    if request.pin_stage0 is not None:
                        if request.pin_stage0 not in subset:
                            continue
                        subset = (request.pin_stage0, *(name for name in chosen if name != request.pin_stage0))
                    cuts = greedy(oracle, subset, context, lanes)
                    if cuts is None:
                        continue
                    left = [
                        oracle.usable(name) - oracle.required(start, end, context, lanes)
                        for name, start, end in zip(subset, cuts, cuts[1:], strict=False)
                    ]
                    estimate = size * max((rtts[name] or 0) for name in subset) if latencies else 0
                    missed = latencies and estimate > request.target_decode_tpot_us
                    shape = (size, -lanes) if not latencies else (-lanes, size)
                    key = (missed, estimate, -context, *shape, -min(left), -sum(left), subset)
                    if best is None or key < best[0]:
                        best = key, (context, lanes, subset, cuts)
    return None if best is None else best[1]


def greedy(oracle: Oracle, order: tuple[str, ...], context: int, lanes: int) -> tuple[int, ...] | None:
    """Each node takes as many layers as fit, leaving one legal piece for each later node."""
    forbidden = {cut.layer for cut in oracle.model.forbidden_boundaries}
    legal = [cut for cut in range(oracle.layers + 1) if cut not in forbidden]
    cuts = [0]
    for index, name in enumerate(order):
        later = len(order) - 1 - index
        if later >= len(legal):
            return None
        most = legal[len(legal) - 1 - later]
        limit = oracle.nodes[name].max_layers
        fitting = [
            end
            for end in legal
            if cuts[-1] < end <= most
            and (limit is None or end - cuts[-1] <= limit)
            and oracle.required(cuts[-1], end, context, lanes) <= oracle.usable(name)
        ]
        if not fitting or (later == 0 and max(fitting) != oracle.layers):
            return None
        cuts.append(max(fitting))
    return tuple(cuts)


def cheapest_order_cost(problem: PlanningProblem, names: tuple[str, ...]) -> int:
    """Least sum of adjacent directed hop costs over all orders of ``names``."""
    oracle = Oracle(problem)
    frame = problem.model.activation_frame_bytes + problem.model.required_sideband_bytes
    orders = permutations(names)
    if problem.request.pin_stage0 is not None:
        orders = (order for order in orders if order[0] == problem.request.pin_stage0)
    return min(order_cost(oracle, order, frame) for order in orders)


def order_cost(oracle: Oracle, order: tuple[str, ...], frame: int) -> int:
    hops = [oracle.hop(a, b, frame) for a, b in pairwise(order)]
    return sum(UNKNOWN_US if hop is None else hop for hop in hops)
