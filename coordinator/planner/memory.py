"""What a stage needs and what a node offers (DESIGN §4). The only place where bytes of memory are counted.

``required(layer) = weight + ⌈kv · tokens · kv_lanes · 100/85⌉ + recurrent · lanes``. The 100/85 holds back 15 % for
compute buffers. ``tokens`` is the context, or the layer's sliding window when that is smaller. A *shape* is one
context length with one lane count; everything that grows with a shape is memory only, so a smaller shape admits every
plan that a larger one admits (``dominates`` in the search across shapes rests on this).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import KvCache, Participant, PlanRequest

CONTEXT_STEPS = (131_072, 65_536, 32_768, 16_384, 8_192, 4_096, 2_048, 1_024, 512)
CONTEXT_FLOOR = 65_536
LANE_STEPS = (4, 3, 2, 1)
RESERVE_NUMERATOR, RESERVE_DENOMINATOR = 100, 85


@dataclass(frozen=True, slots=True)
class Shape:
    """One context length (tokens) and lane count."""

    context_length: int
    lanes: int


def ceil_div(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉ for non-negative numerators and positive denominators."""
    return -(-numerator // denominator)


def usable_bytes(node: Participant) -> int:
    """``min(detected, cap) − headroom``, never negative. Headroom defaults to ⌈10 %⌉ of *detected* memory."""
    headroom = node.runtime_headroom_bytes
    if headroom is None:
        headroom = ceil_div(node.detected_memory_bytes, 10)
    offered = node.detected_memory_bytes
    if node.operator_cap_bytes is not None:
        offered = min(offered, node.operator_cap_bytes)
    return max(0, offered - headroom)


def capacity_order(nodes: tuple[Participant, ...]) -> tuple[Participant, ...]:
    """Usable memory descending, then id ascending: the legacy order, and the index order of every search."""
    return tuple(sorted(nodes, key=lambda node: (-usable_bytes(node), node.node_id)))


def layer_required_bytes(layer: Layer, shape: Shape, kv_cache: KvCache) -> int:
    """Bytes that one layer occupies at ``shape``, shared parts excluded."""
    kv_lanes = shape.lanes if kv_cache == "per_lane" else 1
    tokens = shape.context_length
    if layer.kv_window_tokens is not None:
        tokens = min(tokens, layer.kv_window_tokens)
    cache = ceil_div(layer.kv_bytes_per_token * tokens * kv_lanes * RESERVE_NUMERATOR, RESERVE_DENOMINATOR)
    return layer.weight_bytes + cache + layer.recurrent_bytes_per_sequence * shape.lanes


@dataclass(frozen=True)
class ShapeMemory:
    """Required bytes of any span of layers at one shape. ``prefix[i]`` sums layers ``[0, i)`` without shared parts."""

    model: ModelPackage
    shape: Shape
    kv_cache: KvCache

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """Running sums, ``layer_count + 1`` long."""
        per_layer = (layer_required_bytes(layer, self.shape, self.kv_cache) for layer in self.model.layers)
        return tuple(accumulate(per_layer, initial=0))

    def required(self, start: int, end: int) -> int:
        """Bytes of a stage that owns ``[start, end)``, with the shared parts of the ends it owns."""
        total = self.prefix[end] - self.prefix[start]
        if start == 0:
            total += self.model.shared_first_bytes
        if end == self.model.layer_count:
            total += self.model.shared_last_bytes
        return total


def parameter_bytes(model: ModelPackage, start: int, end: int) -> int:
    """Weights of a stage, shared parts of its ends included."""
    total = sum(layer.weight_bytes for layer in model.layers[start:end])
    if start == 0:
        total += model.shared_first_bytes
    if end == model.layer_count:
        total += model.shared_last_bytes
    return total


def minimum_context(native: int) -> int:
    """The floor below which contexts are never chosen automatically."""
    return min(native, CONTEXT_FLOOR)


def context_candidates(native: int, override: int | None) -> tuple[int, ...] | PlanRefused:
    """High to low: native, then the steps below it down to the floor; or exactly the override."""
    if override is not None:
        if override > native:
            return PlanRefused(
                "context_exceeds_native",
                f"requested context {override} exceeds the model's native context {native}",
                {"requested": override, "native": native},
            )
        if override < 1:
            return PlanRefused(
                "context_below_minimum",
                f"requested context {override} is below the minimum of 1 token",
                {"requested": override, "minimum": 1},
            )
        return (override,)
    floor = minimum_context(native)
    return (native, *(step for step in CONTEXT_STEPS if floor <= step < native))


def lane_candidates(override: int | None) -> tuple[int, ...] | PlanRefused:
    """4, 3, 2, 1, or exactly the override."""
    if override is None:
        return LANE_STEPS
    if override < 1:
        return PlanRefused("zero_parallel_lanes", "parallel lanes must be greater than zero", {"requested": override})
    return (override,)


def candidate_shapes(native: int, request: PlanRequest) -> tuple[Shape, ...] | PlanRefused:
    """Every context × lanes shape, larger context first, then more lanes."""
    contexts = context_candidates(native, request.context_length)
    if isinstance(contexts, PlanRefused):
        return contexts
    lanes = lane_candidates(request.parallel_lanes)
    if isinstance(lanes, PlanRefused):
        return lanes
    return tuple(Shape(context, lane) for context in contexts for lane in lanes)
