"""The cluster as the coordinator sees it, and the planning problem made from it.

``MemberFacts`` is one member as membership and links report it; ``ClusterView`` freezes all of them. ``build_problem``
turns a view into the planner's only input. Signals pass through a ``SignalQuantiser`` first: a value that was taken once is
held until the signal leaves its ±10 % band, so noise inside a bucket *or at its border* never changes the participant
hash, and with it never the plan (DESIGN §10). Capacities are not held: a capacity change always counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from config.settings import PlannerSettings
from coordinator.calibrated import NodeSpeed, calibrated_rate
from coordinator.layer_devices import layer_device
from coordinator.model.package import ModelPackage
from coordinator.planner.problem import (
    Calibration,
    Edge,
    LockedTopology,
    Participant,
    PlanningProblem,
    PlanRequest,
)
from coordinator.planner.readout import as_placed
from protocol.ids import NodeId, Slot
from protocol.links import frames_bytes_per_s
from protocol.membership.member import Member
from protocol.rows import LinkFact, NodeRow, StageFact

MemberState = Literal["alive", "suspect", "dead", "left"]
HOLD_MILLI = 100
"""Half-width of the band in which a held signal stays: 10 %."""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One member. ``settled`` is the RTT from here to it (true for this node itself)."""

    row: NodeRow
    state: MemberState = "alive"
    settled: bool = True
    conflict: bool = False
    """Two live instances claim this id."""
    flaps: tuple[int, ...] = ()
    """When membership saw it return, monotonic µs of this node, oldest first; the settle barrier forgives them."""
    coordinator_rtt_us: int | None = None

    @property
    def node_id(self) -> NodeId:
        """The row's owner."""
        return NodeId(self.row.node_id)

    @property
    def connected(self) -> bool:
        """Not known to be gone; a suspicion is not a verdict."""
        return self.state in {"alive", "suspect"}

    def fact(self, slot: Slot) -> StageFact | None:
        """The member's own word about ``slot``."""
        return next((fact for fact in self.row.stages if fact.slot == slot), None)


def facts_of(member: Member) -> MemberFacts:
    """What membership and this node's own link measurement say of ``member``."""
    link = member.link
    return MemberFacts(
        row=member.row,
        state=member.state,
        settled=member.is_self or (link is not None and link.settled),
        conflict=member.conflict,
        flaps=member.flaps,
        coordinator_rtt_us=None if link is None or link.rtt is None else link.rtt.min_rtt_us,
    )


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All members at one moment, this node included."""

    self_id: NodeId
    members: Mapping[NodeId, MemberFacts] = field(default_factory=dict)

    @property
    def connected(self) -> dict[NodeId, MemberFacts]:
        """Members not known to be gone, by id in ascending order."""
        return {node_id: self.members[node_id] for node_id in sorted(self.members) if self.members[node_id].connected}

    @property
    def max_term(self) -> int:
        """The highest term anybody has mentioned in a row."""
        terms = [0]
        for member in self.members.values():
            terms.append(member.row.max_term)
            for fact in member.row.stages:
                terms += [epoch.term for epoch in (fact.promised, fact.accepted, fact.active) if epoch is not None]
        return max(terms)


def partners(members: Iterable[MemberFacts], self_id: NodeId) -> frozenset[NodeId]:
    """Whom this node shares a plan with, as stage or coordinator: the links that a replacement must know.

    A mesh too large to measure every pair measures these (without them a lost stage of 100 nodes was replaced after 84 s,
    when the grace for survivors that are "not settled" had passed; with them after 9).
    """
    groups: dict[str, set[NodeId]] = {}
    for member in members:
        for fact in member.row.stages if member.connected else ():
            epoch = fact.active or fact.accepted
            if epoch is not None:
                groups.setdefault(fact.slot, set()).update((member.node_id, NodeId(epoch.node_id)))
    return frozenset(node for group in groups.values() if self_id in group for node in group) - {self_id}


class SignalQuantiser:
    """Holds each signal at the value it had when it last left its band. One per slot; bounded by what is asked for."""

    def __init__(self, hold_milli: int = HOLD_MILLI) -> None:
        self._hold_milli = hold_milli
        self._held: dict[tuple[str, ...], int] = {}
        self._used: dict[tuple[str, ...], int] = {}

    def hold(self, key: tuple[str, ...], value: int | None) -> int | None:
        """The held value for ``key``; ``None`` (unknown) forgets it."""
        if value is None:
            return None
        held = self._held.get(key)
        if held is not None:
            low, high = held * 1000 // (1000 + self._hold_milli), held + held * self._hold_milli // 1000
            if low <= value <= high:
                value = held
        self._used[key] = value
        return value

    def finish(self) -> None:
        """End of one problem: signals that were not asked for are forgotten."""
        self._held, self._used = self._used, {}


@dataclass(frozen=True, slots=True)
class ProblemTerms:
    """What one planning round asks besides the view. ``excluded``: node → why it is left out."""

    model: ModelPackage
    planner: PlannerSettings
    calibration: Calibration = field(default_factory=Calibration)
    minimum_nodes: int = 1
    excluded: Mapping[NodeId, str] = field(default_factory=dict)
    held_bytes: Mapping[NodeId, int] = field(default_factory=dict)
    """Memory that other slots' plans use, per node."""
    locked: LockedTopology | None = None
    incumbent: tuple[str, ...] = ()
    pin_stage0: str | None = None
    speeds: Mapping[NodeId, NodeSpeed] = field(default_factory=dict)
    """What calibration from live runs found."""


def build_problem(view: ClusterView, terms: ProblemTerms, quantiser: SignalQuantiser) -> PlanningProblem:
    """Everybody connected and not excluded, in id order, with quantised signals. Pure but for the quantiser's memory."""
    members = [member for node_id, member in view.connected.items() if node_id not in terms.excluded]
    inside = {member.node_id for member in members}
    participants = tuple(_participant(view.self_id, member, terms, quantiser) for member in members)
    back = {(member.node_id, link.target): link for member in members for link in member.row.links}
    edges = tuple(
        _edge(member.node_id, link, back.get((NodeId(link.target), member.row.node_id)), quantiser)
        for member in members
        for link in member.row.links
        if link.target in inside and link.target != member.node_id and not link.estimated
    )
    quantiser.finish()
    return PlanningProblem(
        model=as_placed(terms.model, terms.calibration),
        participants=participants,
        edges=edges,
        calibration=terms.calibration,
        request=_request(terms),
    )


def _participant(self_id: NodeId, member: MemberFacts, terms: ProblemTerms, quantiser: SignalQuantiser) -> Participant:
    row, name = member.row, member.row.node_id
    headroom = row.runtime_headroom_bytes
    other_slots = terms.held_bytes.get(member.node_id, 0)
    if other_slots:
        own = -(-row.detected_memory_bytes // 10) if headroom is None else headroom
        headroom = own + other_slots
    device = layer_device(row.devices)
    model = next((fact for fact in row.models if fact.digest == terms.model.digest), None)
    timing = _timing(row, terms.model.digest)
    is_self = member.node_id == self_id
    return Participant(
        node_id=name,
        detected_memory_bytes=row.detected_memory_bytes,
        operator_cap_bytes=row.memory_cap_bytes,
        runtime_headroom_bytes=headroom,
        memory_bandwidth_bytes_per_s=quantiser.hold(
            ("bandwidth", name), None if device is None else device.memory_bandwidth_bytes_per_s
        ),
        compute_flops_per_s=quantiser.hold(("compute", name), None if device is None else device.compute_flops_per_s),
        observed_decode_us_per_layer=quantiser.hold(
            ("decode", name), None if timing is None else timing.decode_us_per_layer
        ),
        observed_decode_samples=0 if timing is None else timing.decode_samples,
        observed_decode_age_us=0 if timing is None else timing.decode_age_us or 0,
        cached_bytes=quantiser.hold(("cached", name), None if model is None else model.cached_bytes),
        missing_bytes=quantiser.hold(("missing", name), None if model is None else model.missing_bytes),
        artifact_transfer=model is not None and model.artifact_transfer,
        coordinator_rtt_us=0 if is_self else quantiser.hold(("rtt", self_id, name), member.coordinator_rtt_us),
        signals_trusted=is_self or member.settled,
        bandwidth_source="unknown" if device is None else device.source,
        calibrated_bytes_per_s=calibrated_rate(row, terms.speeds.get(member.node_id)),
    )


def _timing(row: NodeRow, digest: str) -> StageFact | None:
    """The row's measured decode timing for this very model, if it has one."""
    for fact in row.stages:
        if fact.model_digest == digest and fact.decode_us_per_layer is not None:
            return fact
    return None


def _edge(source: NodeId, link: LinkFact, reverse: LinkFact | None, quantiser: SignalQuantiser) -> Edge:
    """``reverse``: what the target says of its link to ``source``; both ends see what this direction carries."""
    return Edge(
        source=source,
        target=link.target,
        rtt_us=quantiser.hold(("rtt", source, link.target), link.min_rtt_us),
        rtt_samples=link.samples,
        rtt_first_age_us=link.first_age_us,
        rtt_last_age_us=link.last_age_us,
        large_frame_bytes_per_s=quantiser.hold(("frames", source, link.target), frames_bytes_per_s(link, reverse)),
    )


def _request(terms: ProblemTerms) -> PlanRequest:
    planner = terms.planner
    return PlanRequest(
        objective=planner.objective,
        policy=planner.policy,
        target_decode_tpot_us=round(planner.target_decode_tpot_ms * 1000),
        concurrency=planner.concurrency,
        minimum_nodes=terms.minimum_nodes,
        context_length=planner.context_length,
        parallel_lanes=planner.parallel_lanes,
        performance_aware=planner.performance_aware,
        pin_stage0=terms.pin_stage0 or planner.pin_stage0 or None,
        locked=terms.locked,
        search_budget_ms=planner.search_budget_ms,
        incumbent=terms.incumbent,
    )
