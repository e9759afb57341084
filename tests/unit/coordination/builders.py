"""Members, plans and answers by hand."""

from dataclasses import replace
from typing import Any

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.plan import Modeled, Plan, PlannedHop, PlannedStage, SearchCertificate, Target
from coordinator.view import ClusterView, MemberFacts
from protocol.fencing import PlanEpoch, epoch_to_wire
from protocol.ids import Instance, NodeId, Slot
from protocol.rows import DeviceFact, LinkFact, NodeRow, StageFact

SECOND = 1_000_000
MINUTE = 60 * SECOND
GIB = 2**30
SLOT = Slot("default")
DIGEST = "d" * 64
MODEL = ModelPackage("m", DIGEST, tuple(Layer(GIB, GIB, 64) for _ in range(8)), 0, 0, 4096, 8192)


def ballot(term: int, node: str = "a", instance: str = "0" * 32) -> PlanEpoch:
    return PlanEpoch(term, NodeId(node), Instance(instance))


def member(node_id: str, *, gib: int = 8, instance: str = "1" * 32, **fields: Any) -> MemberFacts:
    """``state``, ``settled``, ``conflict``, ``flaps`` go to the facts, everything else into the row."""
    facts = {
        key: fields.pop(key) for key in ("state", "settled", "conflict", "flaps", "coordinator_rtt_us") if key in fields
    }
    speed = fields.pop("bandwidth", 20 * 10**9)
    values: dict[str, Any] = {
        "node_id": node_id,
        "public_key": b"k" * 32,
        "boot_counter": 1,
        "seq": 1,
        "instance": instance,
        "name": node_id,
        "version": "1",
        "detected_memory_bytes": gib * GIB,
        "devices": (DeviceFact(name="cpu", kind="cpu", memory_bytes=gib * GIB, memory_bandwidth_bytes_per_s=speed),),
    }
    return MemberFacts(row=NodeRow(**{**values, **fields}), **facts)


def view(*members: MemberFacts, me: str = "a") -> ClusterView:
    return ClusterView(NodeId(me), {each.node_id: each for each in members})


def serving(at: PlanEpoch, start: int, end: int, index: int = 0, count: int = 1, **fields: Any) -> StageFact:
    values: dict[str, Any] = {
        "slot": SLOT,
        "state": "serving",
        "promised": epoch_to_wire(at),
        "active": epoch_to_wire(at),
        "plan_hash": "a" * 64,
        "model_digest": DIGEST,
        "layer_start": start,
        "layer_end": end,
        "stage_index": index,
        "stage_count": count,
        "context_length": 512,
        "lanes": 1,
        "required_bytes": 10,
    }
    return StageFact(**{**values, **fields})


def link(target: str, rtt_us: int = 500, **fields: Any) -> LinkFact:
    return LinkFact(target=target, min_rtt_us=rtt_us, samples=9, first_age_us=20 * SECOND, last_age_us=1, **fields)


def plan(*spans: tuple[str, int, int], tpot_us: int | None = 1000, usable: int = 100, **fields: Any) -> Plan:
    """Stages as (node, start, end); ten bytes a layer."""
    count = len(spans)
    stages = tuple(
        PlannedStage(
            index,
            node,
            start,
            end,
            ("intermediate",),
            10 * (end - start),
            10 * (end - start),
            usable,
            100 * (end - start),
        )
        for index, (node, start, end) in enumerate(spans)
    )
    hops = tuple(
        PlannedHop(spans[index][0], spans[(index + 1) % count][0], "forward", 1, 0, 50, "measured")
        for index in range(count if count > 1 else 0)
    )
    plan_hash = "".join(f"{node}{start}.{end}" for node, start, end in spans).encode().hex().ljust(64, "0")[:64]
    made = Plan(
        plan_id=plan_hash[:16],
        plan_hash=plan_hash,
        model_name="m",
        model_digest=DIGEST,
        layer_count=spans[-1][2],
        participant_set_hash="e" * 64,
        context_length=512,
        parallel_lanes=1,
        objective="interactive",
        calibration="skippy",
        placement="performance_aware",
        stages=stages,
        hops=hops,
        boundaries=(),
        modeled=Modeled(decode_tpot_us=tpot_us),
        target=Target(33_000, None),
        search=SearchCertificate(True, 0.0, 0, 0),
    )
    return replace(made, **fields)
