"""The dormant coordinator: it wakes while this node is canonical in its own settled view (PROTOCOL §4, §5).

Every node runs one. It keeps the settle barrier, chooses the canonical coordinator, owns this node's terms, and steps one
``SlotCoordinator`` per served model, highest priority first, against the memory the others leave. Only one slot plans or
migrates at a time. A node that is not canonical mirrors what rows show and sends nothing, except that it aborts what it
had begun.

A belief that is wrong does no harm: the agents' fences decide. So the role is kept simple: nobody votes; the view does.

Level-triggered: every input stores what it says and then everything is looked at again, so a lost or repeated input only
costs time. ``next_deadline`` bounds how long nothing is looked at.
"""

from collections import deque
from dataclasses import replace
from random import Random
from typing import Final

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.assignment.effects import Decided, Decision, Effect
from coordinator.assignment.memory import added, held_bytes
from coordinator.assignment.moment import Moment, ServedModelSpec, SlotSettings
from coordinator.assignment.slot import SlotCoordinator
from coordinator.assignment.snapshot import CoordinatorSnapshot, slot_snapshot
from coordinator.assignment.upkeep import Strays
from coordinator.election.campaign import Campaign
from coordinator.election.follower import Follower
from coordinator.election.settle import SettleBarrier
from coordinator.engine_mix import other_engines
from coordinator.orders import NO_ORDERS, StandingOrders, spoken, standing
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.problem import Calibration
from coordinator.replan import Observation
from coordinator.view import ClusterView, MemberFacts
from protocol.ballots import BallotReply, Nack
from protocol.ids import Instance, NodeId, Slot, Term
from protocol.orders import LOCK, OperatorOrder, OrderKey

MAX_DECISIONS = 256
"""Older decisions are forgotten; the driver has seen each as ``Decided``."""
MAX_SLOTS = 16
"""As many as an agent can hold; of more wishes those with the highest priority are heard, then the smallest names."""
TICK_US = 1_000_000
"""While this node coordinates it looks again at least this often."""


class Coordinator:
    """One per node. Single-threaded; every input returns effects."""

    slot_type: type[SlotCoordinator] = SlotCoordinator
    follower_type: type[Follower] = Follower

    def __init__(
        self,
        *,
        node_id: NodeId,
        instance: Instance,
        last_term: Term,
        election: ElectionSettings,
        assignment: AssignmentSettings,
        replan: ReplanSettings,
        planner: PlannerSettings,
        random: Random,
        now_us: int,
        calibration: Calibration | None = None,
    ) -> None:
        self._node_id: Final = node_id
        self._election: Final = election
        self._settings = SlotSettings(
            election=election,
            assignment=assignment,
            replan=replan,
            planner=planner,
            calibration=calibration or Calibration(name=planner.calibration or "skippy"),
        )
        self._profile: Final = self._settings.calibration
        self._campaign: Final = Campaign(
            node_id=node_id, instance=instance, last_term=last_term, settings=election, random=random
        )
        self._barrier: Final = SettleBarrier(election, now_us)
        self._view = ClusterView(node_id)
        self._follower: Final = self.follower_type(self._barrier, assignment.loss_replan_delay_us)
        self._slots: dict[Slot, SlotCoordinator] = {}
        self._ended: dict[Slot, Strays] = {}
        """Slots that are not wanted any more: a lost retirement is repeated while rows still show them."""
        self._sweep_at_us = 0
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._configured = planner
        """What the planner is asked where no order says otherwise."""
        self._told: dict[OrderKey, OperatorOrder] = {}
        self._orders = NO_ORDERS
        self._last_request_id = 0

    # ------------------------------------------------------------------ inputs

    def on_members(self, members: tuple[MemberFacts, ...], now_us: int) -> list[Effect]:
        """The membership snapshot changed: state, rows, settled links. Always the whole of it, this node included."""
        self._view = ClusterView(self._node_id, {member.node_id: member for member in members})
        self._campaign.learn(self._view.max_term)
        return self._advance(now_us)

    def on_reply(self, sender: NodeId, message: BallotReply, now_us: int) -> list[Effect]:
        """An agent answered. A refusal teaches its term whoever it was meant for."""
        if isinstance(message, Nack):
            self._campaign.learn(message.promised.term)
        slot = self._slots.get(Slot(message.slot))
        if slot is None:
            return []
        effects = slot.on_reply(sender, message, self._moment(slot, now_us))
        return self._noted(effects) + self._advance(now_us)

    def on_planned(self, request_id: int, result: Plan | PlanRefused, now_us: int) -> list[Effect]:
        """The planner's answer to ``ComputePlan(request_id)``."""
        effects: list[Effect] = []
        for slot in self._slots.values():
            effects += slot.on_planned(request_id, result, self._moment(slot, now_us))
        return self._noted(effects) + self._advance(now_us)

    def on_term_persisted(self, term: Term, now_us: int) -> list[Effect]:
        """``PersistTerm(term)`` is durable."""
        effects: list[Effect] = []
        for slot in self._slots.values():
            effects += slot.on_term_persisted(term, self._moment(slot, now_us))
        return effects + self._advance(now_us)

    def on_observed(self, slot: Slot, observation: Observation, now_us: int) -> list[Effect]:
        """Measured time per token and traffic of a running plan, for amortisation and roll-back."""
        known = self._slots.get(slot)
        effects = [] if known is None else known.on_observed(observation, self._moment(known, now_us))
        return self._noted(effects) + self._advance(now_us)

    def serve(self, models: tuple[ServedModelSpec, ...], now_us: int) -> list[Effect]:
        """The whole set of wishes, replacing the one before. A slot that is missing or serves another model is withdrawn."""
        effects: list[Effect] = []
        first = sorted(models, key=lambda spec: (-spec.priority, spec.slot))[:MAX_SLOTS]
        wanted = {spec.slot: replace(spec, locked=self._orders.locks.get(spec.slot, spec.locked)) for spec in first}
        for name in [known for known in self._slots if known not in wanted]:
            ended = self._slots.pop(name)
            if len(self._ended) >= MAX_SLOTS:
                del self._ended[next(iter(self._ended))]
            self._ended[name] = Strays()
            if self._is_coordinator:
                effects += ended.withdraw("not wanted any more", self._moment(ended, now_us))
        for name, spec in wanted.items():
            self._ended.pop(name, None)
            known = self._slots.get(name)
            if known is None:
                self._slots[name] = self._new_slot(spec)
            elif known.spec.package.digest != spec.package.digest:
                if self._is_coordinator:
                    effects += known.withdraw("another model is wanted", self._moment(known, now_us))
                self._slots[name] = self._new_slot(spec)
            else:
                known.respecify(spec)
        return self._noted(effects) + self._advance(now_us)

    def on_orders(self, orders: tuple[OperatorOrder, ...], now_us: int) -> list[Effect]:
        """The whole set of standing orders, replacing the one before; obeyed with this very step, each change recorded.

        Told to followers too: whoever is elected next knows them already.
        """
        told = {order.key: order.model_copy(update={"age_us": 0}) for order in orders}
        changed = [order for key, order in sorted(told.items()) if self._told.get(key) != order]
        if not changed and len(told) == len(self._told):
            return []
        self._told, self._orders = told, standing(orders)
        for name, slot in self._slots.items():
            slot.lock(self._orders.locks.get(name, slot.spec.locked))
        self._settle_planner()
        effects: list[Effect] = [
            Decided(
                Decision(
                    now_us,
                    Slot(order.subject if order.kind == LOCK else ""),
                    "operator",
                    f"{spoken(order)}, said on {order.author}",
                )
            )
            for order in changed
        ]
        return self._noted(effects) + self._advance(now_us)

    def on_settings(self, planner: PlannerSettings, replan: ReplanSettings | None, now_us: int) -> list[Effect]:
        """Plan by other defaults from now on (``replan`` ``None`` = as before); every slot is looked at again."""
        self._configured = planner
        self._settings = replace(self._settings, replan=replan or self._settings.replan)
        self._settle_planner(again=True)
        return self._advance(now_us)

    def _settle_planner(self, *, again: bool = False) -> None:
        """Orders stand above the configuration; slots are looked at again when that changed something."""
        settings = replace(
            self._settings,
            planner=self._orders.planner(self._configured),
            calibration=self._orders.calibration(self._profile),
            speeds=self._orders.speeds,
        )
        if settings == self._settings and not again:
            return
        self._settings = settings
        for slot in self._slots.values():
            slot.settings = self._settings
            slot.reconsider()

    def on_timer(self, now_us: int) -> list[Effect]:
        """Time passed; harmless at any moment."""
        return self._advance(now_us)

    def next_deadline(self, now_us: int) -> int | None:
        """When to call ``on_timer`` at the latest."""
        due = [self._barrier.next_deadline(now_us), self._follower.next_deadline()]
        if self._is_coordinator:
            due.append(now_us + TICK_US)
            due += [slot.next_deadline(now_us) for slot in self._slots.values()]
        return min((moment for moment in due if moment is not None and moment > now_us), default=None)

    # ------------------------------------------------------------------ outputs

    @property
    def _is_coordinator(self) -> bool:
        return self._follower.node_id == self._node_id

    @property
    def term(self) -> int:
        """The highest term known or used; for the own row."""
        return self._campaign.term

    @property
    def orders(self) -> StandingOrders:
        """What operators ordered and calibration found, read."""
        return self._orders

    @property
    def planner(self) -> PlannerSettings:
        """What plans aim for: the configuration with the operators' orders over it."""
        return self._settings.planner

    @property
    def _pin(self) -> str:
        return self._orders.coordinator(self._election.pin_coordinator)

    def snapshot(self, now_us: int) -> CoordinatorSnapshot:
        """For API, metrics and the own row's ``max_term``."""
        settled = self._barrier.settled(now_us)
        return CoordinatorSnapshot(
            role="coordinator" if self._is_coordinator else "follower",
            canonical=self._follower.node_id,
            term=self._campaign.term,
            settled=settled,
            left_out=self._left_out(now_us),
            slots=tuple(slot_snapshot(self._slots[name], now_us, settled=settled) for name in self._by_priority()),
            decisions=tuple(self._decisions),
        )

    def validate(self) -> None:
        """Internal invariants; asserts."""
        assert sum(slot.busy for slot in self._slots.values()) <= 1, "one migration at a time"
        for slot in self._slots.values():
            slot.validate()
            assert self._is_coordinator or not slot.busy, "a follower has nothing in flight"

    # ------------------------------------------------------------------ the step

    def _advance(self, now_us: int) -> list[Effect]:
        self._barrier.observe(self._view, now_us)
        self._follower.look(self._view, self._pin, now_us)
        effects: list[Effect] = []
        for name in self._by_priority():
            slot = self._slots[name]
            effects += slot.step(self._moment(slot, now_us))
            if self._is_coordinator and slot.needs_room:
                effects += self._make_room(slot, now_us)
        if self._is_coordinator and self._ended and now_us >= self._sweep_at_us and self._barrier.settled(now_us):
            self._sweep_at_us = now_us + self._election.keepalive_us
            for name, strays in self._ended.items():
                effects += strays.clear(name, None, self._view, self._campaign.claim(), now_us)
        return self._noted(effects)

    def _make_room(self, slot: SlotCoordinator, now_us: int) -> list[Effect]:
        """The least important slot that holds something gives way to ``slot``, which is looked at again at once."""
        slot.needs_room = False
        lower = [
            other
            for other in map(self._slots.__getitem__, reversed(self._by_priority()))
            if other.spec.priority < slot.spec.priority and other.running is not None and not other.busy
        ]
        if not lower:
            return []
        reason = f"its memory is needed for {slot.spec.slot}, which has a higher priority"
        effects = lower[0].withdraw(reason, self._moment(lower[0], now_us))
        slot.reconsider()
        return effects + slot.step(self._moment(slot, now_us))

    def _moment(self, slot: SlotCoordinator, now_us: int) -> Moment:
        left_out = self._left_out(now_us)
        holdings = {
            name: held_bytes(other.running, None if other.attempt is None else other.attempt.plan)
            for name, other in self._slots.items()
            if other is not slot
        }
        firm = [held for name, held in holdings.items() if self._slots[name].spec.priority >= slot.spec.priority]
        plannable = frozenset(node_id for node_id in self._view.connected if node_id not in left_out)
        return Moment(
            now_us=now_us,
            view=self._view,
            coordinating=self._is_coordinator,
            settled=self._barrier.settled(now_us),
            plannable=plannable,
            left_out=left_out,
            reserve=frozenset(
                node_id
                for node_id, why in left_out.items()
                if why == "settling" and self._barrier.in_reserve(node_id, now_us)
            ),
            excluded=self._excluded,
            held_bytes=added(holdings.values()),
            firm_bytes=added(firm),
            may_start=not any(other.busy for other in self._slots.values() if other is not slot),
            force=self._pin == self._node_id,
        )

    @property
    def _excluded(self) -> frozenset[NodeId]:
        return self._orders.left_out(self._configured.exclude_nodes)

    def _left_out(self, now_us: int) -> dict[NodeId, str]:
        """Connected members that may not take a stage now, and why."""
        reasons: dict[NodeId, str] = {}
        for node_id, member in self._view.connected.items():
            reason = self._why_not(member, now_us)
            if reason:
                reasons[node_id] = reason
        candidates = (member for node_id, member in self._view.connected.items() if node_id not in reasons)
        return reasons | other_engines(candidates)

    def _why_not(self, member: MemberFacts, now_us: int) -> str:
        row = member.row
        if member.conflict:
            return "conflict"
        if row.status != "running":
            return row.status
        if not row.can_host_stage:
            return "cannot_host_stage"
        if member.node_id in self._excluded:
            return "excluded"
        if member.state == "suspect":
            return "suspect"
        if not member.settled and member.node_id != self._node_id:
            return "rtt_unsettled"
        if not self._barrier.node_settled(member.node_id, now_us):
            return "settling"
        return ""

    def _by_priority(self) -> list[Slot]:
        return sorted(self._slots, key=lambda name: (-self._slots[name].spec.priority, name))

    def _new_slot(self, spec: ServedModelSpec) -> SlotCoordinator:
        return self.slot_type(
            spec,
            self_id=self._node_id,
            settings=self._settings,
            campaign=self._campaign,
            next_request_id=self._next_request,
        )

    def _next_request(self) -> int:
        self._last_request_id += 1
        return self._last_request_id

    def _noted(self, effects: list[Effect]) -> list[Effect]:
        self._decisions.extend(effect.decision for effect in effects if isinstance(effect, Decided))
        return effects
