"""What the simulated mesh is made of besides processes: the settings, the weather, disks, and how loads behave.

Two sets of waits. ``Variant()`` has the program's own defaults. ``short_waits()`` makes everything three to sixty times
shorter, so that ten times as many ballots, restarts and moves meet within one simulated minute: better at breaking
invariants, no proof of how long a recovery takes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.coordinator import Coordinator
from protocol.ids import Slot
from protocol.rows import NodeRow
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.record import SlotRecord

SECOND = 1_000_000
GIB = 2**30
SUSPECT_US, DEAD_US = 3 * SECOND, 6 * SECOND
HEARTBEAT_US = SECOND
SLOW_LOAD_US = 10 * SECOND
"""A load that takes at least this long is counted as slow."""

ELECTION = ElectionSettings(
    settle_us=2 * SECOND, settle_max_us=6 * SECOND, backoff_max_us=6 * SECOND, sticky_us=5 * SECOND
)
ASSIGNMENT = AssignmentSettings(
    load_deadline_min_us=20 * SECOND,
    reply_timeout_us=SECOND,
    replan_spacing_us=5 * SECOND,
    culprit_backoff_us=3 * SECOND,
    culprit_backoff_max_us=6 * SECOND,
    withdraw_grace_us=30 * SECOND,
)
REPLAN = ReplanSettings(min_dwell_us=20 * SECOND)
PLANNER = PlannerSettings(context_length=4096, parallel_lanes=1, search_budget_ms=2)


@dataclass
class Variant:
    """What is built; tests replace one part by a broken one."""

    coordinator: type[Coordinator] = Coordinator
    agent: type[StageAgent] = StageAgent
    row_is_newer: Callable[[NodeRow, NodeRow], bool] = lambda new, old: (
        (new.boot_counter, new.seq)
        > (
            old.boot_counter,
            old.seq,
        )
    )
    blank_instances: bool = False
    clones: bool = False
    full_disks: bool = False
    noise_milli: int = 30
    election: ElectionSettings = field(default_factory=ElectionSettings)
    assignment: AssignmentSettings = field(default_factory=AssignmentSettings)
    replan: ReplanSettings = field(default_factory=ReplanSettings)
    planner: PlannerSettings = PLANNER

    def plain(self) -> "Variant":
        """Without what a scenario says of itself: whose identity is cloned, whose disk is full."""
        return replace(self, clones=False, full_disks=False)


def short_waits(variant: Variant | None = None) -> Variant:
    """``variant`` with waits of seconds instead of minutes."""
    return replace(variant or Variant(), election=ELECTION, assignment=ASSIGNMENT, replan=REPLAN)


@dataclass
class Weather:
    """The network. Probabilities in thousandths; ``blocked`` are directed pairs of node ids."""

    loss_milli: int = 0
    duplicate_milli: int = 0
    delay_us: int = 2_000
    jitter_us: int = 2_000
    crash_milli: int = 0
    load_us: int = 2 * SECOND
    load_failure_milli: int = 0
    runtime_death_milli: int = 0
    blocked: set[tuple[str, str]] = field(default_factory=set)


class Disk:
    """What survives a crash. Records go through their document form and JSON, as on a real disk."""

    def __init__(self) -> None:
        self.term = 0
        self.boots = 0
        self.slots: dict[str, str] = {}
        self.orders = "[]"
        self.full = False

    def restore(self) -> dict[Slot, SlotRecord]:
        return {Slot(name): SlotRecord.from_document(json.loads(text)) for name, text in self.slots.items()}
