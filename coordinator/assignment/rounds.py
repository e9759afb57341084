"""One planning round: what is asked of the planner, and what its answers amount to.

A round for a slot without a working plan takes the planner's plan as it is; when that is refused because too few nodes are
there, it asks once more for a plan on any number of nodes, down to one. A round for a working plan also prices the running
split under today's signals (as a locked topology of equal shape) and lets ``replan.judge`` decide; when only measured
timings changed, the cuts move half-way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from config.settings import AssignmentSettings, ReplanSettings
from coordinator.assignment.effects import ComputePlan
from coordinator.assignment.running import RunningPlan
from coordinator.calibrated import profile_name
from coordinator.planner.participants import participant_set_hash
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.problem import LockedTopology, PlanningProblem
from coordinator.replan import Observation, Verdict, damped, judge, kept_stages, migration_cost_us
from protocol.ids import NodeId, Slot

Need = Literal["initial", "broken", "changed", "rollback"]
Question = Literal["candidate", "current", "fallback", "damped", "roomier"]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the round amounts to. Exactly one of ``plan`` (place it), ``refused``, ``verdict`` alone (keep)."""

    plan: Plan | None = None
    refused: PlanRefused | None = None
    verdict: Verdict | None = None
    current: Plan | None = None
    """The running split as priced today."""
    moved_by_timing: bool = False
    fits_in_more_room: bool = False
    """Refused, but there is a plan if slots of a lower priority give way."""
    fallback: bool = False
    """Fewer nodes than wanted: with those there is no plan."""


def timeless_hash(problem: PlanningProblem) -> str:
    """The participant hash without measured decode timings and calibration: equal means that at most those changed."""
    participants = tuple(
        replace(
            node,
            observed_decode_us_per_layer=None,
            observed_decode_samples=0,
            observed_decode_age_us=0,
            calibrated_bytes_per_s=None,
        )
        for node in problem.participants
    )
    calibration = replace(problem.calibration, name=profile_name(problem.calibration.name))
    return participant_set_hash(replace(problem, participants=participants, calibration=calibration))


class PlanningRound:
    """Collects the answers to the ``ComputePlan`` effects it hands out."""

    def __init__(
        self,
        *,
        slot: Slot,
        need: Need,
        problem: PlanningProblem,
        running: RunningPlan | None,
        next_request_id: Callable[[], int],
        timings_only: bool = False,
        roomier: PlanningProblem | None = None,
    ) -> None:
        """``roomier``: the same question without what slots of a lower priority hold."""
        self.need: Final = need
        self.problem: Final = problem
        self.participant_hash: Final = participant_set_hash(problem)
        self.running: Final = running
        self._slot: Final = slot
        self._next_request_id: Final = next_request_id
        self._timings_only: Final = timings_only
        self._roomier: Final = roomier
        self._asked: dict[int, Question] = {}
        self._answers: dict[str, Plan | PlanRefused] = {}

    def start(self) -> list[ComputePlan]:
        """The first questions."""
        running = self.running
        former = running.former_topology() if self.need == "rollback" and running is not None else None
        if former is not None and running is not None:
            return [self._ask("candidate", self._locked(former, running))]
        effects = [self._ask("candidate", self.problem)]
        if self.need == "changed" and running is not None:
            effects.append(self._ask("current", self._locked(running.topology(), running)))
        return effects

    def owns(self, request_id: int) -> bool:
        """The question is one of this round's."""
        return request_id in self._asked

    def on_planned(
        self,
        request_id: int,
        result: Plan | PlanRefused,
        *,
        judge_with: "Judgement",
    ) -> Conclusion | list[ComputePlan]:
        """A conclusion, or further questions (none while answers are outstanding)."""
        self._answers[self._asked.pop(request_id)] = result
        if self._asked:
            return []
        if "damped" in self._answers:
            return self._after_damping(judge_with)
        candidate = self._answers.get("fallback", self._answers["candidate"])
        if self.need != "changed":
            return self._without_rival(candidate)
        return self._against_running(candidate, judge_with)

    def _without_rival(self, candidate: Plan | PlanRefused) -> Conclusion | list[ComputePlan]:
        if isinstance(candidate, Plan):
            return Conclusion(plan=candidate, fallback="fallback" in self._answers)
        request = self.problem.request
        if request.minimum_nodes > 1 and request.locked is None and "fallback" not in self._answers:
            return [self._ask("fallback", replace(self.problem, request=replace(request, minimum_nodes=1)))]
        if self._roomier is not None and "roomier" not in self._answers:
            return [self._ask("roomier", replace(self._roomier, request=replace(request, minimum_nodes=1)))]
        return Conclusion(refused=candidate, fits_in_more_room=isinstance(self._answers.get("roomier"), Plan))

    def _against_running(
        self, candidate: Plan | PlanRefused, judge_with: "Judgement"
    ) -> Conclusion | list[ComputePlan]:
        current = self._answers["current"]
        if isinstance(current, PlanRefused):
            # The running split is not legal or does not fit any more: whatever works is better.
            return Conclusion(plan=candidate) if isinstance(candidate, Plan) else Conclusion(refused=candidate)
        if isinstance(candidate, PlanRefused):
            return Conclusion(verdict=Verdict(replace=False, reason="not_better"), current=current)
        verdict = judge_with.compare(current, candidate)
        if not verdict.replace:
            return Conclusion(verdict=verdict, current=_kept(current, candidate))
        halfway = damped(current, candidate) if self._timings_only else None
        if halfway is None:
            return Conclusion(plan=candidate, verdict=verdict, current=current)
        assert self.running is not None
        return [self._ask("damped", self._locked(halfway, self.running))]

    def _after_damping(self, judge_with: "Judgement") -> Conclusion:
        current, candidate, halfway = (self._answers[key] for key in ("current", "candidate", "damped"))
        assert isinstance(current, Plan)
        assert isinstance(candidate, Plan)
        verdict = judge_with.compare(current, candidate)
        if isinstance(halfway, PlanRefused) or halfway.plan_hash in judge_with.rejected:
            return Conclusion(verdict=Verdict(replace=False, reason="not_better"), current=current)
        plan = replace(halfway, placement=candidate.placement)
        return Conclusion(plan=plan, verdict=verdict, current=current, moved_by_timing=True)

    def _ask(self, kind: Question, problem: PlanningProblem) -> ComputePlan:
        request_id = self._next_request_id()
        self._asked[request_id] = kind
        return ComputePlan(request_id, self._slot, problem)

    def _locked(self, topology: LockedTopology, shape: RunningPlan) -> PlanningProblem:
        """Exactly this split with the context and lanes of ``shape``."""
        request = replace(
            self.problem.request,
            locked=topology,
            context_length=shape.context_length,
            parallel_lanes=shape.lanes,
            policy="best_effort",
        )
        return replace(self.problem, request=request)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What ``judge`` needs besides the two plans."""

    replan: ReplanSettings
    assignment: AssignmentSettings
    active_for_us: int
    observed: Observation | None
    missing_bytes: dict[NodeId, int]
    rejected: frozenset[str]
    reloads: frozenset[NodeId] = frozenset()
    """Nodes whose engines load even an unchanged range anew."""

    def cost_us(self, current: Plan | None, candidate: Plan) -> int:
        """What the migration takes."""
        return migration_cost_us(
            self.assignment,
            current=current,
            candidate=candidate,
            missing_bytes=self.missing_bytes,
            break_first=current is not None and _break_first(current, candidate, self.reloads),
            reloads=self.reloads,
        )

    def compare(self, current: Plan, candidate: Plan) -> Verdict:
        """``judge`` with the memory question answered from the plans themselves."""
        return judge(
            self.replan,
            self.assignment,
            current=current,
            candidate=candidate,
            active_for_us=self.active_for_us,
            observed=self.observed,
            missing_bytes=self.missing_bytes,
            break_first=_break_first(current, candidate, self.reloads),
            rejected=self.rejected,
            reloads=self.reloads,
        )


def _break_first(current: Plan, candidate: Plan, reloads: frozenset[NodeId]) -> bool:
    """Some node cannot hold its old and its new stage together; what it keeps it holds only once."""
    old = {stage.node_id: stage for stage in current.stages}
    kept = kept_stages(current, candidate, reloads)
    for stage in candidate.stages:
        held = old.get(stage.node_id)
        if held is None or stage.node_id in kept:
            continue
        if held.required_bytes + stage.required_bytes > stage.usable_bytes:
            return True
    return False


def _kept(current: Plan, candidate: Plan) -> Plan:
    """``current`` as it goes on beside the best ``candidate``: it was re-priced as a lock, but nobody locked it.

    Its certificate is the candidate's when both are one plan, else how far it is from what was proven best.
    """
    if candidate.plan_hash == current.plan_hash:
        return candidate
    mine, best = current.modeled.decode_tpot_us, candidate.modeled.decode_tpot_us
    proven = candidate.search.proven_optimal and mine is not None and bool(best)
    gap = max(0.0, (mine - best) / best) if proven and mine is not None and best else None
    stages = tuple(
        replace(stage, reason_codes=tuple(code for code in stage.reason_codes if code != "locked_by_operator"))
        for stage in current.stages
    )
    search = replace(candidate.search, proven_optimal=False, gap=gap)
    return replace(current, placement=candidate.placement, stages=stages, search=search)
