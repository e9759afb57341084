"""The exhaustive oracle: every subset, order, cut and shape, priced by formulas written anew from the design text.

Nothing here is shared with the planner except the problem's own dataclasses. It is slow and plain on purpose.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise, permutations
from math import ceil

from coordinator.planner.problem import PlanningProblem

MET, MISSED = 0, 1


@dataclass(frozen=True)
class Found:
    """One feasible plan with everything that decides between plans."""

    context: int
    lanes: int
    order: tuple[str, ...]
    cuts: tuple[int, ...]
    tpot: int
    period: int
    least_left: int
    total_left: int

    @property
    def stages(self) -> int:
        return len(self.order)


class Oracle:
    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.model, self.request, self.calibration = problem.model, problem.request, problem.calibration
        self.nodes = {
            node.node_id: node for node in problem.participants if node.node_id not in self.request.exclude_nodes
        }
        self.edges = {(edge.source, edge.target): edge for edge in problem.edges}
        self.layers = len(self.model.layers)
        self.stage_cache: dict[tuple[str, int, int], int] = {}
        self.hop_cache: dict[tuple[str, str, int], int | None] = {}

    # memory -------------------------------------------------------------------------------------------------------
    def usable(self, name: str) -> int:
        node = self.nodes[name]
        headroom = ceil(Fraction(node.detected_memory_bytes, 10))
        if node.runtime_headroom_bytes is not None:
            headroom = node.runtime_headroom_bytes
        cap = node.detected_memory_bytes if node.operator_cap_bytes is None else node.operator_cap_bytes
        return max(0, min(node.detected_memory_bytes, cap) - headroom)

    def required(self, start: int, end: int, context: int, lanes: int) -> int:
        total = 0
        for layer in self.model.layers[start:end]:
            copies = lanes if self.request.kv_cache == "per_lane" else 1
            tokens = context if layer.kv_window_tokens is None else min(context, layer.kv_window_tokens)
            total += layer.weight_bytes + layer.recurrent_bytes_per_sequence * lanes
            total += ceil(Fraction(layer.kv_bytes_per_token * tokens * copies * 100, 85))
        if start == 0:
            total += self.model.shared_first_bytes
        if end == self.layers:
            total += self.model.shared_last_bytes
        return total

    def shapes(self) -> list[tuple[int, int]]:
        native = self.model.native_context_length
        if self.request.context_length is not None:
            contexts = [self.request.context_length]
        else:
            steps = [131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024, 512]
            contexts = [native] + [step for step in steps if min(native, 65536) <= step < native]
        lanes = [4, 3, 2, 1] if self.request.parallel_lanes is None else [self.request.parallel_lanes]
        return [(context, lane) for context in contexts for lane in lanes]

    # cost ---------------------------------------------------------------------------------------------------------
    def stage_us(self, name: str, start: int, end: int) -> int:
        key = (name, start, end)
        if key not in self.stage_cache:
            node, stream, compute = self.nodes[name], 0, 0
            assert node.memory_bandwidth_bytes_per_s is not None
            rate = Fraction(node.memory_bandwidth_bytes_per_s * self.calibration.bandwidth_efficiency_milli, 1000)
            for index in range(start, end):
                size = self.model.layers[index].streamed_bytes
                size += self.model.shared_first_bytes if index == 0 else 0
                size += self.model.shared_last_bytes if index == self.layers - 1 else 0
                stream += ceil(Fraction(size * 10**6) / rate)
                if node.compute_flops_per_s is not None:
                    compute += ceil(Fraction(2 * size * 10**6, node.compute_flops_per_s))
            observed = 0
            if (
                node.observed_decode_us_per_layer
                and node.observed_decode_samples >= 8
                and node.observed_decode_age_us <= 120_000_000
            ):
                observed = node.observed_decode_us_per_layer * (end - start)
            self.stage_cache[key] = (
                max(stream, compute, observed)
                + self.calibration.kv_touch_us
                + self.calibration.per_layer_us * (end - start)
                + self.calibration.per_stage_us
            )
        return self.stage_cache[key]

    def rtt(self, a: str, b: str) -> int | None:
        for pair in ((a, b), (b, a)):
            if pair in self.edges and self.edges[pair].rtt_us is not None:
                return self.edges[pair].rtt_us
        ends = [self.nodes[end].coordinator_rtt_us for end in (a, b)]
        known = [end for end in ends if end is not None]
        return max(known) if known else None

    def sent(self, a: str, b: str, size: int) -> int:
        edge = self.edges.get((a, b))
        if edge is None or edge.large_frame_bytes_per_s is None:
            return 0
        return ceil(Fraction(size * 10**6, edge.large_frame_bytes_per_s))

    def hop(self, a: str, b: str, size: int, back: int | None = None) -> int | None:
        rtt = self.rtt(a, b)
        if rtt is None:
            return None
        wire = self.sent(a, b, size) + (0 if back is None else self.sent(b, a, back))
        return ceil(Fraction(self.calibration.rtt_multiplier_milli * rtt, 1000)) + wire + self.calibration.per_hop_us

    def network(self, order: tuple[str, ...]) -> tuple[int, list[int]] | None:
        """Σ hops and every stage's egress; ``None`` when a hop is unknown or the reply is refused."""
        if len(order) == 1:
            return 0, [0]
        frame = self.model.activation_frame_bytes + self.model.required_sideband_bytes
        reply = self.model.activation_frame_bytes
        if self.calibration.return_bytes is not None:
            reply = self.calibration.return_bytes
        hops: list[int | None] = []
        if self.calibration.topology == "star":
            for index, name in enumerate(order[1:], 1):
                hops.append(self.hop(order[0], name, frame, reply if index == len(order) - 1 else frame))
            egress: list[int | None] = [0, *hops]
        else:
            hops = [self.hop(a, b, frame) for a, b in pairwise(order)]
            edge = self.edges.get((order[-1], order[0]))
            if edge is None or edge.direct_prediction_return_supported:
                hops.append(self.hop(order[-1], order[0], reply))
            elif self.request.direct_prediction_return == "require":
                return None
            else:
                hops += [self.hop(b, a, reply) for a, b in reversed(list(pairwise(order)))]
            egress = hops[: len(order)]
        if any(hop is None for hop in hops):
            return None
        return sum(hop for hop in hops if hop is not None), [hop or 0 for hop in egress]

    # enumeration ----------------------------------------------------------------------------------------------------
    def plans(self) -> list[Found]:
        """Every modelled, feasible plan of every shape."""
        forbidden = {cut.layer for cut in self.model.forbidden_boundaries}
        legal = [cut for cut in range(1, self.layers) if cut not in forbidden]
        found = []
        shapes = self.shapes()
        sizes = {shape: {} for shape in shapes}
        names = sorted(name for name, node in self.nodes.items() if node.memory_bandwidth_bytes_per_s is not None)
        for size in range(max(1, self.request.minimum_nodes), min(len(names), self.layers) + 1):
            for order in permutations(names, size):
                if self.request.pin_stage0 is not None and order[0] != self.request.pin_stage0:
                    continue
                if not self.request.require_nodes <= set(order):
                    continue
                network = self.network(order)
                if network is None:
                    continue
                for inner in combinations(legal, size - 1):
                    cuts = (0, *inner, self.layers)
                    found += self._plans_of(order, cuts, network, sizes)
        return found

    def _plans_of(self, order, cuts, network, sizes):
        spans = list(zip(order, cuts, cuts[1:], strict=False))
        for name, start, end in spans:
            most = self.nodes[name].max_layers
            if most is not None and end - start > most:
                return []
        times = [self.stage_us(*span) for span in spans]
        tpot, period = sum(times) + network[0], max(t + e for t, e in zip(times, network[1], strict=True))
        found = []
        for (context, lanes), cache in sizes.items():
            left = []
            for name, start, end in spans:
                if (start, end) not in cache:
                    cache[start, end] = self.required(start, end, context, lanes)
                left.append(self.usable(name) - cache[start, end])
                if left[-1] < 0:
                    break
            if min(left) >= 0 and len(left) == len(order):
                found.append(Found(context, lanes, order, cuts, tpot, period, min(left), sum(left)))
        return found

    # choice -----------------------------------------------------------------------------------------------------------
    def value(self, plan: Found) -> Fraction:
        """Smaller is better: µs per token."""
        if self.request.objective == "throughput":
            streams = min(self.request.concurrency, plan.lanes)
            return Fraction(max(plan.tpot, streams * plan.period), streams)
        return Fraction(plan.tpot)

    def best(self) -> Found | None:
        """The winner by the seven steps, or ``None`` when nothing modelled is feasible.

        Of plans of equal throughput and stages the one with the least time per token: nobody gains by a slower one.
        """
        plans = self.plans()
        if not plans:
            return None
        target = self.request.target_decode_tpot_us
        kind = min(MET if plan.tpot <= target else MISSED for plan in plans)
        plans = [plan for plan in plans if (MET if plan.tpot <= target else MISSED) == kind]
        least = min(self.value(plan) for plan in plans)
        limit = least * Fraction(1000 + self.request.objective_tolerance_milli, 1000)
        if self.request.prefer == "context" and kind == MET:
            limit = max(self.value(plan) for plan in plans)
        shape = max((plan.context, plan.lanes) for plan in plans if self.value(plan) <= limit)
        within = [plan for plan in plans if (plan.context, plan.lanes) == shape]
        return min(
            within,
            key=lambda plan: (self.value(plan), plan.stages, plan.tpot, -plan.least_left, -plan.total_left, plan.order),
        )
