"""One served model: from a wish to stages that serve, and back again when they are lost.

Level-triggered: every input updates what is known, then ``step`` looks at everything and does what is due. In order:

1. An attempt in flight is driven; its outcome becomes the running plan, or back-off and culprits.
2. The running plan is watched: adopted from rows when unknown, dropped when a higher ballot serves, routed while every
   stage is there, kept alive, and declared broken the moment an agent's own word says so.
3. A planning round starts when one is needed and nothing forbids it:
   *initial*: no plan, view settled; *broken*: ``loss_replan_delay_us`` after the loss, without waiting for the barrier,
   but waiting for survivors that are connected and not yet plannable again; *changed*: the participant hash differs, the
   view is settled, the running plan has dwelt. An unchanged hash starts nothing. What is refused without the nodes that
   are left out for their past is asked once more with those among them that waited for a part of it.
4. A broken plan without replacement is withdrawn ``withdraw_grace_us`` after the loss; a locked one is never replaced.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from coordinator.assignment.attempt import Attempt, AttemptFailed
from coordinator.assignment.culprits import Culprits
from coordinator.assignment.decisions import placing
from coordinator.assignment.effects import (
    Decided,
    Decision,
    DecisionKind,
    Effect,
    PersistTerm,
    Publish,
)
from coordinator.assignment.inquiry import Inquiry, Question
from coordinator.assignment.measured import Measured
from coordinator.assignment.moment import Moment, ServedModelSpec, SlotSettings
from coordinator.assignment.needs import need_of, recheck_at_us, rollback_due
from coordinator.assignment.rounds import Conclusion, Judgement, PlanningRound, timeless_hash
from coordinator.assignment.running import RunningPlan
from coordinator.assignment.upkeep import retire_all, retire_left_out
from coordinator.assignment.watch import PlanWatch
from coordinator.election.campaign import Campaign
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.problem import LockedTopology
from coordinator.replan import Observation
from coordinator.view import SignalQuantiser
from protocol.ballots import BallotReply
from protocol.ids import NodeId, Term

CHECK_INTERVAL_US = 1_000_000
"""Problems are built and hashed at most this often per slot …"""
HEALTHY_CHECK_INTERVAL_US = 5_000_000
"""… and this often while a whole plan serves: in a mesh of 100 a problem has thousands of links."""

TERM_TIMEOUT_US = 10_000_000
"""A term that is not durable by then will not be: the disk is full or gone."""


class SlotCoordinator:
    """Owns one slot's plan while this node coordinates, and mirrors it from rows while it does not."""

    attempt_type: type[Attempt] = Attempt
    quantiser_type: type[SignalQuantiser] = SignalQuantiser

    def __init__(
        self,
        spec: ServedModelSpec,
        *,
        self_id: NodeId,
        settings: SlotSettings,
        campaign: Campaign,
        next_request_id: Callable[[], int],
    ) -> None:
        self.spec = spec
        self.watch: Final = PlanWatch(settings.election)
        self.attempt: Attempt | None = None
        self.round: PlanningRound | None = None
        self.refused: PlanRefused | None = None
        self.withdrawn = False
        self.needs_room = False
        """It has no plan, and would have one if slots of a lower priority gave way."""
        self.participant_hash = ""
        """Of the last concluded round: while it stays the same there is no other round."""
        self._self_id: Final = self_id
        self.settings = settings
        self._campaign: Final = campaign
        self._next_request_id: Final = next_request_id
        self.culprits: Final = Culprits(settings.assignment)
        self._inquiry: Final = Inquiry(self.quantiser_type)
        self._asked: Question | None = None  # behind the round in flight
        self._rejected: set[str] = set()
        self._term_persisted = False
        self._attempt_since_us = 0
        self._attempt_round_hash = ""
        self._begun: Decision | None = None  # behind the attempt in flight
        self._planned_timeless = ""
        self._blamed_us = 0
        self._deferred = False
        self._round_not_before_us = 0
        self._recheck_at_us: int | None = None
        self._check_at_us = 0
        self._measured: Final = Measured()
        self._kept = ""  # what was last said about keeping the plan; said again only when it changes

    # ------------------------------------------------------------------ what others read

    @property
    def busy(self) -> bool:
        """Planning or migrating."""
        return self.attempt is not None or self.round is not None

    @property
    def routable(self) -> bool:
        """Every stage serves, stage 0 included."""
        return self.watch.whole

    @property
    def running(self) -> RunningPlan | None:
        """The plan that serves, or did until it broke."""
        return self.watch.running

    # ------------------------------------------------------------------ inputs

    def step(self, moment: Moment) -> list[Effect]:
        """Do what is due."""
        self.culprits.forget_absent(moment.view)
        if not moment.coordinating:
            return self._stand_by(moment)
        effects = self._drive(moment)
        effects += self.watch.attend(self.spec, moment, self.attempt, self._campaign.claim())
        effects += self._follow_health(moment)
        return effects + self._consider(moment)

    def on_reply(self, sender: NodeId, message: BallotReply, moment: Moment) -> list[Effect]:
        """An agent's answer to the attempt in flight."""
        if self.attempt is None:
            return []
        return self.attempt.on_reply(sender, message, moment.now_us) + self._after_attempt(moment)

    def on_term_persisted(self, term: Term, moment: Moment) -> list[Effect]:
        """The attempt that waited for its term may speak."""
        if self.attempt is None or self._term_persisted or term < self.attempt.ballot.term:
            return []
        self._term_persisted = True
        return self.attempt.start(moment.now_us)

    def on_planned(self, request_id: int, result: Plan | PlanRefused, moment: Moment) -> list[Effect]:
        """The planner's answer; ignored when the round it belongs to is over."""
        if self.round is None or not self.round.owns(request_id):
            return []
        answer = self.round.on_planned(request_id, result, judge_with=self._judgement(self.round, moment))
        if not isinstance(answer, Conclusion):
            return list(answer)
        concluded, self.round = self.round, None
        return self._conclude(concluded, answer, moment)

    def respecify(self, spec: ServedModelSpec) -> None:
        """Another source, priority or lock for the same model."""
        self.lock(spec.locked)
        self.spec = spec

    def lock(self, topology: LockedTopology | None) -> None:
        """An operator's exact split, or freedom again; a slot that is held as before is left alone."""
        if topology != self.spec.locked:
            self.spec = replace(self.spec, locked=topology)
            self.reconsider()

    def reconsider(self) -> None:
        """Forget what was considered or refused: a round may start."""
        self._inquiry.forget()
        self.participant_hash, self._round_not_before_us = "", 0
        self.needs_room, self._check_at_us = False, 0

    def validate(self) -> None:
        """Internal invariants; asserts."""
        assert self.attempt is None or self.round is None, "planning and migrating at once"
        assert self.attempt is None or self.attempt.outcome is None, "a finished attempt was not taken note of"

    def on_observed(self, observed: Observation, moment: Moment) -> list[Effect]:
        """Measured speed and traffic of the running plan; far too slow is raised once per plan."""
        running = self.running
        text = self._measured.take(running, observed, moment.view, moment.now_us)
        if text is None:
            return []
        return [self._decided(moment, "measured_far_below_predicted", text)]

    def withdraw(self, reason: str, moment: Moment) -> list[Effect]:
        """Stop serving everywhere: not wanted any more, or broken for too long."""
        effects, running = self._give_up(reason, moment.now_us), self.running
        if running is not None:
            effects += self.watch.route(None, running)
            effects += retire_all(running, self._campaign.claim(), reason)
            effects.append(Publish(self.spec.slot, running.ballot, running.ballot.term, "withdrawn", None))
            effects.append(self._decided(moment, "withdrawn", reason))
            self.withdrawn = True
        self.watch.withdraw()
        return effects

    def next_deadline(self, now_us: int) -> int | None:
        """When ``step`` has something new to do."""
        due = [self.watch.keepalive_at_us, self._check_at_us, self._campaign.not_before_us, self._round_not_before_us]
        if self.attempt is not None and self._term_persisted:
            due.append(self.attempt.next_deadline() or 0)
        if self.watch.broken_since_us is not None:
            assignment = self.settings.assignment
            due.append(self.watch.broken_since_us + assignment.loss_replan_delay_us)
            due.append(self.watch.broken_since_us + assignment.withdraw_grace_us)
        if self._recheck_at_us is not None:
            due.append(self._recheck_at_us)
        due.append(self.culprits.next_deadline(now_us) or 0)
        return min((moment for moment in due if moment > now_us), default=None)

    def _stand_by(self, moment: Moment) -> list[Effect]:
        effects = self._give_up("another node coordinates", moment.now_us)
        self._deferred = False
        self.watch.mirror(self.spec, moment)
        return effects

    # ------------------------------------------------------------------ the attempt

    def _give_up(self, reason: str, now_us: int) -> list[Effect]:
        """Stop planning and migrating."""
        attempt, self.attempt, self.round = self.attempt, None, None
        if attempt is None:
            return []
        return [*attempt.give_up(reason, now_us), self._ended("attempt_failed", reason, now_us)]

    def _drive(self, moment: Moment) -> list[Effect]:
        if self.attempt is None:
            return []
        if not self._term_persisted:
            if moment.now_us < self._attempt_since_us + TERM_TIMEOUT_US:
                return []
            self.attempt = None
            self._campaign.refused(moment.now_us, contested=False)
            return [self._ended("attempt_failed", "the term could not be written", moment.now_us)]
        effects = self.attempt.on_view(moment.view, moment.now_us, moment.excluded)
        return effects + self.attempt.on_timer(moment.now_us) + self._after_attempt(moment)

    def _after_attempt(self, moment: Moment) -> list[Effect]:
        attempt = self.attempt
        if attempt is None or attempt.outcome is None:
            return []
        self.attempt = None
        if isinstance(attempt.outcome, AttemptFailed):
            return self._failed(attempt.outcome, moment)
        return self._activated(attempt.outcome, moment)

    def _failed(self, failed: AttemptFailed, moment: Moment) -> list[Effect]:
        for node_id in failed.culprits:
            self.culprits.blame(node_id, failed.reason, moment.now_us)
        self._campaign.learn(failed.learned_term)
        self._campaign.refused(moment.now_us, failed.retry_after_us, contested=failed.contested)
        return [self._ended("attempt_failed", failed.reason, moment.now_us)]

    def _activated(self, outcome: RunningPlan, moment: Moment) -> list[Effect]:
        old, self._check_at_us = self.running, 0
        self.watch.replace(outcome)
        self.participant_hash, self.refused, self.withdrawn = self._attempt_round_hash, None, False
        self._recheck_at_us, self._deferred = None, False
        self._inquiry.forget()  # if this plan breaks, what is refused then is to be said then
        self._campaign.succeeded()
        for node_id in outcome.nodes:
            self.culprits.absolve(node_id)
        effects: list[Effect] = [] if old is None else retire_left_out(old, outcome)
        effects.append(Publish(self.spec.slot, outcome.ballot, outcome.ballot.term, "serving", outcome.plan))
        return [*effects, self._ended("activated", "every stage serves", moment.now_us)]

    def _follow_health(self, moment: Moment) -> list[Effect]:
        """Blame what failed in a live process; withdraw what has been broken for too long."""
        since_us = self.watch.broken_since_us
        if since_us is None:
            return []
        if since_us == moment.now_us != self._blamed_us:
            # Once for each time it broke: after a stall many inputs come at one moment.
            self._deferred, self._blamed_us = False, since_us
            for node_id, why in self.watch.failed_here(moment.view).items():
                self.culprits.blame(node_id, why, moment.now_us)
        over = moment.now_us >= since_us + self.settings.assignment.withdraw_grace_us
        return self.withdraw("no replacement within the grace", moment) if over and not self.busy else []

    # ------------------------------------------------------------------ planning

    def _consider(self, moment: Moment) -> list[Effect]:
        now_us = moment.now_us
        blocked = self.busy or not moment.may_start or now_us < self._campaign.not_before_us
        if blocked or now_us < self._check_at_us:
            return []
        roll_back = rollback_due(self.settings.replan, self.running, self._measured.of(self.running, now_us))
        need = need_of(
            self.watch,
            self.spec.locked,
            self.settings.assignment,
            moment,
            roll_back=roll_back,
            round_not_before_us=self._round_not_before_us,
        )
        if need is None:
            return []
        if need == "deferred":
            if self._deferred:
                return []
            self._deferred = True
            return [self._decided(moment, "deferred", "a surviving stage's node is not settled yet")]
        self._check_at_us = now_us + (HEALTHY_CHECK_INTERVAL_US if need == "changed" else CHECK_INTERVAL_US)
        asked = self._inquiry.ask(need, self.spec, self.settings, moment, self.culprits, running=self.running)
        if asked is None:
            return []
        recheck = self._recheck_at_us is not None and now_us >= self._recheck_at_us
        evaluated = self.running is not None and self.running.plan is not None
        if need == "changed" and asked.participant_hash == self.participant_hash and evaluated and not recheck:
            return []
        self._round_not_before_us = now_us + self.settings.assignment.replan_spacing_us
        if asked.participant_hash != self.participant_hash:
            self._rejected.clear()
        self.round = PlanningRound(
            slot=self.spec.slot,
            need=need,
            problem=asked.problem,
            running=self.running,
            next_request_id=self._next_request_id,
            timings_only=timeless_hash(asked.problem) == self._planned_timeless,
            roomier=asked.roomier,
        )
        self._asked = asked
        return list(self.round.start())

    def _judgement(self, planning: PlanningRound, moment: Moment) -> Judgement:
        now_us, running = moment.now_us, self.running
        return Judgement(
            replan=self.settings.replan,
            assignment=self.settings.assignment,
            active_for_us=0 if running is None else now_us - running.active_since_us,
            observed=self._measured.of(running, now_us),
            missing_bytes={NodeId(node.node_id): node.missing_bytes or 0 for node in planning.problem.participants},
            rejected=frozenset(self._rejected),
            reloads=frozenset(each.node_id for each in moment.view.members.values() if not each.row.keeps_loads),
        )

    def _conclude(self, concluded: PlanningRound, answer: Conclusion, moment: Moment) -> list[Effect]:
        now_us = moment.now_us
        if answer.current is not None and self.running is not None:
            self.watch.running = replace(self.running, plan=answer.current)
        if answer.plan is not None:
            return self._place(concluded, answer, answer.plan, moment)
        if answer.refused is not None:
            self.refused = answer.refused
            if self._asked is not None:
                self._inquiry.refused(self._asked)
            self.needs_room = answer.fits_in_more_room
            if self.running is not None and not self.watch.health.broken:
                self.participant_hash = concluded.participant_hash
            return [self._decided(moment, "refused", f"{answer.refused.code}: {answer.refused.message}")]
        verdict = answer.verdict
        assert verdict is not None
        running = self.running
        if running is not None:
            self._recheck_at_us = recheck_at_us(verdict, running, self.settings.replan, now_us)
        first = self.participant_hash == ""
        self.participant_hash, self._planned_timeless = concluded.participant_hash, timeless_hash(concluded.problem)
        effects: list[Effect] = []
        if first and running is not None:
            effects.append(Publish(self.spec.slot, running.ballot, running.ballot.term, "serving", running.plan))
        old = "" if running is None else running.plan_hash
        kept = Decision(now_us, self.spec.slot, "kept", verdict.reason, old, old, verdict.gain_us, verdict.cost_us)
        said, self._kept = self._kept, f"{verdict.reason} {old} {concluded.participant_hash}"
        return effects if said == self._kept else [*effects, Decided(kept)]

    def _place(self, concluded: PlanningRound, answer: Conclusion, plan: Plan, moment: Moment) -> list[Effect]:
        able = moment.plannable | moment.reserve
        if any(NodeId(stage.node_id) not in able for stage in plan.stages):
            return []  # the view moved on while the planner was at work; the next step starts another round
        running = self.running
        if concluded.need == "rollback" and running is not None:
            self._rejected.add(running.plan_hash)
        self.attempt = self.attempt_type(
            slot=self.spec.slot,
            source=self.spec.source,
            ballot=self._campaign.next_ballot(),
            plan=plan,
            running=running,
            settings=self.settings.assignment,
            force=moment.force,
            former=self._measured.former(running, moment.now_us) if answer.moved_by_timing else None,
        )
        self._term_persisted, self._attempt_since_us = False, moment.now_us
        self._attempt_round_hash = concluded.participant_hash
        self._planned_timeless = timeless_hash(concluded.problem)
        self._begun = placing(
            self.spec.slot, concluded, answer, plan,
            running=running, judgement=self._judgement(concluded, moment), now_us=moment.now_us,
        )  # fmt: skip
        return [PersistTerm(self.attempt.ballot.term), Decided(self._begun)]

    def _ended(self, kind: DecisionKind, reason: str, now_us: int) -> Decided:
        """What became of the attempt that was begun."""
        assert self._begun is not None
        return Decided(replace(self._begun, at_us=now_us, kind=kind, reason=reason))

    def _decided(self, moment: Moment, kind: DecisionKind, reason: str) -> Decided:
        """About the running plan, if there is one."""
        old = "" if self.running is None else self.running.plan_hash
        return Decided(Decision(moment.now_us, self.spec.slot, kind, reason, old))
