"""What the operators' standing orders amount to for a coordinator.

An order stands above the configuration of every node; what was never ordered, or was taken back with ``policy``, is as
configured. A pin or an exclusion that was taken back stays said: nobody in particular, and planned again. An order that
cannot be obeyed (an unknown kind, a value out of bounds, sent by a newer or a faulty member) changes nothing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from config.settings import PlannerSettings
from coordinator.calibrated import HopCosts, NodeSpeed, read_costs, read_speed, with_costs
from coordinator.planner.problem import Calibration, LockedStage, LockedTopology
from protocol.ids import NodeId, Slot
from protocol.orders import EXCLUDE, HOP_COSTS, LOCK, NODE_SPEED, PIN_COORDINATOR, PIN_STAGE0, POLICY, OperatorOrder

POLICY_SETTINGS = frozenset({"objective", "policy", "target_decode_tpot_ms", "concurrency", "performance_aware"})
"""Planner settings that an order may set."""


@dataclass(frozen=True, slots=True)
class StandingOrders:
    """All orders that this node knows, read. ``None`` and absence mean that nothing was said."""

    pin_coordinator: str | None = None
    pin_stage0: str | None = None
    excluded: frozenset[NodeId] = frozenset()
    included: frozenset[NodeId] = frozenset()
    """Excluded once, and not any more."""
    locks: Mapping[Slot, LockedTopology | None] = field(default_factory=dict)
    policy: Mapping[str, str] = field(default_factory=dict)
    """Planner setting → JSON of its value."""
    speeds: Mapping[NodeId, NodeSpeed] = field(default_factory=dict)
    costs: Mapping[str, HopCosts] = field(default_factory=dict)
    """By the name of an engine profile."""

    def coordinator(self, configured: str) -> str:
        """Who is to coordinate; empty = nobody in particular."""
        return configured if self.pin_coordinator is None else self.pin_coordinator

    def left_out(self, configured: Iterable[str]) -> frozenset[NodeId]:
        """Nodes that are not planned."""
        return (frozenset(map(NodeId, configured)) | self.excluded) - self.included

    def planner(self, configured: PlannerSettings) -> PlannerSettings:
        """The planner's settings as ordered."""
        settings = configured
        for name, text in sorted(self.policy.items()):
            settings = with_setting(settings, name, text) or settings
        if self.pin_stage0 is not None:
            settings = settings.model_copy(update={"pin_stage0": self.pin_stage0})
        return settings

    def calibration(self, profile: Calibration) -> Calibration:
        """``profile`` as live runs have corrected it."""
        return with_costs(profile, self.costs.get(profile.name))


NO_ORDERS = StandingOrders()


def standing(orders: Iterable[OperatorOrder]) -> StandingOrders:
    """Read ``orders``, at most one per key."""
    pins: dict[str, str] = {}
    sets: dict[bool, set[NodeId]] = {False: set(), True: set()}
    locks: dict[Slot, LockedTopology | None] = {}
    policy: dict[str, str] = {}
    speeds: dict[NodeId, NodeSpeed] = {}
    costs: dict[str, HopCosts] = {}
    for order in orders:
        if order.kind in {PIN_COORDINATOR, PIN_STAGE0}:
            pins[order.kind] = "" if order.removed else order.value
        elif order.kind == EXCLUDE:
            sets[order.removed].add(NodeId(order.subject))
        elif order.kind == LOCK:
            locks[Slot(order.subject)] = topology_of(order)
        elif order.kind == POLICY and not order.removed and order.subject in POLICY_SETTINGS:
            policy[order.subject] = order.value
        elif order.kind == NODE_SPEED and not order.removed and (speed := read_speed(order.value)):
            speeds[NodeId(order.subject)] = speed
        elif order.kind == HOP_COSTS and not order.removed and (found := read_costs(order.value, order.version)):
            costs[order.subject] = found
    return StandingOrders(
        pin_coordinator=pins.get(PIN_COORDINATOR),
        pin_stage0=pins.get(PIN_STAGE0),
        excluded=frozenset(sets[False]),
        included=frozenset(sets[True]),
        locks=locks,
        policy=policy,
        speeds=speeds,
        costs=costs,
    )


def topology_of(order: OperatorOrder) -> LockedTopology | None:
    """The split that a lock holds; ``None`` when it was released."""
    if order.removed or not order.stages:
        return None
    stages = tuple(LockedStage(stage.node_id, stage.layer_start, stage.layer_end) for stage in order.stages)
    return LockedTopology(stages, model=order.model or None, manifest_digest=order.manifest_digest or None)


def with_setting(settings: PlannerSettings, name: str, text: str) -> PlannerSettings | None:
    """``settings`` with ``name`` set to the JSON value ``text``; ``None`` when that is no legal value of it."""
    try:
        changed = {**settings.model_dump(), name: json.loads(text)}
        return PlannerSettings.model_validate(changed, strict=True)
    except (ValueError, RecursionError):
        return None


def spoken(order: OperatorOrder) -> str:
    """One line for people, with ids as they are."""
    match order.kind:
        case "pin_coordinator":
            text = "pin no coordinator" if order.removed else f"pin coordinator {order.value}"
        case "pin_stage0":
            text = "pin no stage 0" if order.removed else f"pin stage 0 {order.value}"
        case "exclude":
            text = f"{'include' if order.removed else 'exclude'} {order.subject}"
        case "lock" if order.removed:
            text = f"unlock {order.subject}"
        case "lock":
            spans = ", ".join(f"{stage.node_id} [{stage.layer_start}, {stage.layer_end})" for stage in order.stages)
            text = f"lock {order.subject}: {spans}"
        case "node_speed" | "hop_costs" if order.removed:
            text = f"{order.kind} {order.subject}: as benchmarked"
        case "node_speed" if speed := read_speed(order.value):
            text = f"calibrated: layers on {order.subject} get {speed.bytes_per_s / 1e9:.2f} GB/s"
        case "hop_costs" if costs := read_costs(order.value, order.version):
            text = (
                f"calibrated: a hop of {order.subject} costs {costs.rtt_multiplier_milli / 1_000:.2f} round trips and "
                f"{costs.per_hop_us / 1_000:.1f} ms"
            )
        case "policy":
            text = f"policy {order.subject} {'as configured' if order.removed else '= ' + order.value}"
        case _:
            text = f"{order.kind} {order.subject} (not known to this version)"
    return text
