"""Prometheus metrics straight from a snapshot: a custom collector, no second set of counters to keep in step.

A figure that is not known is absent, never zero. Label values are names of nodes, states and constant reasons, all from
bounded sets. Plan metrics carry ``slot`` besides the labels of the interface document, since several models may be served.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from config.absent import absent
from protocol.rows import StageFact
from stage_agent.api.documents import names_of
from stage_agent.api.snapshot import CounterView, MemberState, NodeSnapshot, NodeSnapshotSource, SlotView

# A push gateway's, and what only a server of its own needs: 2 MB.
with absent("http.server", "socketserver", "urllib.request", "urllib.error", "wsgiref.simple_server", "gzip"):
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

PREFIX = "stagemesh_"
STAGE_STATES: tuple[str, ...] = get_args(StageFact.model_fields["state"].annotation)
MEMBER_STATES: tuple[str, ...] = get_args(MemberState)

Sample = tuple[tuple[str, ...], float | None]


class SnapshotCollector(Collector):
    """Reads one snapshot per scrape."""

    def __init__(self, view: NodeSnapshotSource) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        """Empty: registering must not need a snapshot."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families of the present snapshot."""
        snapshot = self._view.snapshot()
        yield from _node_metrics(snapshot)
        yield from _mesh_metrics(snapshot)
        yield from _link_metrics(snapshot)
        yield from _plan_metrics(snapshot)
        yield from _plan_shape_metrics(snapshot)
        yield from _counter_metrics(snapshot.counters)
        yield from _tunnel_metrics(snapshot)


def build_registry(view: NodeSnapshotSource) -> CollectorRegistry:
    """A registry of its own (never the global one): the node's metrics and those of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(view))
    ProcessCollector(registry=registry)
    return registry


def exposed(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """One scrape in the format that the ``Accept`` header asks for, and the media type of it."""
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], totals: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, total in sorted(totals.items()):
        family.add_metric(key if isinstance(key, tuple) else (key,), total)
    return family


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6


def _node_metrics(snapshot: NodeSnapshot) -> Iterator[Metric]:
    mine = [member for member in snapshot.members if member.is_self]
    yield _gauge(
        "build_info",
        "Constant 1; the version is the label.",
        ("version", "node"),
        [((snapshot.version, snapshot.name), 1.0)],
    )
    yield _gauge(
        "node_memory_bandwidth_bytes_per_second",
        "Memory bandwidth that the planner uses for this node.",
        ("device",),
        [((m.device or "cpu",), m.memory_bandwidth_bytes_per_s) for m in mine],
    )
    yield _gauge(
        "node_usable_memory_bytes",
        "Memory that a stage may use on this node.",
        ("device",),
        [((m.device or "cpu",), m.usable_memory_bytes) for m in mine],
    )
    own: list[str] = [stage.fact.state for stage in snapshot.stages if stage.node_id == snapshot.node_id]
    yield _gauge(
        "stage_state", "Stages of this node by state.", ("state",), [((s,), own.count(s)) for s in STAGE_STATES]
    )


def _mesh_metrics(snapshot: NodeSnapshot) -> Iterator[Metric]:
    others: list[str] = [member.state for member in snapshot.members if not member.is_self]
    yield _gauge("peers", "Other nodes by state.", ("state",), [((s,), others.count(s)) for s in MEMBER_STATES])
    yield _gauge("quic_connections", "Open QUIC connections.", (), [((), snapshot.quic_connections)])
    yield _gauge("coordinator_term", "Highest election term known here.", (), [((), snapshot.term)])
    yield _gauge("is_coordinator", "1 on the node that coordinates.", (), [((), float(snapshot.is_coordinator))])


def _link_metrics(snapshot: NodeSnapshot) -> Iterator[Metric]:
    names = names_of(snapshot)
    mine = [
        (names.get(k.target, k.target), k) for k in snapshot.links if k.source == snapshot.node_id and not k.estimated
    ]
    yield _gauge(
        "link_rtt_seconds",
        "Smallest RTT on the current path.",
        ("peer",),
        [((p,), _seconds(k.rtt_us)) for p, k in mine],
    )
    yield _gauge(
        "link_rtt_settled", "1 when the RTT is trusted.", ("peer",), [((p,), float(k.settled)) for p, k in mine]
    )
    yield _gauge(
        "link_degraded", "1 when the path became much slower.", ("peer",), [((p,), float(k.degraded)) for p, k in mine]
    )
    yield _gauge(
        "link_large_frame_bytes_per_second",
        "Bandwidth observed on large transfers.",
        ("peer", "direction"),
        [
            sample
            for p, k in mine
            for sample in (((p, "send"), k.send_bytes_per_s), ((p, "receive"), k.receive_bytes_per_s))
        ],
    )


def _plan_metrics(snapshot: NodeSnapshot) -> Iterator[Metric]:
    names = names_of(snapshot)
    slots = snapshot.slots
    planned = [(slot, slot.plan) for slot in slots if slot.plan is not None]
    yield _gauge("plan_generation", "Plans seen for the slot.", ("slot",), [((s.slot,), s.generation) for s in slots])
    yield _gauge("slot_routable", "1 when stage 0 takes requests.", ("slot",), [((s.slot,), s.routable) for s in slots])
    coordinator = names.get(snapshot.coordinator_id, snapshot.coordinator_id)
    yield _gauge(
        "plan_info",
        "Constant 1; the present plan is in the labels.",
        ("plan_id", "coordinator", "placement", "calibration", "slot"),
        [((p["plan_id"], coordinator, p["placement"], p["calibration"], s.slot), 1.0) for s, p in planned],
    )
    yield _gauge(
        "plan_modeled_tpot_seconds",
        "Predicted time per output token.",
        ("slot",),
        [((s.slot,), _seconds(p["modeled"]["decode_tpot_us"])) for s, p in planned],
    )
    yield _gauge(
        "plan_network_seconds_per_token",
        "The network's part of it.",
        ("slot",),
        [((s.slot,), _seconds(p["modeled"]["network_us_per_token"])) for s, p in planned],
    )
    yield _gauge(
        "plan_target_met",
        "1 met, 0 missed; absent when unknown.",
        ("slot",),
        [((s.slot,), p["target"]["met"]) for s, p in planned],
    )
    yield _gauge(
        "plan_search_gap_ratio",
        "(cost - lower bound) / lower bound; 0 = proven optimal.",
        ("slot",),
        [((s.slot,), p["search"]["gap"]) for s, p in planned],
    )
    yield _gauge(
        "measured_tpot_seconds",
        "Observed time per output token.",
        ("slot",),
        [((s.slot,), _seconds(s.measured_tpot_us)) for s in slots],
    )
    yield _gauge(
        "predicted_over_measured_ratio",
        "Predicted over observed time per output token; far below 1 = slower than promised.",
        ("slot",),
        [((s.slot,), _predicted_over_measured(s)) for s in slots],
    )


def _predicted_over_measured(slot: SlotView) -> float | None:
    predicted = (slot.plan or {}).get("modeled", {}).get("decode_tpot_us")
    if predicted is None or not slot.measured_tpot_us:
        return None
    return float(predicted) / slot.measured_tpot_us


def _plan_shape_metrics(snapshot: NodeSnapshot) -> Iterator[Metric]:
    names = names_of(snapshot)
    planned = [(slot.slot, slot.plan) for slot in snapshot.slots if slot.plan is not None]
    stages = [
        ((names.get(stage["node_id"], stage["node_id"]), str(stage["stage_index"]), slot), stage)
        for slot, plan in planned
        for stage in plan["stages"]
    ]
    labels = ("node", "stage", "slot")
    yield _gauge(
        "plan_stage_layers",
        "Layers of the stage.",
        labels,
        [(key, stage["layer_end"] - stage["layer_start"]) for key, stage in stages],
    )
    yield _gauge("plan_stage_required_bytes", "Memory it needs.", labels, [(k, s["required_bytes"]) for k, s in stages])
    yield _gauge("plan_stage_usable_bytes", "Memory it may use.", labels, [(k, s["usable_bytes"]) for k, s in stages])
    hops: dict[tuple[str, ...], float | None] = {}
    for slot, plan in planned:
        for hop in plan["hops"]:
            key = (names.get(hop["source"], hop["source"]), names.get(hop["target"], hop["target"]), slot)
            hops.setdefault(key, _seconds(hop["hop_us"]))  # a link used twice has one price, and must have one sample
    yield _gauge("plan_hop_seconds", "Predicted time of a hop.", ("source", "target", "slot"), hops.items())


def _counter_metrics(counters: CounterView) -> Iterator[Metric]:
    yield _counter("gossip_bytes", "Membership traffic.", ("direction",), counters.gossip_bytes)
    yield _counter("gossip_messages", "Control messages by lane.", ("direction", "lane"), counters.gossip_messages)
    yield _counter("gossip_packets", "UDP packets of the control lane.", ("direction",), counters.gossip_packets)
    yield _counter(
        "gossip_rejected",
        "Refused or dropped messages and connections of peers.",
        ("reason",),
        counters.gossip_rejected,
    )
    yield _counter("stale_frames", "Frames of older plans, dropped.", ("kind",), counters.stale_frames)
    yield _counter("probe_bytes", "Sent only to measure idle links.", ("direction",), counters.probe_bytes)
    crossed = ("sent", "received")
    frames = counters.stage_frames
    totals = {way: frames.get(f"frames_{way}", 0) for way in crossed}
    yield _counter("stage_frames", "Stage frames of the verification engine.", ("direction",), totals)
    sizes = {way: frames.get(f"wire_bytes_{way}", 0) for way in crossed}
    yield _counter("stage_frame_bytes", "Their encoded size.", ("direction",), sizes)
    dropped = {name.removeprefix("dropped_"): count for name, count in frames.items() if name.startswith("dropped_")}
    yield _counter("stage_frames_dropped", "Frames the engine would not take.", ("reason",), dropped)
    yield _counter("claims", "Own campaigns by result.", ("result",), counters.claims)
    yield _counter("assignments", "Stage assignments by result.", ("result",), counters.assignments)
    yield _counter("replan", "Planning rounds by reason and outcome.", ("reason", "outcome"), counters.replans)
    search = HistogramMetricFamily(PREFIX + "plan_search_seconds", "Time of the plan search.")
    if counters.plan_search.buckets:
        buckets = [("+Inf" if b == float("inf") else str(b), float(n)) for b, n in counters.plan_search.buckets]
        search.add_metric((), buckets, counters.plan_search.total_seconds)
    yield search


def _tunnel_metrics(snapshot: NodeSnapshot) -> Iterator[Metric]:
    names, counters = names_of(snapshot), snapshot.counters
    totals: dict[tuple[str, str], int] = {}
    for member in snapshot.members:
        if not member.is_self:
            totals |= {(names[member.node_id], direction): 0 for direction in ("send", "receive")}
    for (peer, direction), size in counters.tunnel_bytes.items():
        key = (names.get(peer, peer), direction)
        totals[key] = totals.get(key, 0) + size
    yield _counter("tunnel_bytes", "Engine traffic through tunnels.", ("peer", "direction"), totals)
    yield _counter("tunnel_errors", "Tunnel connections refused or broken.", ("reason",), counters.tunnel_errors)
    yield _gauge("tunnel_connections", "Engine connections in tunnels now.", (), [((), counters.tunnels_open)])
