"""The plan that serves: how a coordinator learns it from rows, and how it judges its health.

Readiness is the agents' own word in their rows and nothing else. A new coordinator adopts what it finds: stages that
serve at one ballot with one hash and cover the model without a gap are a running plan, whoever placed it.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from config.cache_types import DEFAULT_CACHE_TYPE
from coordinator.planner.plan import Plan
from coordinator.planner.problem import LockedStage, LockedTopology
from coordinator.view import ClusterView, MemberFacts
from protocol.fencing import PlanEpoch, epoch_from_wire
from protocol.ids import Instance, NodeId, Slot
from protocol.rows import StageFact

LOST_ANOTHER = "load_failed: stage_lost"
"""How an agent's detail begins when its engine ended because another stage went away: nobody is to blame for that."""
READINESS_GRACE_US = 30_000_000
"""How long a row may lag behind the agent's ``Active`` before the mismatch counts as a lost stage."""


@dataclass(frozen=True, slots=True)
class RunningStage:
    """One stage as its agent confirmed it."""

    node_id: NodeId
    instance: Instance
    layer_start: int
    layer_end: int
    required_bytes: int


@dataclass(frozen=True, slots=True)
class Former:
    """The cuts before the last move by measured timings, over the same nodes, and what a token took under them."""

    layer_ends: tuple[int, ...]
    tpot_us: int


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """Active at every stage. ``plan`` is ``None`` while an adopted plan has not been evaluated yet."""

    slot: Slot
    ballot: PlanEpoch
    plan_hash: str
    model_digest: str
    stages: tuple[RunningStage, ...]
    context_length: int
    lanes: int
    active_since_us: int
    plan: Plan | None = None
    cache_type: str = DEFAULT_CACHE_TYPE
    former: Former | None = None
    """What ran before, when this plan moved its cuts by measured timings: kept by stage 0, so any coordinator knows it."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """In stage order."""
        return tuple(stage.node_id for stage in self.stages)

    def topology(self) -> LockedTopology:
        """This very split as a locked topology, to evaluate it under today's signals."""
        return LockedTopology(
            tuple(LockedStage(stage.node_id, stage.layer_start, stage.layer_end) for stage in self.stages)
        )

    def former_topology(self) -> LockedTopology | None:
        """The split before the last move; ``None`` when there was none, or when it is no split of these nodes."""
        if self.former is None or len(self.former.layer_ends) != len(self.stages):
            return None
        spans = itertools.pairwise((0, *self.former.layer_ends))
        stages = tuple(LockedStage(each.node_id, *span) for each, span in zip(self.stages, spans, strict=True))
        whole = all(stage.layer_start < stage.layer_end for stage in stages)
        return LockedTopology(stages) if whole and stages[-1].layer_end == self.stages[-1].layer_end else None


@dataclass(frozen=True, slots=True)
class Health:
    """``lost``: the stage is gone. ``leaving``: it works but must be replaced. ``unsure``: connected, wait for it."""

    lost: Mapping[NodeId, str] = field(default_factory=dict)
    leaving: Mapping[NodeId, str] = field(default_factory=dict)
    unsure: tuple[NodeId, ...] = ()
    superseded: bool = False
    """A stage serves a higher ballot: somebody else replaced this plan."""

    @property
    def broken(self) -> bool:
        """It cannot serve, or must not for long."""
        return bool(self.lost or self.leaving)


def adopt(view: ClusterView, slot: Slot, *, model_digest: str, layer_count: int, now_us: int) -> RunningPlan | None:
    """The complete plan of ``slot`` with the highest ballot that connected stages serve, if there is one."""
    groups: dict[tuple[PlanEpoch, str], list[tuple[MemberFacts, StageFact]]] = defaultdict(list)
    for member in view.connected.values():
        fact = member.fact(slot)
        if fact is None or fact.state != "serving" or fact.active is None or fact.plan_hash is None:
            continue
        if fact.model_digest == model_digest:
            groups[epoch_from_wire(fact.active), fact.plan_hash].append((member, fact))
    for (ballot, plan_hash), found in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        found.sort(key=lambda pair: (pair[1].stage_index, pair[0].node_id))
        if not _complete([fact for _, fact in found], layer_count):
            continue
        first = found[0][1]
        stages = tuple(
            RunningStage(
                member.node_id,
                Instance(member.row.instance),
                fact.layer_start,
                fact.layer_end,
                fact.required_bytes,
            )
            for member, fact in found
        )
        former = None if first.former is None else Former(first.former.layer_ends, first.former.tpot_us)
        return RunningPlan(
            slot,
            ballot,
            plan_hash,
            model_digest,
            stages,
            first.context_length,
            first.lanes,
            active_since_us=now_us,
            cache_type=first.cache_type,
            former=former,
        )
    return None


def _complete(facts: list[StageFact], layer_count: int) -> bool:
    position = 0
    for index, fact in enumerate(facts):
        if fact.stage_index != index or fact.stage_count != len(facts) or fact.layer_start != position:
            return False
        position = fact.layer_end
    return position == layer_count


def health(
    running: RunningPlan, view: ClusterView, *, excluded: frozenset[NodeId], confirmed: frozenset[NodeId], now_us: int
) -> Health:
    """Judge every stage by its member's state and own word.

    ``confirmed``: nodes whose row has already shown this plan as active; for the others a row that lags is forgiven for
    ``READINESS_GRACE_US``.
    """
    lost: dict[NodeId, str] = {}
    leaving: dict[NodeId, str] = {}
    unsure: list[NodeId] = []
    superseded = False
    for stage in running.stages:
        member = view.members.get(stage.node_id)
        if member is None or not member.connected:
            lost[stage.node_id] = "node_lost"
            continue
        if member.row.instance != stage.instance:
            lost[stage.node_id] = "node_restarted"
            continue
        lagging = now_us - running.active_since_us < READINESS_GRACE_US and stage.node_id not in confirmed
        word, newer = _stage_word(running, member.fact(running.slot), lagging=lagging)
        superseded |= newer
        if word is not None:
            lost[stage.node_id] = word
        elif member.conflict:
            leaving[stage.node_id] = "conflict"
        elif member.row.status != "running":
            leaving[stage.node_id] = member.row.status
        elif stage.node_id in excluded:
            leaving[stage.node_id] = "excluded"
        if member.state == "suspect" or not member.settled:
            unsure.append(stage.node_id)
    return Health(lost, leaving, tuple(unsure), superseded)


def _stage_word(running: RunningPlan, fact: StageFact | None, *, lagging: bool) -> tuple[str | None, bool]:
    """Why the agent's word contradicts the plan (``None`` = it does not), and whether it serves something newer."""
    active = None if fact is None or fact.active is None else epoch_from_wire(fact.active)
    if fact is not None and active is not None and active > running.ballot:
        return "superseded", fact.state == "serving"
    if fact is None or active != running.ballot:
        return (None if lagging else "not_serving"), False
    if fact.state != "serving":
        return ("lost_a_stage" if fact.detail.startswith(LOST_ANOTHER) else "stage_failed"), False
    if fact.plan_hash != running.plan_hash:
        return "other_plan", False
    return None, False


def shows(running: RunningPlan, member: MemberFacts) -> bool:
    """The member's row says that it serves this plan."""
    fact = member.fact(running.slot)
    return (
        fact is not None
        and fact.state == "serving"
        and fact.active is not None
        and epoch_from_wire(fact.active) == running.ballot
    )
