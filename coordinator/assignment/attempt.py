"""One ballot's way to a serving plan: preparing → loading → activating → done, or failed at any point.

``Activate`` is sent only after ``Ready`` came from the live instance of *every* participant, to the last stage first, each
next one only after the ``Active`` of the one behind it, stage 0 last. Everything is repeated until answered or given up:
all messages are idempotent at the agent. A failed attempt sends ``Abort`` to everybody and names its culprits; it never
tries another plan under the same ballot.

When some participant cannot hold the old and the new load at once, the old plan is retired there before staging (break
before make); a ``Stage`` that overtakes the retirement is refused for memory and simply repeated.
"""

from dataclasses import dataclass
from typing import Final, Literal, assert_never

from config.settings import AssignmentSettings
from coordinator.assignment.assignments import assignments_of, keeps_load
from coordinator.assignment.effects import Effect, Route, Send
from coordinator.assignment.running import Former, RunningPlan, RunningStage
from coordinator.planner.plan import Plan
from coordinator.view import ClusterView
from protocol.ballots import (
    Abort,
    Activate,
    Active,
    BallotReply,
    Nack,
    Prepare,
    Promise,
    Ready,
    Retire,
    Stage,
    StageAssignment,
    StageProgress,
)
from protocol.fencing import PlanEpoch, epoch_from_wire, epoch_to_wire
from protocol.ids import Instance, NodeId, Slot, Term

PREPARE_TRIES = 3
ACTIVATE_TRIES = 5
ROOM_TRIES = 10
"""Refusals for memory that are repeated after a retirement, while the agent unloads."""

Phase = Literal["preparing", "loading", "activating", "done", "failed"]
CULPRIT_REASONS = frozenset(
    {
        "insufficient_memory",
        "model_mismatch",
        "range_invalid",
        "engine_mismatch",
        "load_failed",
        "draining",
        "state_unavailable",
    }
)


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Why, who is to be left out for a while, and what was learned."""

    reason: str
    culprits: tuple[NodeId, ...] = ()
    learned_term: Term = 0
    retry_after_us: int = 0
    contested: bool = False
    """Another ballot is in the way: back off before the next one."""


class Attempt:
    """Drives ``plan`` under ``ballot``. Ask ``outcome`` after every call."""

    def __init__(
        self,
        *,
        slot: Slot,
        source: str,
        ballot: PlanEpoch,
        plan: Plan,
        running: RunningPlan | None,
        settings: AssignmentSettings,
        force: bool = False,
        former: Former | None = None,
    ) -> None:
        self.slot: Final = slot
        self.ballot: Final = ballot
        self.plan: Final = plan
        self.phase: Phase = "preparing"
        self.outcome: RunningPlan | AttemptFailed | None = None
        self.retired: frozenset[NodeId] = frozenset()
        """Where the old plan was retired to make room: it does not serve any more."""
        self._source: Final = source
        self._running: Final = running
        self._settings: Final = settings
        self._force: Final = force
        self._former: Final = former
        self._nodes: Final = tuple(NodeId(stage.node_id) for stage in plan.stages)
        self._promises: dict[NodeId, Promise] = {}
        self._assignments: dict[NodeId, StageAssignment] = {}
        self._ready: dict[NodeId, Instance] = {}
        self._active: dict[NodeId, Instance] = {}
        self._loaded_bytes: dict[NodeId, int] = {}
        self._load_due_us: dict[NodeId, int] = {}
        self._room_tries: dict[NodeId, int] = {}
        self._instances: dict[NodeId, Instance] = {}
        """Process starts as the rows said at first: a row that lags behind a promise is not a restart."""
        self._tries = 0
        self._next_us = 0

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Participants in stage order."""
        return self._nodes

    @property
    def progress(self) -> tuple[int, int]:
        """Loaded and total bytes over all participants."""
        total = sum(stage.parameter_bytes for stage in self.plan.stages)
        loaded = sum(
            stage.parameter_bytes if stage.node_id in self._ready else self._loaded_bytes.get(NodeId(stage.node_id), 0)
            for stage in self.plan.stages
        )
        return min(loaded, total), total

    def start(self, now_us: int) -> list[Effect]:
        """The term has been persisted: ask for promises."""
        return self._ask_promises(now_us)

    def next_deadline(self) -> int | None:
        """When something is repeated or given up."""
        if self.outcome is not None:
            return None
        return min([self._next_us, *self._load_due_us.values()])

    def on_view(self, view: ClusterView, now_us: int, excluded: frozenset[NodeId] = frozenset()) -> list[Effect]:
        """A participant that is gone, restarted, stopping or excluded by an operator ends the attempt at once."""
        if self.outcome is not None:
            return []
        for node_id in self._nodes:
            member = view.members.get(node_id)
            if member is None or not member.connected:
                return self._fail(AttemptFailed(f"{node_id} was lost"), now_us)
            promise, seen = self._promises.get(node_id), Instance(member.row.instance)
            known = {self._instances.setdefault(node_id, seen), None if promise is None else promise.instance}
            if promise is not None and seen not in known:
                return self._fail(AttemptFailed(f"{node_id} restarted"), now_us)
            status = "excluded" if node_id in excluded else member.row.status
            if status != "running" or member.conflict:
                return self._fail(AttemptFailed(f"{node_id} is {status}"), now_us)
        return []

    def on_reply(self, sender: NodeId, message: BallotReply, now_us: int) -> list[Effect]:
        """An agent's answer. Answers of other ballots, strangers and finished attempts change nothing."""
        if self.outcome is not None or sender not in self._nodes or epoch_from_wire(message.ballot) != self.ballot:
            return []
        match message:
            case Promise():
                return self._on_promise(sender, message, now_us)
            case StageProgress():
                return self._on_progress(sender, message, now_us)
            case Ready():
                return self._on_ready(sender, message, now_us)
            case Active():
                return self._on_active(sender, message, now_us)
            case Nack():
                return self._on_nack(sender, message, now_us)
            case _:
                assert_never(message)

    def on_timer(self, now_us: int) -> list[Effect]:
        """Repeat what is unanswered; give up what has waited too long."""
        if self.outcome is not None:
            return []
        if self.phase == "loading":
            late = tuple(node_id for node_id, due in self._load_due_us.items() if now_us >= due)
            if late:
                return self._fail(AttemptFailed("no load progress before the deadline", late), now_us)
        if now_us < self._next_us:
            return []
        if self.phase == "preparing":
            silent = tuple(node_id for node_id in self._nodes if node_id not in self._promises)
            if self._tries >= PREPARE_TRIES:
                return self._fail(AttemptFailed("no promise in time", silent), now_us)
            return self._ask_promises(now_us)
        if self.phase == "loading":
            return self._stage_waiting(now_us)
        if self._tries >= ACTIVATE_TRIES:
            silent = tuple(node_id for node_id in self._nodes if node_id not in self._active)[-1:]
            return self._fail(AttemptFailed("no confirmation of activation in time", silent), now_us)
        return self._activate_next(now_us)

    def give_up(self, reason: str, now_us: int) -> list[Effect]:
        """This node does not coordinate any more, or the model is not wanted any more."""
        return [] if self.outcome is not None else self._fail(AttemptFailed(reason), now_us)

    # ------------------------------------------------------------------ preparing

    def _ask_promises(self, now_us: int) -> list[Effect]:
        self._tries += 1
        self._next_us = now_us + self._settings.reply_timeout_us
        prepare = Prepare(
            ballot=epoch_to_wire(self.ballot),
            slot=self.slot,
            participant_set_hash=self.plan.participant_set_hash,
            force=self._force,
        )
        return [Send(node_id, prepare) for node_id in self._nodes if node_id not in self._promises]

    def _on_promise(self, sender: NodeId, message: Promise, now_us: int) -> list[Effect]:
        if self.phase != "preparing":
            return []
        self._promises[sender] = message
        if len(self._promises) < len(self._nodes):
            return []
        return self._begin_loading(now_us)

    def _begin_loading(self, now_us: int) -> list[Effect]:
        """Judge memory by the promises, make room where needed, then stage everywhere."""
        short: list[NodeId] = []
        cramped: list[NodeId] = []
        for stage in self.plan.stages:
            node_id = NodeId(stage.node_id)
            promise = self._promises[node_id]
            if self._keeps(node_id) or stage.required_bytes <= promise.usable_memory_bytes:
                continue
            room = promise.usable_memory_bytes + promise.replaceable_bytes
            (cramped if stage.required_bytes <= room else short).append(node_id)
        if short:
            return self._fail(AttemptFailed("insufficient_memory", tuple(short)), now_us)
        self._assignments = assignments_of(
            self.plan,
            slot=self.slot,
            source=self._source,
            ballot=self.ballot,
            promises=self._promises,
            running=self._running,
            settings=self._settings,
            former=self._former,
        )
        self.phase = "loading"
        for node_id in self._nodes:
            self._load_due_us[node_id] = now_us + self._assignments[node_id].load_deadline_us
        effects: list[Effect] = []
        if cramped:
            effects += self._make_room(cramped)
        return effects + self._stage_waiting(now_us)

    def _keeps(self, node_id: NodeId) -> bool:
        promise, running = self._promises[node_id], self._running
        if running is None or promise.active is None or epoch_from_wire(promise.active) != running.ballot:
            return False
        if not promise.keeps_loads:
            return False
        member = next((stage for stage in running.stages if stage.node_id == node_id), None)
        if member is None or member.instance != promise.instance:
            return False
        stage = next(stage for stage in self.plan.stages if stage.node_id == node_id)
        return keeps_load(stage, self.plan, running)

    def _make_room(self, cramped: list[NodeId]) -> list[Effect]:
        """The old plan stops serving as a whole; only the nodes without room have to unload it."""
        self.retired = frozenset(cramped)
        effects: list[Effect] = []
        if self._running is not None:
            effects.append(Route(self.slot, None, self._running.ballot))
        for node_id in cramped:
            active = self._promises[node_id].active
            if active is not None:
                retire = Retire(
                    ballot=active,
                    slot=self.slot,
                    superseded_by=epoch_to_wire(self.ballot),
                    reason="room for a new plan",
                )
                effects.append(Send(node_id, retire))
        return effects

    # ------------------------------------------------------------------ loading

    def _stage_waiting(self, now_us: int) -> list[Effect]:
        self._next_us = now_us + self._settings.reply_timeout_us
        effects: list[Effect] = []
        for node_id in self._nodes:
            if node_id in self._ready:
                continue
            stage = Stage(
                ballot=epoch_to_wire(self.ballot),
                slot=self.slot,
                plan_hash=self.plan.plan_hash,
                assignment=self._assignments[node_id],
                participants=self._nodes,
            )
            effects.append(Send(node_id, stage))
        return effects

    def _on_progress(self, sender: NodeId, message: StageProgress, now_us: int) -> list[Effect]:
        if self.phase == "loading" and message.loaded_bytes > self._loaded_bytes.get(sender, 0):
            self._loaded_bytes[sender] = message.loaded_bytes
            self._load_due_us[sender] = now_us + self._assignments[sender].load_deadline_us
        return []

    def _on_ready(self, sender: NodeId, message: Ready, now_us: int) -> list[Effect]:
        if self.phase != "loading" or message.plan_hash != self.plan.plan_hash:
            return []
        if message.instance != self._promises[sender].instance:
            return self._fail(AttemptFailed(f"{sender} restarted"), now_us)
        self._ready[sender] = Instance(message.instance)
        self._load_due_us.pop(sender, None)
        return self._when_ready(now_us)

    def _when_ready(self, now_us: int) -> list[Effect]:
        if not self.all_ready():
            return []
        self.phase, self._tries = "activating", 0
        return self._activate_next(now_us)

    def all_ready(self) -> bool:
        """Every participant of the plan has said ``Ready``: the only thing that allows ``Activate``."""
        return len(self._ready) == len(self._nodes)

    # ------------------------------------------------------------------ activating

    def _activate_next(self, now_us: int) -> list[Effect]:
        self._tries += 1
        self._next_us = now_us + self._settings.reply_timeout_us
        node_id = next(node_id for node_id in reversed(self._nodes) if node_id not in self._active)
        activate = Activate(
            ballot=epoch_to_wire(self.ballot),
            slot=self.slot,
            plan_hash=self.plan.plan_hash,
            instance=self._promises[node_id].instance,
        )
        return [Send(node_id, activate)]

    def _on_active(self, sender: NodeId, message: Active, now_us: int) -> list[Effect]:
        if self.phase != "activating" or message.plan_hash != self.plan.plan_hash:
            return []
        if message.instance != self._promises[sender].instance:
            return self._fail(AttemptFailed(f"{sender} restarted"), now_us)
        self._active[sender] = Instance(message.instance)
        if len(self._active) < len(self._nodes):
            self._tries = 0
            return self._activate_next(now_us)
        self.phase = "done"
        self.outcome = RunningPlan(
            slot=self.slot,
            ballot=self.ballot,
            plan_hash=self.plan.plan_hash,
            model_digest=self.plan.model_digest,
            stages=tuple(
                RunningStage(
                    NodeId(stage.node_id),
                    self._active[NodeId(stage.node_id)],
                    stage.layer_start,
                    stage.layer_end,
                    stage.required_bytes,
                )
                for stage in self.plan.stages
            ),
            context_length=self.plan.context_length,
            lanes=self.plan.parallel_lanes,
            cache_type=self.plan.cache_type,
            active_since_us=now_us,
            plan=self.plan,
            former=self._former,
        )
        return []

    # ------------------------------------------------------------------ refusals

    def _on_nack(self, sender: NodeId, message: Nack, now_us: int) -> list[Effect]:
        waiting_for_room = bool(self.retired) and message.reason == "insufficient_memory" and message.claim == "stage"
        if waiting_for_room and self._room_tries.get(sender, 0) < ROOM_TRIES:
            self._room_tries[sender] = self._room_tries.get(sender, 0) + 1
            return []
        if message.claim not in {"prepare", "stage", "activate"}:
            return []
        if message.claim == "prepare" and self.phase != "preparing":
            return []
        learned = message.promised.term
        reason = f"{sender} refused to {message.claim}: {message.reason}"
        if message.detail:
            reason += f" ({message.detail})"
        if message.reason in CULPRIT_REASONS:
            return self._fail(AttemptFailed(reason, (sender,), learned), now_us)
        contested = message.reason in {"older_ballot", "sticky", "other_plan_accepted"}
        failed = AttemptFailed(
            reason,
            (),
            learned,
            retry_after_us=message.retry_after_us,
            contested=contested or message.claim == "activate",
        )
        return self._fail(failed, now_us)

    def _fail(self, failed: AttemptFailed, now_us: int) -> list[Effect]:
        assert self.outcome is None
        assert now_us >= 0
        self.phase, self.outcome = "failed", failed
        abort = Abort(ballot=epoch_to_wire(self.ballot), slot=self.slot, reason=failed.reason[:512])
        return [Send(node_id, abort) for node_id in self._nodes]
