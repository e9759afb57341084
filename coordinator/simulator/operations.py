"""Events meet a running pipeline: what breaks, who replans, when service resumes, and what that cost.

Theory of operation. A script of timed steps (the scenario's events, "a new plan is ready", "look again") is merged with
the engine's own time: run up to the next step, apply it, repeat. A plan breaks when one of its nodes goes down or
restarts; its requests lose pass and cache. After the settle (``SETTLE_US``) the policy is asked with the production
planner's best answer over the nodes that are up; the new stages load in parallel, each from its node's own disk at
``load_bytes_per_s``, and layers a node already holds are not loaded again. A healthy plan that an event made slower is
retimed first and judged afterwards; while a replacement loads, the old plan keeps serving.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import assert_never

from config.settings import AssignmentSettings
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.problem import PlanningProblem
from coordinator.planner.transfer import transfer_us
from coordinator.simulator.conditions import Conditions
from coordinator.simulator.engine import FOREVER, Engine
from coordinator.simulator.pipeline import Pipeline, pipeline_of
from coordinator.simulator.replan_policy import Decision, ReplanPolicy, Situation, repriced
from coordinator.simulator.scenario_events import ColdStart, LinkChange, NodeDown, NodeUp, ScenarioEvent, Straggler

SETTLE_US = AssignmentSettings().loss_replan_delay_us
MAX_STEPS = 100_000

Planner = Callable[[PlanningProblem], Plan | PlanRefused]


@dataclass(frozen=True, slots=True)
class PlanReady:
    """A replacement has loaded. Stale when ``generation`` is no longer the one being loaded."""

    generation: int
    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The same plan serves again after a cold start. Stale like ``PlanReady``."""

    generation: int


@dataclass(frozen=True, slots=True)
class Review:
    """Ask the policy again. Stale like ``PlanReady``."""

    generation: int


Step = ScenarioEvent | PlanReady | Reloaded | Review


@dataclass(slots=True)
class EventReport:
    """One line of the run's history: what happened and what it cost."""

    at_us: int
    kind: str
    effect: str


@dataclass(slots=True)
class Operations:
    """Drives one engine through a script. ``history`` and ``flags`` are the result."""

    engine: Engine
    conditions: Conditions
    plan: Plan
    planner: Planner
    policy: ReplanPolicy
    load_bytes_per_s: int
    history: list[EventReport] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    downtime_us: int = 0
    _pipeline: Pipeline | None = None
    _script: list[tuple[int, int, Step]] = field(default_factory=list)
    _sequence: int = 0
    _generation: int = 0
    _active_since_us: int = 0
    _stopped_at_us: int | None = None

    def run(self, events: tuple[ScenarioEvent, ...]) -> None:
        """Serve from time 0 until every request has ended."""
        for event in events:
            self._push(event.at_us, event)
        self._serve(self.plan)
        for _ in range(MAX_STEPS):
            self.engine.run_until(self._script[0][0] if self._script else FOREVER)
            if self.engine.idle:
                return
            if not self._script:
                self.engine.fail_waiting()
                return
            at_us, _, step = heappop(self._script)
            self._apply(at_us, step)
        raise AssertionError("the policy asks for reviews without end")

    def _push(self, at_us: int, step: Step) -> None:
        self._sequence += 1
        heappush(self._script, (at_us, self._sequence, step))

    def _apply(self, at_us: int, step: Step) -> None:
        match step:
            case PlanReady() | Reloaded() | Review():
                if step.generation == self._generation:
                    self._internal(at_us, step)
            case LinkChange():
                self.conditions.change_link(step)
                self._degraded(at_us, "link", f"{step.source} -> {step.target}")
            case Straggler():
                self.conditions.slow_milli[step.node_id] = step.factor_milli
                self._degraded(at_us, "straggler", f"{step.node_id} ×{step.factor_milli / 1_000:g}")
            case NodeDown():
                self.conditions.down.add(step.node_id)
                self._lost(at_us, step.node_id)
            case NodeUp():
                self._returned(at_us, step.node_id)
            case ColdStart():
                self._cold(at_us, step)
            case _:
                assert_never(step)

    def _internal(self, at_us: int, step: PlanReady | Reloaded | Review) -> None:
        if isinstance(step, Review):
            self._judge(at_us, "review", "dwell over")
            return
        if isinstance(step, PlanReady):
            hit = self.engine.interrupt() if self._pipeline is not None else 0
            self.plan = step.plan
            moved = f"; {hit} requests rebuilt their cache" if hit else ""
            order = " → ".join(f"{stage.node_id}[{stage.layer_start}:{stage.layer_end}]" for stage in step.plan.stages)
            self._note(at_us, "replanned", f"{step.reason}: now {order}{moved}{self._outage(at_us)}")
            self._active_since_us = at_us
            self._serve(self.plan)
            return
        outage = self._outage(at_us)
        self._serve(self.plan)
        self._judge(at_us, "reloaded", f"serving again{outage}")

    def _outage(self, at_us: int) -> str:
        if self._stopped_at_us is None:
            return ""
        stopped, self._stopped_at_us = at_us - self._stopped_at_us, None
        self.downtime_us += stopped
        return f"; {stopped / 1e6:.1f} s without service"

    def _serve(self, plan: Plan) -> None:
        self._pipeline = self._priced(plan)
        self.flags.update(self._pipeline.flags)
        self.engine.serve(self._pipeline, plan.parallel_lanes, plan.context_length)

    def _priced(self, plan: Plan) -> Pipeline:
        problem = self.conditions.problem(without_down=False)
        return pipeline_of(problem, plan, disk_bytes_per_s=self.load_bytes_per_s)

    def _stop(self, at_us: int) -> int:
        self._pipeline = None
        self._stopped_at_us = at_us
        return self.engine.interrupt()

    def _uses(self, node_id: str) -> bool:
        return any(stage.node_id == node_id for stage in self.plan.stages)

    def _lost(self, at_us: int, node_id: str) -> None:
        if not self._uses(node_id):
            if self._pipeline is None:
                self._judge_broken(at_us, "node_down", f"{node_id} is not in the plan")
                return
            self._note(at_us, "node_down", f"{node_id} is not in the plan: nothing changes")
            return
        already_stopped = self._pipeline is None
        hit = 0 if already_stopped else self._stop(at_us)
        self._judge_broken(at_us, "node_down", f"{node_id} lost, {hit} requests interrupted")

    def _returned(self, at_us: int, node_id: str) -> None:
        if node_id not in self.conditions.down:
            self._note(at_us, "node_up", f"{node_id} was not down")
            return
        self.conditions.down.discard(node_id)
        if self._pipeline is None:
            self._judge_broken(at_us, "node_up", f"{node_id} is back")
        else:
            self._judge(at_us, "node_up", f"{node_id} is back")

    def _cold(self, at_us: int, event: ColdStart) -> None:
        if not self._uses(event.node_id) or self._pipeline is None:
            self._note(at_us, "cold_start", f"{event.node_id} serves nothing: nothing changes")
            return
        held = sum(stage.parameter_bytes for stage in self.plan.stages if stage.node_id == event.node_id)
        load_us = transfer_us(held, self.load_bytes_per_s) if event.load_us is None else event.load_us
        hit = self._stop(at_us)
        self._generation += 1
        self._push(at_us + load_us, Reloaded(self._generation))
        self._note(at_us, "cold_start", f"{event.node_id} loads for {load_us / 1e6:.1f} s, {hit} requests interrupted")

    def _degraded(self, at_us: int, kind: str, what: str) -> None:
        before = None if self._pipeline is None else self._pipeline.decode.total_us
        if before is None:
            self._note(at_us, kind, f"{what} while nothing is served")
            return
        self._pipeline = self._priced(self.plan)
        self.engine.retime(self._pipeline)
        after = self._pipeline.decode.total_us
        self._judge(at_us, kind, f"{what}: {before / 1e3:.1f} → {after / 1e3:.1f} ms per token")

    def _candidate(self) -> Plan | None:
        problem = self.conditions.problem(without_down=True)
        if not problem.participants:
            return None
        answer = self.planner(problem)
        return answer.best_effort if isinstance(answer, PlanRefused) else answer

    def _judge_broken(self, at_us: int, kind: str, what: str) -> None:
        self._generation += 1
        if self._restored():
            self._push(at_us + SETTLE_US, Reloaded(self._generation))
            self._note(at_us, kind, f"{what}; the plan is whole again")
            return
        locked = self.conditions.base.request.locked is not None
        candidate = None if locked else self._candidate()
        decision = self.policy(self._situation(at_us, candidate, broken=True))
        if decision.kind == "replace" and candidate is not None:
            ready = at_us + SETTLE_US + self._load_us(candidate)
            self._push(ready, PlanReady(self._generation, candidate, decision.reason))
            self._note(at_us, kind, f"{what}; a new plan serves in {(ready - at_us) / 1e6:.1f} s")
        else:
            self._note(at_us, kind, f"{what}; no service: {decision.reason}")

    def _restored(self) -> bool:
        return not any(stage.node_id in self.conditions.down for stage in self.plan.stages)

    def _judge(self, at_us: int, kind: str, what: str) -> None:
        candidate = None if self.conditions.base.request.locked is not None else self._candidate()
        decision = self.policy(self._situation(at_us, candidate, broken=False))
        self._generation += 1
        if decision.kind == "replace" and candidate is not None:
            ready = at_us + self._load_us(candidate)
            self._push(ready, PlanReady(self._generation, candidate, decision.reason))
            self._note(at_us, kind, f"{what}; {decision.reason}, replaced in {(ready - at_us) / 1e6:.1f} s")
            return
        self._note(at_us, kind, f"{what}; plan kept: {decision.reason}")
        self._schedule_review(at_us, decision)

    def _schedule_review(self, at_us: int, decision: Decision) -> None:
        if decision.review_at_us is not None:
            self._push(max(at_us + 1, decision.review_at_us), Review(self._generation))

    def _situation(self, at_us: int, candidate: Plan | None, *, broken: bool) -> Situation:
        request = self.conditions.base.request
        current = self.plan
        if self._pipeline is not None:
            decode, streams = self._pipeline.decode, min(request.concurrency, current.parallel_lanes)
            current = repriced(current, decode.total_us, self._pipeline.period_us, streams)
        return Situation(
            now_us=at_us,
            active_since_us=self._active_since_us,
            broken=broken,
            locked=request.locked is not None,
            current=current,
            candidate=candidate,
            tokens=self.engine.tally.tokens,
            load_bytes_per_s=self.load_bytes_per_s,
        )

    def _load_us(self, plan: Plan) -> int:
        """The slowest node's load of layers that it does not hold yet."""
        held = {stage.node_id: stage for stage in self.plan.stages}
        longest = 0
        for stage in plan.stages:
            kept = held.get(stage.node_id)
            layers = stage.layer_end - stage.layer_start
            new = layers
            if kept is not None and stage.node_id not in self.conditions.down:
                new -= max(0, min(stage.layer_end, kept.layer_end) - max(stage.layer_start, kept.layer_start))
            longest = max(longest, transfer_us(stage.parameter_bytes * new // layers, self.load_bytes_per_s))
        return longest

    def _note(self, at_us: int, kind: str, effect: str) -> None:
        self.history.append(EventReport(at_us, kind, effect))
