"""Watches one slot's running plan: learns it from rows, routes to it while it is whole, keeps it alive, says when it broke.

A follower uses the same watch to mirror what rows show; only ``attend`` sends anything.
"""

from typing import Final

from config.settings import ElectionSettings
from coordinator.assignment.attempt import Attempt
from coordinator.assignment.effects import Decided, Decision, Effect, Route
from coordinator.assignment.moment import Moment, ServedModelSpec
from coordinator.assignment.running import Health, RunningPlan, adopt, health, shows
from coordinator.assignment.upkeep import Strays, keepalives
from coordinator.view import ClusterView
from protocol.fencing import NO_EPOCH, PlanEpoch, epoch_from_wire
from protocol.ids import NodeId

RETIRED_GRACE_US = 10_000_000
"""A stage that still serves so long after it was retired for a plan that came to nothing never heard of it."""


class PlanWatch:
    """The running plan and its health. ``broken_since_us`` is set while it cannot serve, or must not for long."""

    def __init__(self, settings: ElectionSettings) -> None:
        self.running: RunningPlan | None = None
        self.health = Health()
        self.broken_since_us: int | None = None
        self.keepalive_at_us = 0
        self._settings: Final = settings
        self._confirmed: set[NodeId] = set()
        self._routed: Route | None = None
        self._strays: Final = Strays()
        self._retired: frozenset[NodeId] = frozenset()
        self._retired_us = 0
        """When the attempt that retired them was last in flight."""
        self._over = NO_EPOCH
        """What was withdrawn last: neither that nor anything older is adopted again."""
        self._mirrored = False
        """The plan was another coordinator's until now."""

    @property
    def whole(self) -> bool:
        """Every stage serves, and none was retired to make room for the next plan."""
        return self.running is not None and not self.health.lost and not self._retired

    def replace(self, running: RunningPlan | None) -> None:
        """Another plan serves now, or none."""
        self.running, self.health, self.broken_since_us = running, Health(), None
        self._confirmed.clear()
        self._retired = frozenset()

    def withdraw(self) -> None:
        """The plan is over, although rows will show it for a while."""
        if self.running is not None:
            self._over = self.running.ballot
        self.replace(None)

    def mirror(self, spec: ServedModelSpec, moment: Moment) -> None:
        """Not coordinating: show what rows say and send nothing."""
        found = _adoptable(spec, moment)
        if found is not None and (self.running is None or found.ballot != self.running.ballot):
            self.replace(found)
        elif found is None and self.running is not None and not self._still_serving(self.running, moment):
            self.replace(None)
        self._routed, self._mirrored = None, True
        self.health = self._judge(moment)
        if self.running is not None:
            # Noted for the day this node takes over: a plan that broke before is overdue, not new.
            self._note_health(self.running, moment)

    def attend(self, spec: ServedModelSpec, moment: Moment, attempt: Attempt | None, claim: PlanEpoch) -> list[Effect]:
        """Coordinating: adopt, judge, route, keep alive and clear away. ``claim`` is above every ballot seen."""
        effects: list[Effect] = []
        found = _adoptable(spec, moment)
        known = self._over if self.running is None else self.running.ballot
        newer = found is not None and found.ballot > known
        if newer and attempt is None:
            self.replace(found)
        if self.running is not None and (self._mirrored or (newer and attempt is None)):
            adopted = Decision(moment.now_us, spec.slot, "adopted", "rows show it", new_plan=self.running.plan_hash)
            effects.append(Decided(adopted))
        self._mirrored = False
        if self.running is not None:
            if attempt is not None and attempt.retired:
                # Others were asked to make room too: what they held is not missing from this plan.
                self._retired |= attempt.retired & frozenset(self.running.nodes)
                self._retired_us = moment.now_us
            elif moment.now_us >= self._retired_us + RETIRED_GRACE_US:
                self._retired -= self._still_serving(self.running, moment)
            self.health = self._judge(moment)
            # While this coordinator's own replacement is activated, its stages leave the running plan one by one.
            whole_but_for_us = not self.health.leaving and all(
                node_id in self._retired or why == "superseded" for node_id, why in self.health.lost.items()
            )
            if attempt is None or not whole_but_for_us:
                effects += self._note_health(self.running, moment)
            cut_off = bool(self.health.lost) or bool(self._retired)
            effects += self.route(None if cut_off else self.running.nodes[0], self.running)
        if moment.now_us >= self.keepalive_at_us:
            self.keepalive_at_us = moment.now_us + self._settings.keepalive_us
            effects += [] if self.running is None else keepalives(self.running)
            if not self.health.broken and attempt is None and moment.settled:
                effects += self._strays.clear(spec.slot, self.running, moment.view, claim, moment.now_us)
            else:
                self._strays.note(spec.slot, self.running, moment.view, moment.now_us)
        return effects

    def failed_here(self, view: ClusterView) -> dict[NodeId, str]:
        """Stages that failed in a live process, for the culprits.

        What a coordinator took away is no failure of the node: this one's own retirement, or another's newer ballot.
        """
        return {
            node_id: why
            for node_id, why in self.health.lost.items()
            if node_id not in self._retired
            and (why == "stage_failed" or (why == "not_serving" and not self._promised_away(node_id, view)))
        }

    def _promised_away(self, node_id: NodeId, view: ClusterView) -> bool:
        member = view.members.get(node_id)
        fact = None if member is None or self.running is None else member.fact(self.running.slot)
        promised = None if fact is None or fact.promised is None else epoch_from_wire(fact.promised)
        return promised is not None and self.running is not None and promised > self.running.ballot

    def route(self, node_id: NodeId | None, running: RunningPlan) -> list[Effect]:
        """Say where requests go, once per change."""
        wanted = Route(running.slot, node_id, running.ballot)
        if wanted == self._routed or (node_id is None and self._routed is None):
            return []
        self._routed = wanted
        return [wanted]

    def unsure(self, moment: Moment) -> tuple[NodeId, ...]:
        """Stages whose node is connected and not leaving, but may not be planned (again) yet: wait for them."""
        if self.running is None:
            return ()
        gone = {*self.health.lost, *self.health.leaving}
        return tuple(
            node_id for node_id in self.running.nodes if node_id not in gone and node_id not in moment.plannable
        )

    def _still_serving(self, running: RunningPlan, moment: Moment) -> frozenset[NodeId]:
        connected = moment.view.connected
        return frozenset(each for each in running.nodes if each in connected and shows(running, connected[each]))

    def _judge(self, moment: Moment) -> Health:
        running = self.running
        if running is None:
            return Health()
        for node_id in running.nodes:
            member = moment.view.members.get(node_id)
            if member is not None and shows(running, member):
                self._confirmed.add(node_id)
        confirmed = frozenset(self._confirmed)
        return health(running, moment.view, excluded=moment.excluded, confirmed=confirmed, now_us=moment.now_us)

    def _note_health(self, running: RunningPlan, moment: Moment) -> list[Effect]:
        if not self.health.broken:
            self.broken_since_us = None
            return []
        if self.broken_since_us is not None:
            return []
        self.broken_since_us = moment.now_us
        reasons = {**self.health.leaving, **self.health.lost}
        text = ", ".join(f"{node_id}: {why}" for node_id, why in reasons.items())
        return [Decided(Decision(moment.now_us, running.slot, "broken", text, old_plan=running.plan_hash))]


def _adoptable(spec: ServedModelSpec, moment: Moment) -> RunningPlan | None:
    package = spec.package
    return adopt(
        moment.view, spec.slot, model_digest=package.digest, layer_count=package.layer_count, now_us=moment.now_us
    )
