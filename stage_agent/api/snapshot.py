"""What the node shows: one frozen picture of itself and the mesh, filled by the driver, read by API, metrics and console.

Units: bytes, microseconds, bytes per second. ``None`` = not known, never zero. Ages are durations at the moment of the
snapshot. Nothing here decides anything, and nothing here is a second status channel: every value is copied from a core.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from protocol.rows import StageFact

MemberState = Literal["alive", "suspect", "dead", "left"]
Source = Literal["measured", "shaped", "spec", "unknown"]
SlotState = Literal[
    "idle", "planning", "preparing", "loading", "activating", "active", "degraded", "draining", "refused", "withdrawn"
]


@dataclass(frozen=True, slots=True)
class MemberView:
    """One node as this node sees it."""

    node_id: str
    name: str
    state: MemberState
    plannable: bool = False
    why_not_plannable: str = ""
    """Empty when plannable; else one short reason ("rtt not settled", "draining", "id conflict" …)."""
    status: Literal["running", "draining", "leaving", "left"] = "running"
    version: str = ""
    engine: str = ""
    address: str = ""
    api_address: str = ""
    """``host:port`` of its HTTP API when it told one that others can reach; only such nodes become scrape targets."""
    detected_memory_bytes: int = 0
    usable_memory_bytes: int = 0
    memory_source: Source = "unknown"
    memory_bandwidth_bytes_per_s: int | None = None
    bandwidth_source: Source = "unknown"
    compute_flops_per_s: int | None = None
    compute_source: Source = "unknown"
    device: str = ""
    """Name of the device that the figures above belong to."""
    rtt_us: int | None = None
    rtt_settled: bool = False
    last_heard_age_us: int | None = None
    flaps: int = 0
    degraded: tuple[str, ...] = ()
    is_self: bool = False
    is_coordinator: bool = False


@dataclass(frozen=True, slots=True)
class LinkView:
    """One directed link as its source measured it."""

    source: str
    target: str
    rtt_us: int | None = None
    jitter_us: int | None = None
    settled: bool = False
    samples: int = 0
    first_age_us: int | None = None
    last_age_us: int | None = None
    send_bytes_per_s: int | None = None
    receive_bytes_per_s: int | None = None
    bandwidth_age_us: int | None = None
    bandwidth_limited_by: str | None = None
    """Of sending, if that is known, else of receiving."""
    receive_limited_by: str | None = None
    degraded: bool = False
    over_tcp: bool = False
    """UDP does not pass: control runs over the TLS lane."""
    shaped: bool = False
    estimated: bool = False
    """Nobody measured it: the RTT follows from network coordinates and is never settled."""
    loaded_rtt_us: int | None = None
    """Own links only, as are the three below: smallest RTT while a bulk transfer ran."""
    path_changes: int | None = None
    path_changed_age_us: int | None = None
    bandwidth_source: Literal["active", "passive"] | None = None
    """What gave the latest sample: a probe, or a transfer that happened anyway."""


@dataclass(frozen=True, slots=True)
class LeftOutView:
    """A connected node that a slot's plan may not use now."""

    node_id: str
    name: str
    reason: str
    """In words: what the node is (``settling``, ``draining``, …) or how it failed this slot."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """One served model: the plan this node knows of, and how far it has come."""

    slot: str
    state: SlotState
    model: str = ""
    """What the operator asked for (path or name)."""
    plan: Mapping[str, Any] | None = None
    """The document of ``plan --json``."""
    refusal: Mapping[str, Any] | None = None
    """``{"code", "message", "details"}`` of the last round that found no plan."""
    epoch: str = ""
    """``term/node/instance`` as ``str(PlanEpoch)``; empty before the first."""
    term: int = 0
    routable: bool = False
    """Stage 0 may be routed to: every agent said ``Active``."""
    participant_set_hash: str = ""
    generation: int = 0
    """Counts plans of this slot since this node started watching; metric ``plan_generation``."""
    reason: str = ""
    """Why the state is as it is, in words (the last replan decision)."""
    active_age_us: int | None = None
    measured_tpot_us: int | None = None
    warning: str = ""
    """What an operator should know about the plan in use, whatever its state."""
    left_out: tuple[LeftOutView, ...] = ()
    """By name; known to the coordinator only, empty elsewhere."""


@dataclass(frozen=True, slots=True)
class OrderView:
    """One standing order of an operator, known by every node."""

    kind: str
    """``pin_coordinator``, ``pin_stage0``, ``exclude``, ``lock``, ``policy``, ``node_speed``, ``hop_costs``, or one that
    only newer versions know."""
    subject: str
    """The node, slot or setting that it is about; empty for pins."""
    value: str
    text: str
    """For people, with names."""
    author: str
    """Id of the node where it was said."""
    author_name: str
    age_us: int
    version: int
    removed: bool = False
    """Taken back; still told, so that no older word returns."""


@dataclass(frozen=True, slots=True)
class StageView:
    """One node's own word about one slot."""

    node_id: str
    name: str
    fact: StageFact


@dataclass(frozen=True, slots=True)
class HistogramView:
    """Cumulative counts per upper bound (seconds; the last bound is infinity) and the sum of all observations."""

    buckets: tuple[tuple[float, int], ...] = ()
    total_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CounterView:
    """Totals since the process started; every key comes from a bounded set."""

    gossip_bytes: Mapping[str, int] = field(default_factory=dict)
    """direction (``sent``, ``received``) → bytes."""
    gossip_messages: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(direction, lane) → messages; ``datagram`` carries probes and small gossip, ``stream`` everything else."""
    gossip_packets: Mapping[str, int] = field(default_factory=dict)
    """direction → UDP packets, acknowledgements included."""
    gossip_rejected: Mapping[str, int] = field(default_factory=dict)
    """``WireError.reason`` → count."""
    stale_frames: Mapping[str, int] = field(default_factory=dict)
    stage_frames: Mapping[str, int] = field(default_factory=dict)
    """``frames_sent``, ``wire_bytes_sent``, ``…_received``, ``dropped_<reason>`` of the verification engine → count."""
    claims: Mapping[str, int] = field(default_factory=dict)
    """result of own campaigns (``won``, ``refused`` …) → count."""
    assignments: Mapping[str, int] = field(default_factory=dict)
    replans: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(reason, outcome) → count."""
    plan_search: HistogramView = HistogramView()
    tunnel_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(peer's node id, ``send`` or ``receive``) → bytes of engines."""
    tunnel_errors: Mapping[str, int] = field(default_factory=dict)
    """Why tunnel connections were refused or broke → count."""
    tunnels_open: int = 0
    probe_bytes: Mapping[str, int] = field(default_factory=dict)
    """direction (``sent``, ``received``) → bytes of active bandwidth probes."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for people. ``seq`` counts up from 1 within one process."""

    seq: int
    at: str
    """Wall clock, ISO 8601 in UTC: for reading only."""
    at_us: int
    """Monotonic; ages are computed from it when shown."""
    kind: str
    """Constant snake_case name."""
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The whole picture at ``now_us`` (monotonic)."""

    now_us: int
    node_id: str
    name: str
    version: str
    mesh_id: str = ""
    started_us: int = 0
    joined: bool = False
    """Has an identity, is admitted to a mesh and listens. A mesh of one is joined."""
    draining: bool = False
    status_text: str = ""
    listen_address: str = ""
    members: tuple[MemberView, ...] = ()
    links: tuple[LinkView, ...] = ()
    coordinator_id: str = ""
    is_coordinator: bool = False
    term: int = 0
    election: str = ""
    """Why the coordinator is who it is, or what is waited for, in words."""
    slots: tuple[SlotView, ...] = ()
    stages: tuple[StageView, ...] = ()
    orders: tuple[OrderView, ...] = ()
    counters: CounterView = CounterView()
    quic_connections: int = 0


class NodeSnapshotSource(Protocol):
    """Where the API reads. Both methods are called on the daemon's event loop and must not block."""

    def snapshot(self) -> NodeSnapshot:
        """The present picture; cheap enough for once per request."""
        ...

    def events(self, after: int = 0) -> tuple[Event, ...]:
        """The remembered events with ``seq > after``, oldest first (a bounded ring)."""
        ...
