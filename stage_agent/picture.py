"""One frozen picture of the node and its mesh for API, metrics and console, copied from the cores and nothing else."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from config.settings import LinkSettings, NodeSettings
from coordinator.assignment.effects import SlotPhase
from coordinator.assignment.snapshot import CoordinatorSnapshot, SlotSnapshot
from coordinator.layer_devices import layer_device
from coordinator.orders import spoken
from coordinator.planner.plan import PlanRefused
from protocol.fencing import PlanEpoch
from protocol.ids import NodeId, Slot
from protocol.links.facts import is_settled
from protocol.membership.member import Member
from protocol.orders import OperatorOrder
from protocol.rows import LinkFact
from stage_agent.api.snapshot import (
    Event,
    LeftOutView,
    LinkView,
    MemberView,
    NodeSnapshot,
    OrderView,
    SlotState,
    SlotView,
    StageView,
)
from stage_agent.clock import monotonic_us
from stage_agent.documents import Published
from stage_agent.driver import Driver
from stage_agent.own_row import Hardware, Identification, usable_memory_bytes
from stage_agent.planner import document_of
from stage_agent.runtimes.direct import plan_warning
from stage_agent.switches import Switches

_STATES: Mapping[SlotPhase | str, SlotState] = {
    "idle": "idle",
    "settling": "planning",
    "planning": "planning",
    "preparing": "preparing",
    "loading": "loading",
    "activating": "activating",
    "serving": "active",
    "degraded": "degraded",
    "withdrawn": "withdrawn",
}

ESTIMATES_SHOWN = 1_024
"""As many as one row may tell of links."""


@dataclass(slots=True)
class Picture:
    """See ``NodeSnapshotSource``. ``facts`` that never change are given once."""

    driver: Driver
    who: Identification
    mesh_id: str
    listen_address: str
    started_us: int
    link_settings: LinkSettings
    switches: Switches
    probed: Callable[[NodeId, int], bool] = lambda _peer, _sample_us: False
    """Whether a bandwidth sample of that moment came from an active probe."""

    def snapshot(self) -> NodeSnapshot:
        """The present picture."""
        now_us = monotonic_us()
        driver = self.driver
        members = driver.membership.members(now_us)
        coordination = driver.coordinator.snapshot(now_us)
        canonical = coordination.canonical or NodeId("")
        views = tuple(self._member(member, coordination, now_us) for _, member in sorted(members.items(), key=_by_name))
        return NodeSnapshot(
            now_us=now_us,
            node_id=self.who.node_id,
            name=self.who.name,
            version=self.who.version,
            mesh_id=self.mesh_id,
            started_us=self.started_us,
            joined=True,
            draining=self.switches.draining,
            status_text=_status_text(coordination, members),
            listen_address=self.listen_address,
            members=views,
            links=self._links(members, now_us),
            coordinator_id=canonical,
            is_coordinator=coordination.role == "coordinator",
            term=max([coordination.term, *(each.ballot.term for each in driver.published.values())]),
            election=_election_text(coordination),
            slots=self._slots(coordination, now_us),
            stages=tuple(
                StageView(node_id, member.row.name, fact)
                for node_id, member in sorted(members.items(), key=_by_name)
                if member.state in {"alive", "suspect"}
                for fact in member.row.stages
            ),
            orders=tuple(self._order(order) for order in driver.orders.known(now_us)),
            counters=driver.journal.counters(driver.transport.counters),
            quic_connections=len(driver.transport.connected),
        )

    def _order(self, order: OperatorOrder) -> OrderView:
        narrator = self.driver.narrator
        return OrderView(
            kind=order.kind,
            subject=order.subject,
            value=order.value,
            text=narrator.spoken(spoken(order)),
            author=order.author,
            author_name=narrator.name_of(order.author),
            age_us=order.age_us,
            version=order.version,
            removed=order.removed,
        )

    def events(self, after: int = 0) -> tuple[Event, ...]:
        """Remembered events newer than ``after``."""
        return self.driver.journal.events(after)

    def _member(self, member: Member, coordination: CoordinatorSnapshot, now_us: int) -> MemberView:
        row = member.row
        device = layer_device(row.devices)
        gone = member.state in {"dead", "left"}
        why = member.state if gone else coordination.left_out.get(member.node_id, "").replace("_", " ")
        rtt = None if member.link is None else member.link.rtt
        hardware = Hardware(row.detected_memory_bytes, row.memory_source == "shaped", row.devices)
        caps = NodeSettings(memory_cap_bytes=row.memory_cap_bytes, runtime_headroom_bytes=row.runtime_headroom_bytes)
        return MemberView(
            node_id=member.node_id,
            name=row.name,
            state=member.state,
            plannable=not why,
            why_not_plannable=why,
            status=row.status,
            version=row.version,
            engine=row.engine,
            address=member.address or (row.addresses[0] if row.addresses else ""),
            api_address=row.api_address,
            detected_memory_bytes=row.detected_memory_bytes,
            usable_memory_bytes=usable_memory_bytes(hardware, caps),
            memory_source=row.memory_source,
            memory_bandwidth_bytes_per_s=None if device is None else device.memory_bandwidth_bytes_per_s,
            bandwidth_source="unknown" if device is None else device.source,
            compute_flops_per_s=None if device is None else device.compute_flops_per_s,
            compute_source="unknown" if device is None else device.source,
            device="" if device is None else device.name,
            rtt_us=None if rtt is None else rtt.min_rtt_us,
            rtt_settled=member.is_self or (member.link is not None and member.link.settled),
            last_heard_age_us=None if member.heard_us is None else max(0, now_us - member.heard_us),
            flaps=len(member.flaps),
            degraded=row.degraded,
            is_self=member.is_self,
            is_coordinator=member.node_id == coordination.canonical,
        )

    def _links(self, members: Mapping[NodeId, Member], now_us: int) -> tuple[LinkView, ...]:
        own = self.driver.membership.link_facts(now_us)
        links: list[LinkView] = []
        for node_id, member in sorted(members.items(), key=_by_name):
            if member.state not in {"alive", "suspect"}:
                continue
            if member.is_self:
                known = [fact for fact in own if NodeId(fact.target) in members]
                links += [self._own_link(node_id, fact, members[NodeId(fact.target)], now_us) for fact in known]
                links += self._estimates(node_id, members, {NodeId(fact.target) for fact in known})
            else:
                links += [self._link(node_id, fact) for fact in member.row.links if NodeId(fact.target) in members]
        return tuple(links)

    def _own_link(self, source: NodeId, fact: LinkFact, target: Member, now_us: int) -> LinkView:
        """This node's own link says more than its row does."""
        shown, link = self._link(source, fact), target.link
        if link is None:
            return shown
        changed_us, sample = link.path_changed_us, link.send or link.receive
        active = sample is not None and self.probed(target.node_id, sample.at_us)
        return replace(
            shown,
            loaded_rtt_us=link.loaded_rtt_us,
            path_changes=link.path_changes,
            path_changed_age_us=None if changed_us is None else max(0, now_us - changed_us),
            bandwidth_source=None if sample is None else "active" if active else "passive",
        )

    def _estimates(
        self, source: NodeId, members: Mapping[NodeId, Member], measured: Collection[NodeId]
    ) -> Iterator[LinkView]:
        """Large meshes: the way to whom this node measures not, the nearest ``ESTIMATES_SHOWN``, as marked estimates."""
        estimates = [
            (rtt_us, target)
            for target, member in members.items()
            if target != source and target not in measured and member.state in {"alive", "suspect"}
            if (rtt_us := self.driver.membership.estimate_rtt_us(source, target)) is not None
        ]
        for rtt_us, target in sorted(estimates)[:ESTIMATES_SHOWN]:
            yield self._link(source, LinkFact(target=target, min_rtt_us=rtt_us, estimated=True))

    def _link(self, source: str, fact: LinkFact) -> LinkView:
        received = fact.receive_bytes_per_s is not None
        return LinkView(
            source=source,
            target=fact.target,
            rtt_us=fact.min_rtt_us,
            jitter_us=fact.jitter_us,
            settled=is_settled(fact, self.link_settings),
            samples=fact.samples,
            first_age_us=None if fact.estimated else fact.first_age_us,
            last_age_us=None if fact.estimated else fact.last_age_us,
            send_bytes_per_s=fact.send_bytes_per_s,
            receive_bytes_per_s=fact.receive_bytes_per_s,
            bandwidth_age_us=fact.bandwidth_age_us,
            bandwidth_limited_by=fact.bandwidth_limited_by,
            receive_limited_by=(fact.receive_limited_by or fact.bandwidth_limited_by) if received else None,
            degraded=fact.degraded,
            over_tcp=fact.over_tcp,
            shaped=fact.shaped,
            estimated=fact.estimated,
        )

    def _whole(self, own: SlotSnapshot | None, published: Published | None) -> bool:
        """Whether what another node published serves still, by the agents' own rows; the news of a loss may lag behind."""
        if published is None or published.document is None:
            return published is not None
        if own is not None and own.ballot == published.ballot:
            return own.routable
        members = self.driver.membership.members()
        nodes = [members.get(NodeId(str(stage["node_id"]))) for stage in published.document["stages"]]
        return all(node is not None and node.state in {"alive", "suspect"} for node in nodes)

    def _slots(self, coordination: CoordinatorSnapshot, now_us: int) -> tuple[SlotView, ...]:
        sources = {str(spec.slot): spec.source for spec in self.driver.wishes.specs}
        own = {slot.slot: slot for slot in coordination.slots}
        names = sorted({*sources, *own, *self.driver.published})
        return tuple(self._slot(Slot(name), own.get(Slot(name)), coordination, sources, now_us) for name in names)

    def _measured(self, slot: str) -> int | None:
        """Stage 0's own word about whole tokens."""
        for member in self.driver.membership.members().values():
            for fact in member.row.stages:
                if fact.slot == slot and fact.state == "serving" and fact.tpot_us is not None:
                    return fact.tpot_us
        return None

    def _warning(self, document: Mapping[str, Any] | None) -> str:
        stages = () if document is None else document["stages"]
        members = self.driver.membership.members()
        rows = [members[each["node_id"]].row for each in stages if each["node_id"] in members]
        return plan_warning((row.name, row.degraded) for row in rows) if len(rows) > 1 else ""

    def _slot(
        self,
        name: Slot,
        own: SlotSnapshot | None,
        coordination: CoordinatorSnapshot,
        sources: Mapping[str, str],
        now_us: int,
    ) -> SlotView:
        coordinates = coordination.role == "coordinator"
        published = self.driver.published.get(name)
        document: Mapping[str, Any] | None = None if published is None else published.document
        phase: str = published.state if published is not None else "idle"
        refusal, participants, routable = None, "", phase == "serving"
        left_out: tuple[LeftOutView, ...] = ()
        if own is not None and coordinates:
            phase, participants, routable = own.state, own.participant_set_hash, own.routable
            document = document_of(own.plan) if own.plan is not None else document if own.routable else None
            refusal = _refusal(own.refused)
            left_out = self._left_out(own, coordination)
        elif routable and not self._whole(own, published):
            phase, routable = "degraded", False
        ballot = (
            own.ballot if own is not None and coordinates and own.ballot else published.ballot if published else None
        )
        reason = next((each for each in reversed(coordination.decisions) if each.slot == name), None)
        return SlotView(
            warning=self._warning(document),
            slot=name,
            state="refused" if refusal is not None and document is None else _STATES.get(phase, "idle"),
            model=sources.get(name, ""),
            plan=document,
            refusal=refusal,
            epoch="" if ballot is None else str(ballot),
            term=0 if ballot is None else ballot.term,
            routable=routable,
            participant_set_hash=participants or str((document or {}).get("participant_set_hash", "")),
            generation=0 if published is None else published.generation,
            reason="" if reason is None else self.driver.narrator.spoken(f"{reason.kind}: {reason.reason}"),
            active_age_us=_age_us(own, ballot, now_us),
            measured_tpot_us=self._measured(name),
            left_out=left_out,
        )

    def _left_out(self, own: SlotSnapshot, coordination: CoordinatorSnapshot) -> tuple[LeftOutView, ...]:
        """What the slot holds against a node says more than what the node is."""
        narrator = self.driver.narrator
        reasons = {
            **{node_id: why.replace("_", " ") for node_id, why in coordination.left_out.items()},
            **{node_id: narrator.spoken(why).replace("_", " ") for node_id, why in own.left_out.items()},
        }
        found = (
            LeftOutView(node_id, narrator.name_of(node_id), why)
            for node_id, why in reasons.items()
            if node_id not in own.nodes or node_id in own.left_out
        )
        return tuple(sorted(found, key=lambda node: (node.name, node.node_id)))


def _by_name(item: tuple[NodeId, Member]) -> tuple[str, str]:
    return item[1].row.name, item[0]


def _age_us(own: SlotSnapshot | None, ballot: PlanEpoch | None, now_us: int) -> int | None:
    """How long this node has known the shown plan to be active."""
    if own is None or own.active_since_us is None or own.ballot != ballot:
        return None
    return max(0, now_us - own.active_since_us)


def _refusal(refused: PlanRefused | None) -> dict[str, Any] | None:
    if refused is None:
        return None
    return {"code": refused.code, "message": refused.message, "details": refused.details}


def _status_text(coordination: CoordinatorSnapshot, members: Mapping[NodeId, Member]) -> str:
    alive = sum(1 for member in members.values() if member.state == "alive")
    slots = ", ".join(f"{slot.slot} {slot.state}" for slot in coordination.slots) or "nothing to serve"
    return f"{coordination.role}, {alive} nodes alive, {slots}"


def _election_text(coordination: CoordinatorSnapshot) -> str:
    if coordination.canonical is None:
        return "waiting for membership to settle"
    return "membership settled" if coordination.settled else "membership settling"
