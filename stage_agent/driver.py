"""Feeds events and timers to the cores and carries out their effects. Decides nothing.

Everything runs on one loop. An input that a core's effect causes (a message to this node itself, the end of a load, a
finished plan) is queued and taken after the present one, so no core is entered twice. Effects are carried out in the
order given; a ``Persist`` that fails stops the rest of its list, and the stage core refuses ballots until the disk works.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import assert_never

from coordinator.assignment import effects as decided
from coordinator.coordinator import Coordinator
from coordinator.replan import Observation
from coordinator.view import MemberFacts, facts_of, partners
from protocol.ballots import (
    Abort,
    Activate,
    Active,
    Keepalive,
    Nack,
    Prepare,
    Promise,
    PublishedPlan,
    Ready,
    Retire,
    Stage,
    StageProgress,
)
from protocol.beat import next_slow_beat_us, phase_us
from protocol.errors import StateError
from protocol.fencing import epoch_from_wire
from protocol.ids import NodeId, Slot
from protocol.membership import effects as told
from protocol.membership.core import Membership
from protocol.messages import (
    Ack,
    DigestRequest,
    GossipPush,
    Message,
    PackageOffer,
    PackageRequest,
    Ping,
    PingRequest,
    RowRequest,
)
from protocol.quic.interface import Transport
from protocol.rows import NodeRow
from protocol.wire import Epoch
from stage_agent.alarm import Alarm
from stage_agent.clock import monotonic_us
from stage_agent.documents import Published, PublishedPlans, published_message
from stage_agent.journal import Journal
from stage_agent.mesh_book import MeshBook
from stage_agent.narrator import Narrator
from stage_agent.orders import Orders
from stage_agent.planner import compute_plan, document_of
from stage_agent.probes.suspend import SuspendMeter
from stage_agent.stage import effects as staged
from stage_agent.stage.agent import StageAgent
from stage_agent.stage_runner import StageRunner
from stage_agent.state.store import StateStore
from stage_agent.wishes import Wishes

LOOK_US = 5_000_000
"""Without news, a mesh that serves nothing is looked at only this often: at 32 nodes each look costs 3 ms of processor."""
REFRESH_US = 100_000
"""A changed membership is shown to the coordinator at most this often."""
STATE_RETRY_US = 5_000_000


@dataclass(slots=True)
class Driver:
    """The loop's only writer of the cores. ``publish_row`` builds and publishes this node's row."""

    node_id: NodeId
    membership: Membership
    coordinator: Coordinator
    agent: StageAgent
    transport: Transport
    runner: StageRunner
    store: StateStore
    book: MeshBook
    journal: Journal
    narrator: Narrator
    wishes: Wishes
    orders: Orders
    publish_row: Callable[[int], list[told.Effect]]
    tasks: asyncio.TaskGroup
    planner_pool: ThreadPoolExecutor
    remember: Callable[[told.MemberChanged | told.Conflict], None] = lambda _: None
    persisted: Callable[[], None] = lambda: None
    allocatable_bytes: Callable[[], int | None] = lambda: None
    published: PublishedPlans = field(default_factory=PublishedPlans)
    _observed: dict[str, tuple[Epoch | None, int]] = field(default_factory=dict)
    _queue: deque[Callable[[], None]] = field(default_factory=deque)
    _pumping: bool = False
    _alarm: Alarm = field(default_factory=Alarm)
    _dirty_us: int | None = None
    _row_dirty: bool = True
    _next_tick_us: int = 0
    _next_look_us: int = 0
    _coordinator_due_us: int | None = None
    _coordinator_moved: bool = True
    _seen_revision: int = -1
    _suspend: SuspendMeter = field(default_factory=SuspendMeter)
    _state_retry_us: int | None = None

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the loop after what is going on now; the only way in."""
        self._queue.append(action)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._queue:
                self._queue.popleft()()
            if self._row_dirty:
                self._row_dirty = False
                self.carry_membership(self.publish_row(monotonic_us()))
        finally:
            self._pumping = False
        if self.membership.revision != self._seen_revision:
            self.members_changed()
        self._alarm.move(self._due_us())

    def orders_changed(self) -> None:
        """An operator said something here: told to everybody, obeyed at once if this node coordinates."""
        self._row_dirty = True
        now_us = monotonic_us()
        self.carry_coordinator(self.coordinator.on_orders(self.orders.known(now_us), now_us))

    def row_changed(self) -> None:
        """Something that the own row states has changed."""
        self._row_dirty = True

    def members_changed(self) -> None:
        """Something that the coordinator looks at may have changed."""
        if self._dirty_us is None:
            self._dirty_us = monotonic_us() + REFRESH_US

    def on_message(self, peer: NodeId, message: Message, lane: told.Lane, arrived_us: int | None = None) -> None:
        """A valid message from an admitted peer (or, for ballots, from this node itself)."""
        now_us = monotonic_us()
        match message:
            case Ping() | Ack() | PingRequest() | GossipPush() | DigestRequest() | RowRequest():
                self.carry_membership(
                    self.membership.on_message(peer, message, now_us, lane=lane, arrived_us=arrived_us)
                )
            case Prepare() | Stage() | Activate() | Abort() | Retire() | Keepalive():
                if (allocatable_bytes := self.allocatable_bytes()) is not None:
                    self.agent.on_memory(allocatable_bytes)
                self.carry_stage(self.agent.on_message(peer, message, now_us))
            case Promise() | Nack() | StageProgress() | Ready() | Active():
                self.carry_coordinator(self.coordinator.on_reply(peer, message, now_us))
            case PublishedPlan():
                self.journal.rejected["malformed"] += not self.published.learn(peer, message)
            case PackageRequest():
                document = self.wishes.library.document(message.digest)
                self.transport.send(peer, PackageOffer(digest=message.digest, document=document or b""), "stream")
            case PackageOffer():
                if self.wishes.learn(message):
                    self._serve_wishes(self._rows(), now_us)
            case _:
                self.journal.rejected["unexpected_message"] += 1

    def on_runtime(self, event: staged.RuntimeEvent) -> None:
        """What became of a load."""
        self.carry_stage(self.agent.on_runtime(event, monotonic_us()))
        if isinstance(event, staged.LoadFailed | staged.RuntimeDied):
            self.journal.tell(
                "stage_failed", f"stage of {event.slot} failed: {event.detail}", "warning", slot=event.slot
            )

    async def run_timers(self) -> None:
        """Call every core when it wants to be called, and look at everything now and then."""
        while True:
            await self._alarm.wait(self._due_us())
            self.post(self._on_time)

    def _due_us(self) -> int:
        """The earliest moment at which something wants to happen; asked after every input, so it must be cheap."""
        if self._coordinator_moved:  # its own answer walks over all members
            self._coordinator_moved = False
            self._coordinator_due_us = self.coordinator.next_deadline(monotonic_us())
        due = [self.membership.next_deadline(), self.agent.next_deadline(), self._coordinator_due_us]
        due += [self._dirty_us, self._next_tick_us, self._state_retry_us]
        return min(moment for moment in due if moment is not None)

    def _on_time(self) -> None:
        now_us = monotonic_us()
        if _is_due(self.membership.next_deadline(), now_us):
            self.carry_membership(self.membership.on_timer(now_us))
        if _is_due(self.agent.next_deadline(), now_us):
            self.carry_stage(self.agent.on_timer(now_us))
        if now_us >= self._next_tick_us:
            self._tick(now_us)
        if _is_due(self._state_retry_us, now_us):
            self._state_retry_us = None
            self.carry_stage(self.agent.on_state(available=True))
        if _is_due(self._dirty_us, now_us):
            self._refresh(now_us)
        elif _is_due(self._coordinator_due_us, now_us):
            self.carry_coordinator(self.coordinator.on_timer(now_us))

    def _tick(self, now_us: int) -> None:
        self._next_tick_us = next_slow_beat_us(now_us, phase_us(self.node_id))
        looks = now_us >= self._next_look_us
        self._row_dirty |= looks or bool(self.agent.facts(now_us))  # timings of stages come without being called
        if looks or self.wishes.known:
            self._dirty_us = now_us  # shown in this wake, not in one of its own
        if slept_us := self._suspend.gap_us():
            self.journal.tell(
                "clock_gap", f"the machine slept for {slept_us / 1e6:.0f} s", "warning", slept_us=slept_us
            )
            self.carry_membership(self.membership.on_clock_gap(slept_us, now_us))
        if looks:
            self._next_look_us = now_us + LOOK_US
            self.carry_coordinator(self.coordinator.on_timer(now_us))

    def _refresh(self, now_us: int) -> None:
        """Show the present membership to the coordinator and the agent."""
        self._dirty_us, self._seen_revision = None, self.membership.revision
        members = self.membership.members(now_us)
        facts = tuple(facts_of(member) for member in members.values())
        self.membership.request_measurements(partners(facts, self.node_id))
        step = self.coordinator.on_members(facts, now_us)
        self.agent.on_members(frozenset(each.node_id for each in facts if each.connected), self.coordinator.term)
        self.carry_coordinator(step)
        rows = tuple(each.row for each in facts if each.connected)
        self._serve_wishes(rows, now_us)
        self._follow_orders(rows, now_us)
        self._observe(facts, now_us)

    def _observe(self, members: tuple[MemberFacts, ...], now_us: int) -> None:
        """Hand on what stage 0 of each slot says about whole tokens, when there is news."""
        for member in members:
            for fact in member.row.stages:
                known = self._observed.get(fact.slot)
                news = (fact.active, fact.tpot_tokens)
                if fact.tpot_us is not None and fact.state == "serving" and known != news:
                    self._observed[fact.slot] = news
                    ballot = None if fact.active is None else epoch_from_wire(fact.active)
                    observation = Observation(tpot_us=fact.tpot_us, tokens=fact.tpot_tokens, ballot=ballot)
                    self.carry_coordinator(self.coordinator.on_observed(Slot(fact.slot), observation, now_us))

    def _rows(self) -> tuple[NodeRow, ...]:
        """Of connected members."""
        members = self.membership.members().values()
        return tuple(member.row for member in members if member.state in {"alive", "suspect"})

    def _follow_orders(self, rows: tuple[NodeRow, ...], now_us: int) -> None:
        """Learn what operators said elsewhere, and let the coordinator know all of it."""
        try:
            self._row_dirty |= self.orders.adopt(rows, now_us)
        except StateError as error:
            self.journal.tell("state_unavailable", str(error), "error")
        self.carry_coordinator(self.coordinator.on_orders(self.orders.known(now_us), now_us))

    def _serve_wishes(self, rows: tuple[NodeRow, ...], now_us: int) -> None:
        try:
            update = self.wishes.update(rows, now_us)
        except StateError as error:
            self.journal.tell("state_unavailable", str(error), "error")
            return
        self._row_dirty |= update.news
        for peer, digest in update.ask:
            self.transport.send(peer, PackageRequest(digest=digest), "stream")
        if update.specs is not None:
            self.carry_coordinator(self.coordinator.serve(update.specs, now_us))

    def carry_membership(self, effects: Iterable[told.Effect]) -> None:
        """Carry out what the membership core asks."""
        for effect in effects:
            match effect:
                case told.Send(peer, message, lane):
                    self.transport.send(peer, message, lane)
                case told.Dial(peer, address, purpose):
                    self.transport.dial(address, peer, beside=purpose == "explore")
                case told.CloseConnection(peer, reason):
                    self.transport.close(peer, reason if reason in {"revoked", "superseded", "duplicate"} else "closed")
                case told.MemberChanged(node_id, _, new):
                    self.narrator.member(effect)
                    self.members_changed()
                    self.remember(effect)
                    self._greet(node_id, new)
                case told.AdmissionLearned(admission):
                    if self.book.learn(admission):
                        self.carry_membership(self.membership.spread_admission(admission, monotonic_us()))
                case told.Rejected(_, reason):
                    self.journal.rejected[reason] += 1
                case told.Conflict():
                    self.narrator.conflict(effect)
                    self.remember(effect)
                    self.members_changed()
                case _:
                    assert_never(effect)

    def carry_stage(self, effects: Iterable[staged.StageEffect]) -> None:
        """Carry out what the stage core asks; nothing after a ``Persist`` that failed."""
        for effect in effects:
            self._row_dirty = True
            match effect:
                case staged.Persist(slot, record):
                    try:
                        self.store.persist_slot(slot, record.to_document())
                    except StateError as error:
                        self.journal.tell("state_unavailable", str(error), "error")
                        self.agent.on_state(available=False)
                        self._state_retry_us = monotonic_us() + STATE_RETRY_US
                        return
                    self.persisted()
                case staged.Reply(peer, message):
                    self.narrator.reply(message)
                    self._send(peer, message)
                case staged.Load():
                    self.narrator.stage("stage_loading", "loading", str(effect.ballot), effect.assignment)
                    self.runner.load(effect)
                case staged.Unload():
                    self.journal.tell(
                        "stage_unloading", f"unloading {effect.slot} of epoch {effect.ballot}", slot=effect.slot
                    )
                    self.runner.unload(effect)
                case staged.ActivateRuntime():
                    self.narrator.stage("stage_serving", "serving", str(effect.ballot), effect.assignment)
                    self.runner.activate(effect)
                case staged.Count(kind):
                    self.journal.stale_frames[kind] += 1
                case _:
                    assert_never(effect)

    def carry_coordinator(self, effects: Iterable[decided.Effect]) -> None:
        """Carry out what the coordinator core asks."""
        self._coordinator_moved = True
        for effect in effects:
            match effect:
                case decided.Send(peer, message):
                    self._send(peer, message)
                case decided.PersistTerm(term):
                    self._persist_term(term)
                case decided.ComputePlan():
                    self.tasks.create_task(self._compute(effect), name=f"plan {effect.slot}")
                case decided.Publish(slot, ballot, generation, state, plan):
                    document = None if plan is None else document_of(plan)
                    self._publish_plan(Published(slot, ballot, generation, state, document))
                case decided.Route(slot, node_id):
                    text = (
                        f"requests of {slot} go to {self.narrator.name_of(node_id)}"
                        if node_id
                        else f"{slot} is not routable"
                    )
                    self.journal.tell("route", text, slot=slot, node_id=node_id or "")
                case decided.Decided(decision):
                    self.narrator.decision(decision)
                case _:
                    assert_never(effect)

    def _send(self, peer: NodeId, message: Message) -> None:
        if peer == self.node_id:
            self._queue.append(lambda: self.on_message(peer, message, "stream"))
        else:
            self.transport.send(peer, message, "stream")

    def _persist_term(self, term: int) -> None:
        try:
            self.store.persist_term(term)
        except StateError as error:
            self.journal.tell("state_unavailable", str(error), "error")
            return
        self._row_dirty = True
        self.journal.claims["campaigned"] += 1
        self._queue.append(lambda: self.carry_coordinator(self.coordinator.on_term_persisted(term, monotonic_us())))

    async def _compute(self, effect: decided.ComputePlan) -> None:
        start_us = monotonic_us()
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self.planner_pool, compute_plan, effect.problem)
        self.journal.search.observe(monotonic_us() - start_us)
        self.post(
            lambda: self.carry_coordinator(self.coordinator.on_planned(effect.request_id, result, monotonic_us()))
        )

    def _publish_plan(self, published: Published) -> None:
        self.published[published.slot] = published
        for peer in self.transport.connected:
            self.transport.send(peer, published_message(published), "stream")

    def _greet(self, node_id: NodeId, state: told.MemberState | None) -> None:
        """Tell a member that has just come what this node has published."""
        for message in self.published.messages_of(self.node_id) if state == "alive" else ():
            self.transport.send(node_id, message, "stream")


def _is_due(moment_us: int | None, now_us: int) -> bool:
    return moment_us is not None and moment_us <= now_us
