"""One planning problem, prepared: trusted signals, nodes in capacity order, prices, legality. Shared by every search.

Built once per call; everything in it is immutable and independent of the order in which nodes and links were given.
"""

from dataclasses import dataclass

from coordinator.planner.cost import StageTimes, stage_times
from coordinator.planner.memory import Shape, ShapeMemory, capacity_order, usable_bytes
from coordinator.planner.network import Network, network_of
from coordinator.planner.problem import Participant, PlanningProblem
from coordinator.planner.trust import TrustedSignals, stripped, trusted_signals


@dataclass(frozen=True)
class Instance:
    """``nodes`` are the eligible ones in capacity order; ``excluded`` maps every other id to the reason."""

    problem: PlanningProblem
    signals: TrustedSignals
    network: Network
    nodes: tuple[Participant, ...]
    excluded: dict[str, str]
    usable: dict[str, int]
    times: dict[str, StageTimes | None]
    forbidden: frozenset[int]

    @property
    def layer_count(self) -> int:
        """Layers of the model."""
        return self.problem.model.layer_count

    def memory(self, shape: Shape) -> ShapeMemory:
        """Required bytes at ``shape``."""
        return ShapeMemory(self.problem.model, shape, self.problem.request.kv_cache)

    def span_limit(self, node: Participant) -> int:
        """Most layers the operator lets ``node`` hold."""
        return self.layer_count if node.max_layers is None else min(node.max_layers, self.layer_count)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Node ids in stage order and their cuts: stage i owns ``[cuts[i], cuts[i + 1])``."""

    shape: Shape
    sequence: tuple[str, ...]
    cuts: tuple[int, ...]

    @property
    def spans(self) -> tuple[tuple[str, int, int], ...]:
        """(node, start, end) of every stage."""
        return tuple(zip(self.sequence, self.cuts[:-1], self.cuts[1:], strict=True))


def prepare(problem: PlanningProblem) -> Instance:
    """Trust, exclusions and prices. The kill switch is applied here, before anything else looks at the input."""
    if not problem.request.performance_aware:
        problem = stripped(problem)
    request, model = problem.request, problem.model
    signals = trusted_signals(problem)
    calibration = problem.calibration
    cache: dict[tuple[int | None, int | None, int | None], StageTimes | None] = {}
    times: dict[str, StageTimes | None] = {}
    for node in problem.participants:
        believed = signals.nodes[node.node_id]
        key = (believed.bandwidth_bytes_per_s, believed.compute_flops_per_s, believed.observed_us_per_layer)
        if key not in cache:
            cache[key] = stage_times(model, believed, calibration)
        times[node.node_id] = cache[key]
    usable = {node.node_id: usable_bytes(node) for node in problem.participants}
    excluded = {node_id: "excluded by the operator" for node_id in request.exclude_nodes if node_id in usable}
    excluded |= {node_id: "no usable memory after headroom" for node_id, size in usable.items() if size == 0}
    return Instance(
        problem=problem,
        signals=signals,
        network=network_of(model, signals, calibration, request.direct_prediction_return),
        nodes=capacity_order(tuple(node for node in problem.participants if node.node_id not in excluded)),
        excluded=dict(sorted(excluded.items())),
        usable=usable,
        times=times,
        forbidden=frozenset(boundary.layer for boundary in model.forbidden_boundaries),
    )
