"""Everything real at once on virtual time: membership, links, coordinators, agents, codecs; only disk and engine are scripted.

The checkers of the protocol's invariants look after every input of a coordinator or agent, and requests flow to whatever
a coordinator routes to, unless a mesh is made with ``checked=False`` to measure what the program alone costs.
"""

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from config.settings import AssignmentSettings, ElectionSettings, MembershipSettings, PlannerSettings, ReplanSettings
from coordinator.assignment import effects as chief
from coordinator.assignment.moment import ServedModelSpec
from coordinator.coordinator import Coordinator
from coordinator.planner.planning import plan
from coordinator.view import MemberFacts, facts_of, partners
from protocol.codec import decode, encode
from protocol.ids import Instance, NodeId, Slot
from protocol.membership import MemberChanged
from protocol.rows import DeviceFact, NodeRow
from stage_agent.stage import effects as stage
from stage_agent.stage.agent import StageAgent
from tests.simulation.ballot_checkers import Checkers
from tests.simulation.ballot_frames import FrameStages, Paths
from tests.simulation.membership_mesh import SECOND, MembershipPort, Mesh

if TYPE_CHECKING:
    from protocol.fencing import PlanEpoch

LOAD_US = 3 * SECOND
PLAN_US = 250_000
WRITE_US = 500
"""A durable write; 0.3 ms were measured."""
DIAL_US = 20_000
REQUEST_US = SECOND
FRAME_MAGIC = b"SMF1"
"""Frames have a lane of their own in the daemon; here they share the streams."""
REPLIES = frozenset({"promise", "nack", "stage_progress", "ready", "active"})
CLAIMS = frozenset({"prepare", "stage", "activate", "abort", "retire", "keepalive"})


class WholePort(MembershipPort):
    """A node as the real driver wires it."""

    def begin(self, mesh: "WholeMesh") -> None:
        """After the first row: the cores get the process start that the row states."""
        assert self.core.own_row is not None
        self.whole, self.instance = mesh, Instance(self.core.own_row.instance)
        self.node_id, self.copy = NodeId(self.name), 0
        self.shown: tuple[MemberFacts, ...] = ()
        self.rows: dict[str, NodeRow] = {}
        self.routes: dict[Slot, NodeId] = {}
        self.loads: dict[tuple[Slot, PlanEpoch], int] = {}
        self.look_at_us, self.facts = 0, ()
        self.coordinator_due_us: int | None = 0
        self.agent_due_us: int | None = 0
        self.stale = True
        """An input may have moved the deadlines of coordinator and agent: asked again before they are used, as the driver does."""
        memory = mesh.memory[self.number]
        self.agent = StageAgent(
            node_id=self.name,
            instance=self.instance,
            restored=dict(mesh.records[self.number]),
            usable_memory_bytes=memory - -(-memory // 10),
            now_us=self.now_us,
        )
        self.coordinator = Coordinator(
            node_id=self.name,
            instance=self.instance,
            last_term=mesh.terms[self.number],
            election=ElectionSettings(),
            assignment=AssignmentSettings(),
            replan=ReplanSettings(),
            planner=PlannerSettings(context_length=4096, parallel_lanes=1, search_budget_ms=5),
            random=Random(f"{mesh.seed} {self.number}"),
            now_us=self.now_us,
        )
        self.frames = FrameStages(self, self.agent, mesh.paths, mesh.counts, self.reach)
        self.carry(self.coordinator.serve(mesh.specs, self.now_us))
        self.look()

    def excluded(self) -> set[str]:
        """Nobody: this mesh has no operator."""
        return set()

    def publish_whole(self) -> None:
        memory = self.whole.memory[self.number]
        device = DeviceFact(
            name="cpu", kind="cpu", memory_bytes=memory, memory_bandwidth_bytes_per_s=20 * 10**9, source="measured"
        )
        self.facts = self.agent.facts(self.now_us)
        self.publish(
            detected_memory_bytes=memory,
            devices=(device,),
            stages=self.facts,
            max_term=self.coordinator.snapshot(self.now_us).term,
        )

    def look(self) -> None:
        """Row out, membership in."""
        self.look_at_us = self.now_us + SECOND
        if self.facts != self.agent.facts(self.now_us) or not self.core.own_row.devices:
            self.publish_whole()
        facts = self.shown = tuple(facts_of(member) for member in self.core.members().values())
        if self.whole.checked:
            for fact in facts:
                self.whole.checkers.row_taken(self, fact.row, self.rows.get(fact.node_id))
            self.rows = {fact.node_id: fact.row for fact in facts}
        self.agent.on_members(frozenset(each.node_id for each in facts if each.connected))
        self.core.request_measurements(partners(facts, NodeId(self.name)))
        self.carry(self.coordinator.on_members(facts, self.now_us))
        self.coordinator.validate()
        self.agent.validate()

    def carry_out(self, effects: list[Any]) -> None:
        super().carry_out(effects)
        if any(isinstance(effect, MemberChanged) for effect in effects) and hasattr(self, "coordinator"):
            self.look_at_us = self.now_us

    def on_message(self, sender: str, message: Any, lane: str, now_us: int) -> None:
        if message.startswith(FRAME_MAGIC):
            self.frames.receive(NodeId(sender), message)
            self.network.arm(self.name)
            return
        decoded: Any = decode(message)
        if decoded.type in REPLIES:
            self.carry(self.coordinator.on_reply(NodeId(sender), decoded, now_us))
        elif decoded.type in CLAIMS:
            self.carry(self.agent.on_message(NodeId(sender), decoded, now_us))
            self.look_at_us = now_us
        else:
            super().on_message(sender, message, lane, now_us)
        self.network.arm(self.name)

    def on_timer(self, now_us: int) -> None:
        if self.core.next_deadline() is not None and self.core.next_deadline() <= now_us:
            super().on_timer(now_us)
        if now_us >= self.look_at_us:
            self.look()
        if self.agent_due_us is not None and self.agent_due_us <= now_us:
            self.carry(self.agent.on_timer(now_us))
        if self.coordinator_due_us is not None and self.coordinator_due_us <= now_us:
            self.carry(self.coordinator.on_timer(now_us))

    def next_deadline(self) -> int | None:
        due = [self.core.next_deadline()]
        if hasattr(self, "coordinator"):
            if self.stale:
                self.stale, self.agent_due_us = False, self.agent.next_deadline()
                self.coordinator_due_us = self.coordinator.next_deadline(self.now_us)
            due += [self.look_at_us, self.agent_due_us, self.coordinator_due_us]
        return min((each for each in due if each is not None), default=None)

    def carry(self, effects: list[Any]) -> None:
        """In order; what comes behind a durable write waits for it."""
        self.stale = True
        for place, effect in enumerate(effects):
            self._carry_one(effect)
            if isinstance(effect, stage.Persist) and effects[place + 1 :]:
                self._after(WRITE_US, lambda rest=effects[place + 1 :]: self.carry(rest))
                break
        if self.whole.checked:
            self.whole.checkers.after(self)
        self.network.arm(self.name)

    def reach(self, peer: str, raw: bytes) -> None:
        """Over the connection; without one, dial first: of a hundred nodes not everybody is connected to everybody."""
        if peer in self.network.hosts[self.name].links:
            self.network.send(self.name, peer, raw, "stream")
            return
        self.network.dial(self.name, self.network.hosts[peer].address)
        self._after(DIAL_US, lambda: self.network.send(self.name, peer, raw, "stream"))

    def _carry_one(self, effect: Any) -> None:
        if self.whole.checked:
            self.whole.checkers.effect(self, effect)
        match effect:
            case chief.Send(peer, message) | stage.Reply(peer, message):
                if peer == self.name:
                    self._after(0, lambda: self.on_message(self.name, encode(message), "stream", self.now_us))
                else:
                    self.reach(peer, encode(message))
            case chief.PersistTerm(term):
                self.whole.terms[self.number] = term
                self._after(WRITE_US, lambda: self.carry(self.coordinator.on_term_persisted(term, self.now_us)))
            case chief.ComputePlan(request_id, _, problem):
                self._after(
                    PLAN_US, lambda: self.carry(self.coordinator.on_planned(request_id, plan(problem), self.now_us))
                )
            case chief.Decided(decision):
                self.whole.decisions.append((self.network.now_us, self.name, decision))
            case stage.Persist(slot, record):
                self.whole.records[self.number][slot] = record
            case chief.Route(slot, node_id, _):
                self.routes.pop(slot, None)
                if node_id is not None:
                    self.routes[slot] = node_id
            case stage.Load(slot, ballot, assignment, reuse):
                shared = None if reuse is None else self.loads.get((slot, reuse))
                self.loads[slot, ballot] = self.whole.load(assignment.required_bytes) if shared is None else shared
                self._after(self.whole.load_us, lambda: self._runtime(stage.Loaded(slot, ballot)))
            case stage.ActivateRuntime(slot, ballot, assignment):
                self.frames.activate(slot, ballot, assignment, self.loads[slot, ballot])
            case stage.Unload(slot, ballot):
                self._after(self.whole.unload_us, lambda: self._runtime(stage.Unloaded(slot, ballot)))

    def _runtime(self, event: Any) -> None:
        label = (event.slot, event.ballot)
        if isinstance(event, stage.Unloaded):
            weights = self.loads.pop(label, None)
            if weights is not None and weights not in self.loads.values():
                self.frames.gone(weights)
        elif label not in self.loads:
            return
        else:
            self.whole.checkers.loads_of(self).loaded(*label)
        self.carry(self.agent.on_runtime(event, self.now_us))
        self.look_at_us = self.now_us

    def _after(self, delay_us: int, action: Any) -> None:
        life = self.network.hosts[self.name].life

        def run() -> None:
            if self.network.hosts[self.name].life == life:
                action()
                self.network.arm(self.name)

        self.network.at(self.network.now_us + delay_us, run)


class WholeMesh(Mesh):
    """Nodes with the same memory each; one model."""

    def __init__(
        self,
        nodes: int,
        seed: int,
        memory: int,
        specs: tuple[ServedModelSpec, ...],
        settings: MembershipSettings | None = None,
        *,
        checked: bool = True,
    ) -> None:
        super().__init__(nodes, seed, settings=settings)
        self.checked = checked
        self.checkers, self.paths = Checkers(self), Paths()
        self.counts: Counter[str] = Counter()
        self.cloned: set[NodeId] = set()
        self.sizes: dict[int, int] = {}
        """By load: bytes."""
        self.memory = dict.fromkeys(self.numbers, memory)
        self.specs = specs
        self.load_us, self.unload_us = LOAD_US, SECOND
        self.decisions: list[tuple[int, NodeId, chief.Decision]] = []
        """When, at whose coordinator, what."""
        self.terms = dict.fromkeys(self.numbers, 0)
        self.records: dict[int, dict[Any, Any]] = {number: {} for number in self.numbers}
        if checked:
            self._request()

    def _request(self) -> None:
        """Clients ask whatever a coordinator routes to."""
        for port in self.live():
            for slot, node_id in port.routes.items():
                for target in self.live():
                    if target.name == node_id:
                        target.frames.begin(slot)
        self.network.at(self.network.now_us + REQUEST_US, self._request)

    def usable_bytes(self, node_id: NodeId) -> int:
        memory = self.memory[self.ids.index(node_id)]
        return memory - -(-memory // 10)

    def load(self, size: int) -> int:
        """The number of a new load."""
        self.sizes[len(self.sizes)] = size
        return len(self.sizes) - 1

    def live(self) -> list[WholePort]:
        return [port for port in self.ports.values() if isinstance(port, WholePort)]

    def start(self, number: int, *, seeds: tuple[str, ...] | None = None) -> WholePort:
        port = WholePort(self, number, tuple(each for each in seeds or self.seeds if each != self.address(number)))
        self.ports[number] = port
        self.network.start(port.name, port)
        port.publish()
        port.begin(self)
        return port

    def chiefs(self) -> list[WholePort]:
        """Who believes to coordinate."""
        return [port for port in self.live() if port.coordinator.snapshot(port.now_us).role == "coordinator"]

    def serving(self) -> tuple[NodeId, ...]:
        """Nodes of the plan that the only coordinator routes to and whose agents all serve it; else empty."""
        chiefs = self.chiefs()
        if len(chiefs) != 1:
            return ()
        (item,) = chiefs[0].coordinator.snapshot(chiefs[0].now_us).slots
        agents = {port.name: port.agent for port in self.live()}
        active = {name: agent.record(item.slot).active for name, agent in agents.items()}
        whole = item.routable and all(
            active.get(node_id) is not None and active[node_id].ballot == item.ballot for node_id in item.nodes
        )
        return item.nodes if whole else ()
