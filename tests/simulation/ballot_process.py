"""One simulated node: both cores, a scripted runtime, and a small gossip model of what it knows of the others."""

import contextlib
import json
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from coordinator.assignment.effects import ComputePlan, Decided, PersistTerm, Route, Send
from coordinator.planner.planning import plan
from coordinator.view import MemberFacts
from protocol.codec import decode, encode
from protocol.errors import StateError
from protocol.fencing import PlanEpoch
from protocol.ids import Instance, NodeId, Slot
from protocol.orders import EXCLUDE, OperatorOrder
from protocol.rows import DeviceFact, LinkFact, NodeRow, StageFact
from stage_agent.stage import effects as stage
from tests.simulation.ballot_frames import FrameStages
from tests.simulation.ballot_orders import kept_orders
from tests.simulation.ballot_world import DEAD_US, HEARTBEAT_US, SECOND, SLOW_LOAD_US, SUSPECT_US, Disk

if TYPE_CHECKING:
    from tests.simulation.ballot_mesh import BallotMesh


class Process:
    """One start of one node: both cores, a scripted runtime, and what it knows of the others."""

    def __init__(
        self, mesh: "BallotMesh", node_id: NodeId, disk: Disk, copy: int = 0, exclude: tuple[NodeId, ...] = ()
    ) -> None:
        self.mesh, self.node_id, self.disk, self.copy = mesh, node_id, disk, copy
        self.excludes = exclude
        disk.boots += 1
        self.boot = disk.boots
        self.seq = 0
        self.instance = Instance(f"{mesh.random.getrandbits(128):032x}")
        self.alive = True
        self.frozen_until_us = 0
        self.asleep_since_us: int | None = None
        self.slept_us = 0
        self.doom: tuple[bool, int] | None = None
        """Set: die at the next write of a record; whether that reaches the disk; started again so much later."""
        self.deferred: list[Callable[[], None]] = []
        self.status = "running"
        self.rows: dict[NodeId, NodeRow] = {}
        self.shown: tuple[MemberFacts, ...] = ()
        self.evidence_us: dict[NodeId, int] = {}
        self.direct_us: dict[NodeId, int] = {}
        self.instances_us: dict[NodeId, dict[str, int]] = {}
        self.routes: dict[Slot, tuple[NodeId, PlanEpoch]] = {}
        self.loads: dict[tuple[Slot, PlanEpoch], int] = {}
        self.wake_us = -1
        self.heartbeat_us = mesh.now_us + mesh.random.randrange(HEARTBEAT_US)
        ballot_instance = Instance("") if mesh.variant.blank_instances else self.instance
        self.coordinator = mesh.variant.coordinator(
            node_id=node_id,
            instance=ballot_instance,
            last_term=disk.term,
            election=mesh.variant.election,
            assignment=mesh.variant.assignment,
            replan=mesh.variant.replan,
            planner=mesh.variant.planner.model_copy(update={"exclude_nodes": exclude}),
            random=Random(f"{mesh.seed} {node_id} {self.boot} {copy}"),
            now_us=mesh.now_us,
        )
        self.agent = mesh.variant.agent(
            node_id=node_id,
            instance=self.instance,
            restored=disk.restore(),
            usable_memory_bytes=mesh.usable_bytes(node_id),
            settings=mesh.variant.election,
            now_us=mesh.now_us,
        )
        self.frames = FrameStages(self, self.agent, mesh.paths, mesh.counts, self.send_frame)
        self.carry(self.coordinator.serve(mesh.specs, mesh.now_us))
        self.orders = kept_orders(node_id, disk, mesh.now_us)
        self.carry(self.coordinator.on_orders(self.orders.known(mesh.now_us), mesh.now_us))
        self.look()

    @property
    def now_us(self) -> int:
        """This process's clock: it stands still while the machine sleeps."""
        return self.mesh.now_us - self.slept_us

    def wake_up(self) -> None:
        """The machine slept: what was measured before is void, everything that was sent meanwhile is lost."""
        if self.asleep_since_us is not None:
            self.slept_us += self.mesh.now_us - self.asleep_since_us
            self.asleep_since_us = None
            self.direct_us.clear()
            self.mesh.counts["woke up"] += 1

    # -- what it says of itself and knows of others

    def row(self) -> NodeRow:
        mesh, base = self.mesh, self.mesh.bandwidth[self.node_id]
        self.seq += 1
        noise = mesh.variant.noise_milli
        return NodeRow(
            node_id=self.node_id,
            public_key=b"k" * 32,
            boot_counter=self.boot,
            seq=self.seq,
            instance=self.instance,
            name=self.node_id,
            version="1",
            status=self.status,
            detected_memory_bytes=mesh.memory[self.node_id],
            devices=(
                DeviceFact(
                    name="cpu",
                    kind="cpu",
                    memory_bytes=mesh.memory[self.node_id],
                    memory_bandwidth_bytes_per_s=base + base * mesh.random.randint(-noise, noise) // 1000,
                    source="measured",
                ),
            ),
            links=tuple(
                LinkFact(target=peer, min_rtt_us=mesh.rtt_us, samples=9, first_age_us=20 * SECOND, last_age_us=1)
                for peer in mesh.node_ids
                if peer != self.node_id
            ),
            stages=self.stages(),
            orders=self.orders.known(self.now_us),
            max_term=self.disk.term,
        )

    def stages(self) -> tuple[StageFact, ...]:
        """The agent's word, with the measured timing that the runtime adds to it."""
        facts, timing = self.agent.facts(self.now_us), self.mesh.timings.get(self.node_id)
        if timing is None:
            return facts
        measured = {"decode_us_per_layer": timing, "decode_samples": 300, "decode_age_us": 1}
        return tuple(fact.model_copy(update=measured) if fact.state == "serving" else fact for fact in facts)

    def members(self) -> tuple[MemberFacts, ...]:
        facts = []
        for node_id, row in sorted(self.rows.items()):
            age = 0 if node_id == self.node_id else self.now_us - self.evidence_us[node_id]
            state = "alive" if age < SUSPECT_US else "suspect" if age < DEAD_US else "dead"
            if row.status == "left":
                state = "left"
            seen = [at for at in self.instances_us[node_id].values() if self.now_us - at < 10 * SECOND]
            restarted = len(seen) > 1 and self.mesh.variant.clones
            settled = node_id == self.node_id or self.now_us - self.direct_us.get(node_id, -(10**12)) < 30 * SECOND
            settled = settled and node_id not in self.mesh.unsettled
            facts.append(
                MemberFacts(
                    row=row, state=state, settled=settled, conflict=restarted, coordinator_rtt_us=self.mesh.rtt_us
                )
            )
        return tuple(facts)

    def hear(self, row: NodeRow, age_us: int, *, direct: bool) -> bool:
        """Take in a row; true when something that matters to the coordinator changed."""
        node_id, now_us = NodeId(row.node_id), self.now_us
        if node_id == self.node_id and row.instance != self.instance:
            self.instances_us.setdefault(node_id, {})[row.instance] = now_us
            self.boot = max(self.boot, row.boot_counter)  # outlive a stranger's row of this id
            self.seq = max(self.seq, row.seq)
            return False
        known = self.rows.get(node_id)
        newer = known is None or self.mesh.variant.row_is_newer(row, known)
        if newer or direct or known is not None:
            self.evidence_us[node_id] = max(self.evidence_us.get(node_id, -(10**12)), now_us - age_us)
        if direct:
            self.direct_us[node_id] = now_us
        if not newer:
            return False
        self.rows[node_id] = row
        self.instances_us.setdefault(node_id, {})[row.instance] = now_us
        self.mesh.checkers.row_taken(self, row, known)
        return (
            known is None or known.stages != row.stages or known.instance != row.instance or known.status != row.status
        )

    def look(self) -> None:
        """Membership changed, or might have."""
        if not self.alive:
            return
        now_us = self.now_us
        self.hear(self.row(), 0, direct=True)
        members = self.shown = self.members()
        alive = frozenset(member.node_id for member in members if member.connected)
        self.agent.on_members(alive)
        self.carry(self.coordinator.on_members(members, now_us))
        with contextlib.suppress(StateError):
            if self.orders.adopt([member.row for member in members if member.connected], now_us):
                self.carry(self.coordinator.on_orders(self.orders.known(now_us), now_us))

    def say(self, *orders: OperatorOrder) -> None:
        """An operator's orders, said at this node."""
        self.orders.say(orders, self.now_us)
        self.carry(self.coordinator.on_orders(self.orders.known(self.now_us), self.now_us))

    def excluded(self) -> set[str]:
        """Whom this process knows to be left out of plans, by its configuration or by an order."""
        orders = [order for order in self.orders.known(self.now_us) if order.kind == EXCLUDE]
        wanted = {order.subject for order in orders if order.removed}
        return ({*self.excludes} | {order.subject for order in orders}) - wanted

    def beat(self) -> None:
        """Tell everybody everything."""
        self.heartbeat_us = self.now_us + HEARTBEAT_US
        self.look()
        ages = tuple((row, self.now_us - self.evidence_us[node_id]) for node_id, row in self.rows.items())
        for peer in self.mesh.node_ids:
            if peer != self.node_id:
                self.mesh.send(self, peer, ("rows", ages))

    # -- effects

    def carry(self, effects: list[Any]) -> None:
        mesh = self.mesh
        for effect in effects:
            if not self.alive:
                return
            if self.dies_before(effect):
                mesh.crash(self)
                return
            if isinstance(effect, stage.Persist) and self.disk.full:
                mesh.counts["write refused by a full disk"] += 1
                self.agent.on_state(available=False)
                self.later(SECOND, lambda: self.carry(self.agent.on_state(available=True)))
                return
            self.carry_one(effect)

    def dies_before(self, effect: Any) -> bool:
        """The process may die between any two effects; a write in progress then reaches the disk or not."""
        mesh, writing = self.mesh, isinstance(effect, stage.Persist)
        if writing and self.doom is not None:
            reaches, down_us = self.doom
            mesh.at(mesh.now_us + down_us, lambda: mesh.start(self.node_id))
        elif mesh.chance(mesh.weather.crash_milli):
            reaches = writing and mesh.random.random() < 0.5
        else:
            return False
        if writing:
            mesh.counts["crash, write kept" if reaches else "crash, write lost"] += 1
        if reaches and not self.disk.full:
            self.write(effect)
        return True

    def write(self, effect: stage.Persist) -> None:
        self.disk.slots[effect.slot] = json.dumps(effect.record.to_document())

    def carry_one(self, effect: Any) -> None:
        mesh = self.mesh
        mesh.checkers.effect(self, effect)
        match effect:
            case Send(peer, message) | stage.Reply(peer, message):
                mesh.send(self, peer, encode(message))
            case PersistTerm() if self.disk.full:
                pass  # the driver says why in its log; the core must not wait for ever
            case PersistTerm(term):
                self.disk.term = max(self.disk.term, term)
                self.later(1_000, lambda: self.carry(self.coordinator.on_term_persisted(term, self.now_us)))
            case ComputePlan(request_id, _, problem):
                self.later(
                    20_000, lambda: self.carry(self.coordinator.on_planned(request_id, plan(problem), self.now_us))
                )
            case Route(slot, node_id, ballot):
                self.routes.pop(slot, None)
                if node_id is not None:
                    self.routes[slot] = (node_id, ballot)
            case Decided(decision):
                mesh.counts[f"decided: {decision.kind}"] += 1
                mesh.log(f"{self.node_id} {decision.kind}: {decision.reason}")
            case stage.Persist():
                self.write(effect)
            case stage.Load(slot, ballot, assignment, reuse):
                shared = None if reuse is None else self.loads.get((slot, reuse))
                self.loads[slot, ballot] = mesh.next_load() if shared is None else shared
                load_us = 10_000 if shared is not None else mesh.load_time_us()
                mesh.counts["slow load"] += load_us >= SLOW_LOAD_US
                self.later(load_us, lambda: self.loaded(slot, ballot))
                mesh.sizes[self.loads[slot, ballot]] = assignment.required_bytes
            case stage.Unload(slot, ballot):
                self.later(200_000, lambda: self.unloaded(slot, ballot))
            case stage.ActivateRuntime(slot, ballot, assignment):
                self.frames.activate(slot, ballot, assignment, self.loads[slot, ballot])
                mesh.log(f"{self.node_id} activates {slot} {ballot}")

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        def run() -> None:
            if self.alive:
                self.mesh.run_in(self, action)

        self.mesh.at(self.mesh.now_us + delay_us, run)

    def loaded(self, slot: Slot, ballot: PlanEpoch) -> None:
        if (slot, ballot) not in self.loads:
            return
        weather, now_us = self.mesh.weather, self.now_us
        if self.mesh.chance(weather.load_failure_milli):
            del self.loads[slot, ballot]
            self.mesh.counts["failed load"] += 1
            self.carry(self.agent.on_runtime(stage.LoadFailed(slot, ballot, "load_failed", "scripted"), now_us))
            return
        self.mesh.checkers.loads_of(self).loaded(slot, ballot)
        self.carry(self.agent.on_runtime(stage.Loaded(slot, ballot), now_us))
        if self.mesh.chance(weather.runtime_death_milli):
            self.later(self.mesh.random.randrange(20 * SECOND), lambda: self.die_of_weather(slot, ballot))

    def die_of_weather(self, slot: Slot, ballot: PlanEpoch) -> None:
        """Unless the weather has turned."""
        if self.mesh.weather.runtime_death_milli:
            self.die(slot, ballot)

    def die(self, slot: Slot, ballot: PlanEpoch) -> None:
        weights = self.loads.get((slot, ballot))
        self.mesh.counts["engine died"] += weights is not None
        if weights is not None:
            self.frames.gone(weights)
        for label in [label for label, held in self.loads.items() if held == weights]:
            del self.loads[label]
            self.carry(self.agent.on_runtime(stage.RuntimeDied(*label, "scripted"), self.now_us))

    def unloaded(self, slot: Slot, ballot: PlanEpoch) -> None:
        weights = self.loads.pop((slot, ballot), None)
        if weights is not None and weights not in self.loads.values():
            self.frames.gone(weights)
        self.carry(self.agent.on_runtime(stage.Unloaded(slot, ballot), self.now_us))

    # -- inputs

    def receive(self, sender: NodeId, payload: Any) -> None:
        now_us = self.now_us
        if isinstance(payload, bytes):
            message: Any = decode(payload)
            if message.type in {"promise", "nack", "stage_progress", "ready", "active"}:
                self.carry(self.coordinator.on_reply(sender, message, now_us))
            else:
                before = self.agent.facts(now_us)
                self.carry(self.agent.on_message(sender, message, now_us))
                if self.alive and before != self.agent.facts(now_us):
                    self.heartbeat_us = min(self.heartbeat_us, now_us + 100_000)
        elif payload[0] == "rows":
            changed = False
            for row, age_us in payload[1]:
                changed |= self.hear(row, age_us, direct=row.node_id == sender)
            if changed:
                self.look()
        else:
            self.frames.receive(sender, payload[1])

    def request(self, slot: Slot) -> None:
        """A client's request at stage 0."""
        self.frames.begin(slot)

    def send_frame(self, peer: NodeId, sealed: bytes) -> None:
        """Over the lane for frames."""
        self.mesh.send(self, peer, ("frame", sealed))

    def timer(self) -> None:
        now_us = self.now_us
        if now_us >= self.heartbeat_us:
            self.beat()
        self.carry(self.agent.on_timer(now_us))
        if self.alive:
            self.carry(self.coordinator.on_timer(now_us))

    def deadline(self) -> int:
        """On the mesh's clock."""
        due = [self.heartbeat_us, self.agent.next_deadline(), self.coordinator.next_deadline(self.now_us)]
        return self.slept_us + min(moment for moment in due if moment is not None)
