"""The invariants of the protocol, checked from outside after every event of a simulated mesh.

Nothing here reads a core's private state: agents are judged by their durable word, their effects and their messages.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.assignment.effects import ComputePlan, Decided, Decision, Route, Send
from coordinator.assignment.snapshot import SlotSnapshot
from coordinator.planner.participants import participant_set_hash
from coordinator.planner.problem import PlanningProblem, PlanRequest
from protocol.ballots import Activate, Active, Prepare, Promise, Ready, Stage, StageAssignment
from protocol.fencing import NO_EPOCH, PlanEpoch, epoch_from_wire
from protocol.ids import Instance, NodeId, Slot
from protocol.rows import NodeRow
from protocol.stage_frame import RequestEpoch
from stage_agent.stage import effects as stage
from tests.simulation.ballot_load_checks import LoadChecks

if TYPE_CHECKING:
    from tests.simulation.ballot_mesh import BallotMesh
    from tests.simulation.ballot_process import Process


class ViolationError(AssertionError):
    """An invariant does not hold; the text names it."""


class Checkers:
    def __init__(self, mesh: "BallotMesh") -> None:
        self.mesh = mesh
        self.completed_by_slot: Counter[str] = Counter()
        self.completed_from: Counter[tuple[str, str]] = Counter()
        """By model and the node of its stage 0."""
        self.activations = 0
        self.rounds = 0
        self._promised: dict[tuple[str, str, int], PlanEpoch] = defaultdict(lambda: NO_EPOCH)
        self._active: dict[tuple[str, str, int], PlanEpoch] = defaultdict(lambda: NO_EPOCH)
        self._said: dict[tuple[str, str, int], PlanEpoch] = defaultdict(lambda: NO_EPOCH)
        self._hashes: dict[tuple[str, PlanEpoch], str] = {}
        self._instances: dict[tuple[str, PlanEpoch], dict[str, str]] = defaultdict(dict)
        self._participants: dict[tuple[str, PlanEpoch], tuple[str, ...]] = {}
        self._parts: dict[tuple[str, PlanEpoch], dict[int, StageAssignment]] = defaultdict(dict)
        self._loads: dict[Instance, LoadChecks] = {}
        self._round_hash: dict[tuple[Instance, str], str] = {}
        self._activated_under: dict[tuple[Instance, str], tuple[str, str]] = {}
        """By coordinator and slot: the last plan that it activated, and its participant hash then."""
        self._questions: dict[tuple[Instance, str], tuple[str, set[str]]] = {}
        """By coordinator and slot: of the last question, its participants' hash and that of every question about them."""
        self._prepared: dict[tuple[str, PlanEpoch], str] = {}
        self._ready: set[tuple[str, PlanEpoch, str, str]] = set()
        self._confirmed: set[tuple[str, PlanEpoch, str]] = set()
        self._asked: dict[tuple[str, str], tuple[Any, PlanEpoch]] = {}
        self._newest: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """By process, plan and flow: how far the newest frame was that it applied."""

    @property
    def completed_requests(self) -> int:
        """Over all models."""
        return self.completed_by_slot.total()

    def fail(self, what: int | str, text: str) -> None:
        """``what``: the invariant's number, or the name of a rule that is not one of them."""
        raise ViolationError(f"invariant {what}: {text}")

    def loads_of(self, process: "Process") -> LoadChecks:
        """What is known of the loads of one process."""
        return self._loads.setdefault(process.instance, LoadChecks())

    # -- effects

    def effect(self, process: "Process", effect: Any) -> None:
        match effect:
            case Send(_, message):
                self._coordinator_says(process, message)
            case stage.Reply(_, message):
                self._agent_says(process, message)
            case stage.Load() | stage.Unload() | stage.ActivateRuntime():
                self._one_epoch(process, self.loads_of(process).told(effect))
            case Decided(decision):
                self._decided(process, decision)
            case ComputePlan(_, slot, problem):
                self._round(process, slot, problem)
            case Route(slot, node_id, ballot) if node_id is not None:
                missing = [
                    peer
                    for peer in self._participants.get((slot, ballot), ())
                    if (slot, ballot, peer) not in self._confirmed
                ]
                if missing:
                    self.fail(3, f"{process.node_id} routes {slot} at {ballot} before {missing} confirmed")

    def _coordinator_says(self, process: "Process", message: Any) -> None:
        slot, ballot = message.slot, epoch_from_wire(message.ballot)
        if isinstance(message, Prepare):
            self._asked_for(process, slot, ballot, message.participant_set_hash)
            return
        if isinstance(message, Stage):
            self._one_hash(slot, ballot, message.plan_hash)
            known = self._participants.setdefault((slot, ballot), message.participants)
            if known != message.participants:
                self.fail(2, f"two participant lists at {ballot}")
            self._instances[slot, ballot][message.assignment.node_id] = message.assignment.instance
            self._usable_nodes(process, message.participants)
            self._parts[slot, ballot][message.assignment.stage_index] = message.assignment
        if isinstance(message, Activate):
            self._whole(slot, ballot)
            for peer in self._participants[slot, ballot]:
                instance = self._instances[slot, ballot].get(peer, "?")
                if (slot, ballot, peer, instance) not in self._ready:
                    self.fail(3, f"{process.node_id} activates {ballot} although {peer} is not ready")

    def _asked_for(self, process: "Process", slot: str, ballot: PlanEpoch, participant_hash: str) -> None:
        """A ballot's plan is the answer to what its coordinator asked last, and its promises are for those participants."""
        if participant_hash not in self._questions.get((process.instance, slot), ("", set()))[1]:
            self.fail(8, f"{process.node_id} prepares {slot} {ballot} for participants that it did not plan with")
        known = self._prepared.setdefault((slot, ballot), participant_hash)
        if known != participant_hash:
            self.fail(2, f"{process.node_id} prepares {slot} {ballot} for other participants than somebody before")

    def _whole(self, slot: str, ballot: PlanEpoch) -> None:
        """What is about to serve has every layer once, in order, each part within its node's memory."""
        parts, position = sorted(self._parts[slot, ballot].items()), 0
        for index, (number, part) in enumerate(parts):
            if number != index or part.layer_start != position or part.layer_end <= position:
                self.fail(9, f"{slot} {ballot} has [{part.layer_start}, {part.layer_end}) after layer {position}")
            if part.required_bytes > self.mesh.usable_bytes(NodeId(part.node_id)):
                self.fail(9, f"{slot} {ballot} needs {part.required_bytes} bytes at {part.node_id}")
            position = part.layer_end
        if position != self._layers(slot, position):
            self.fail(9, f"{slot} {ballot} ends at layer {position} of {self._layers(slot, position)}")

    def _layers(self, slot: str, otherwise: int) -> int:
        """``otherwise`` for a model that a test serves behind the mesh's back."""
        return next((len(spec.package.layers) for spec in self.mesh.specs if spec.slot == slot), otherwise)

    def _one_epoch(self, process: "Process", problem: str) -> None:
        if problem:
            self.fail(4, f"{process.node_id} {problem}")

    def _usable_nodes(self, process: "Process", participants: tuple[str, ...]) -> None:
        facts = {member.node_id: member for member in process.shown}
        unwanted = process.excluded()
        for peer in participants:
            if peer in unwanted:
                self.fail(7, f"{process.node_id} stages on {peer}, which it knows to be excluded")
            if peer in self.mesh.cloned:
                continue  # two rows of one id take turns
            member = facts.get(peer)
            if member is None or member.state in {"dead", "left"} or member.row.status != "running":
                state = "unknown" if member is None else f"{member.state} {member.row.status}"
                self.fail(7, f"{process.node_id} stages on {peer}, which it sees as {state}")

    def _agent_says(self, process: "Process", message: Any) -> None:
        ballot, key = epoch_from_wire(message.ballot), (process.node_id, message.slot, process.copy)
        if isinstance(message, Promise):
            self._said[key] = max(self._said[key], ballot)
        elif isinstance(message, Ready | Active):
            if ballot < self._said[key]:
                self.fail(1, f"{process.node_id} says {message.type} at {ballot} after promising {self._said[key]}")
            self._one_hash(message.slot, ballot, message.plan_hash)
            if isinstance(message, Ready):
                self._ready.add((message.slot, ballot, process.node_id, message.instance))
            else:
                self._confirmed.add((message.slot, ballot, process.node_id))
                self.activations += 1

    def _one_hash(self, slot: str, ballot: PlanEpoch, plan_hash: str) -> None:
        known = self._hashes.setdefault((slot, ballot), plan_hash)
        if known != plan_hash:
            self.fail(2, f"two plans at {ballot}: {known[:8]} and {plan_hash[:8]}")

    def _round(self, process: "Process", slot: str, problem: PlanningProblem) -> None:
        """A healthy plan is reconsidered only for a reason other than noise."""
        self.rounds += 1
        among = participant_set_hash(replace(problem, request=PlanRequest()))
        if self._questions.get((process.instance, slot), ("", ()))[0] != among:
            self._questions[process.instance, slot] = among, set()
        self._questions[process.instance, slot][1].add(participant_set_hash(problem))
        if problem.request.locked is not None:
            return
        self._round_hash[process.instance, slot] = participant_set_hash(problem)
        state = next(item for item in process.coordinator.snapshot(process.now_us).slots if item.slot == slot)
        capacities = tuple(
            (
                node.node_id,
                node.detected_memory_bytes,
                node.runtime_headroom_bytes,
                node.signals_trusted,
                node.observed_decode_us_per_layer,
            )
            for node in problem.participants
        )
        serious = capacities, replace(problem.request, incumbent=())  # an operator's order changes what is asked
        key = (process.instance, slot)
        if state.routable and state.ballot is not None:
            evaluated, before = state.plan is not None, self._asked.get(key)
            if evaluated and before == (serious, state.ballot) and not _may_recheck(process, slot, process.now_us):
                self.fail(8, f"{process.node_id} plans {slot} again although only noise changed")
            self._asked[key] = (serious, state.ballot)

    def _decided(self, process: "Process", decision: Decision) -> None:
        """A plan that serves is not replaced under the participant hash that it was activated under."""
        damped = "half-way" in decision.reason  # a move in several steps on purpose, all asked for by one input
        hashed = self._round_hash.get((process.instance, decision.slot), "")
        if decision.kind == "activated" and hashed:
            self._activated_under[process.instance, decision.slot] = decision.new_plan, hashed
        if decision.kind == "planned" and decision.reason.startswith("changed") and not damped:
            known = self._activated_under.get((process.instance, decision.slot))
            if decision.new_plan != decision.old_plan and known == (decision.old_plan, hashed):
                self.fail(
                    8,
                    f"{process.node_id} replaces the plan of {decision.slot} under one participant hash: {decision.reason}",
                )

    # -- rows, frames, state

    def row_taken(self, process: "Process", row: NodeRow, known: NodeRow | None) -> None:
        if known is not None and (row.boot_counter, row.seq) < (known.boot_counter, known.seq):
            if row.node_id in self.mesh.cloned:
                return
            self.fail("rows", f"{process.node_id} goes back to an older row of {row.node_id}")

    def completed(self, slot: str, trail: tuple[Any, ...], *further: tuple[Any, ...]) -> None:
        """A request was answered: the path of its first token through the stages, and those of its further ones."""
        self.completed_by_slot[slot] += 1
        self.completed_from[slot, trail[0][0]] += 1
        every = [part for path in (trail, *further) for part in path]
        epochs, hashes = {part[1] for part in every}, {part[2] for part in every}
        if len(epochs) > 1 or len(hashes) > 1:
            self.fail(3, f"a request of {slot} ran at {len(epochs)} epochs and {len(hashes)} plans")
        for path in (trail, *further):
            self._whole_path(slot, path)

    def _whole_path(self, slot: str, trail: tuple[Any, ...]) -> None:
        position = 0
        for node_id, _, _, start, end in trail:
            if start != position:
                self.fail(9, f"a request of {slot} jumped from layer {position} to {start} at {node_id}")
            position = end
        if position != self._layers(slot, position):
            self.fail(9, f"a request of {slot} ended at layer {position} of {self._layers(slot, position)}")

    def frame(
        self, process: "Process", slot: Slot, epoch: PlanEpoch, part: StageAssignment, request: RequestEpoch | None
    ) -> None:
        """An accepted frame of ``epoch`` is about to run through ``part``; ``None``: an answer, compared with what is awaited."""
        self._one_epoch(process, self.loads_of(process).frame(slot, epoch, part.layer_start, part.layer_end))
        if request is None:
            return
        if request.request_id < part.first_request_id:
            self.fail("frames", f"{process.node_id} applies a frame of a request from before its plan {epoch}")
        flow = (process.instance, slot, epoch, request.request_id, request.session_id)
        newest, progress = self._newest.get(flow, (0, 0, 0)), tuple(request)[2:]
        if progress < newest:
            self.fail("frames", f"{process.node_id} applies a frame at {progress} after one at {newest} of its flow")
        self._newest[flow] = progress

    def after(self, process: "Process") -> None:
        process.agent.validate()
        process.coordinator.validate()
        self._one_epoch(process, self.loads_of(process).after(process))
        used = sum(self.mesh.sizes[weights] for weights in set(process.loads.values()))
        if used > self.mesh.usable_bytes(process.node_id):
            self.fail(4, f"{process.node_id} holds {used} bytes of {self.mesh.usable_bytes(process.node_id)}")
        for spec in self.mesh.specs:
            record, key = process.agent.record(spec.slot), (process.node_id, spec.slot, process.copy)
            if record.promised < self._promised[key]:
                self.fail(1, f"{process.node_id} promised {self._promised[key]}, now {record.promised}")
            if record.last_active < self._active[key]:
                self.fail(1, f"{process.node_id} was active at {self._active[key]}, now {record.last_active}")
            if record.promised < self._said[key]:
                self.fail(1, f"{process.node_id} said it promised {self._said[key]}, but knows only {record.promised}")
            self._promised[key], self._active[key] = record.promised, record.last_active
            if record.active is not None:
                self._one_hash(spec.slot, record.active.ballot, record.active.plan_hash)

    # -- after healing

    def backs_off(self, among: "list[Process] | None" = None) -> bool:
        """Whoever coordinates says that it leaves out a node for its past: it flapped, or it failed a load."""
        live = self.mesh.live() if among is None else among
        views = [process.coordinator.snapshot(process.now_us) for process in live]
        chiefs = [view for view in views if view.role == "coordinator"]
        return any("settling" in view.left_out.values() or any(slot.left_out for slot in view.slots) for view in chiefs)

    def converged(
        self, among: "list[Process] | None" = None, excused: Callable[[SlotSnapshot], bool] = lambda _: False
    ) -> str:
        """Empty when every live node agrees on one coordinator and one whole plan per model; else what is missing.

        ``among``: those to look at. ``excused``: models that serve nowhere and need not.
        """
        live = self.mesh.live() if among is None else among
        views = [process.coordinator.snapshot(process.now_us) for process in live]
        leaders = {view.canonical for view in views}
        if len(leaders) != 1:
            return f"coordinators {sorted(map(str, leaders))}"
        leader = leaders.pop()
        own = next((view for process, view in zip(live, views, strict=True) if process.node_id == leader), None)
        if own is None or own.role != "coordinator":
            return f"{leader} does not coordinate"
        for item in own.slots:
            if not item.routable or item.ballot is None:
                if excused(item):
                    continue
                return f"{item.slot} is {item.state} at {leader}: {item.lost} {item.refused}"
            serving = {
                process.node_id: held.ballot
                for process in live
                if (held := process.agent.record(item.slot).active) is not None
            }
            stray = {node_id: ballot for node_id, ballot in serving.items() if ballot != item.ballot}
            if stray:
                return f"{item.slot}: {item.ballot} serves, but also {stray}"
            if set(serving) != set(item.nodes):
                return f"{item.slot}: {sorted(serving)} serve, the plan has {sorted(item.nodes)}"
            # A record outlives the load: the coordinator may not have heard yet that a stage died or its node restarted.
            idle = {
                process.node_id: fact.state
                for process in live
                for fact in process.agent.facts(process.now_us)
                if process.node_id in serving and fact.slot == item.slot and fact.state != "serving"
            }
            if idle:
                return f"{item.slot}: {item.ballot} is not loaded: {idle}"
        return ""


def _may_recheck(process: "Process", slot: str, now_us: int) -> bool:
    """A verdict of ``dwell`` is looked at again once the dwell is over; a move that failed or was refused is tried again."""
    decisions = process.coordinator.snapshot(now_us).decisions
    kinds = {"kept", "activated", "adopted", "broken", "attempt_failed", "refused"}
    kept = [decision for decision in decisions if decision.kind in kinds and decision.slot == slot]
    return not kept or kept[-1].reason in {"dwell", "not_amortised"} or kept[-1].kind != "kept"
