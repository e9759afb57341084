"""The loads of all slots of one node against its memory.

Make before break: a staged load starts beside what serves when both fit. When it fits only without loads that are already
leaving, it waits and starts on the ``Unloaded`` that makes room. Loads that wait occupy nothing yet.
"""

from protocol.ballots import StageAssignment
from protocol.fencing import PlanEpoch
from protocol.ids import Slot
from stage_agent.stage.effects import Load, StageEffect, Unload
from stage_agent.stage.slot import Held, SlotState, memory_bytes


class LoadLedger:
    """Who occupies which memory. Shares the slot states with ``StageAgent``; touches only their loads."""

    def __init__(self, slots: dict[Slot, SlotState], usable_memory_bytes: int, *, keeps_loads: bool = True) -> None:
        self._slots = slots
        self._offered_bytes = usable_memory_bytes
        self.usable_memory_bytes = usable_memory_bytes
        """What is offered to layers, less what other programs have taken of it by now."""
        self.keeps_loads = keeps_loads
        """Whether the engine can go on under another plan with what it has loaded."""
        self._last_weights = 0

    def on_allocatable(self, allocatable_bytes: int) -> None:
        """``allocatable_bytes`` more could be allocated now.

        What the loads occupy already counts as theirs, all of it from the start of a load: it is on its way.
        """
        self.usable_memory_bytes = min(self._offered_bytes, allocatable_bytes + memory_bytes(self._occupying()))

    def available_to(self, state: SlotState) -> tuple[int, int]:
        """For a promise: bytes free when everything stays, and what retiring the slot's active plan would add.

        The slot's staged load does not count: a newer ballot supersedes it. Leaving loads do not count either: a new
        load waits for them.
        """
        stays = self._stays(state)
        others = [item for item in stays if item is not state.serving]
        free = self.usable_memory_bytes - memory_bytes(stays)
        return max(0, free), memory_bytes(stays) - memory_bytes(others)

    def shortage(self, state: SlotState, assignment: StageAssignment) -> str | None:
        """Why ``assignment`` cannot fit beside what stays, or ``None``. A load that shares weights needs nothing more."""
        if self._reusable(state, assignment) is not None:
            return None
        free = self.usable_memory_bytes - memory_bytes(self._stays(state))
        if assignment.required_bytes <= free:
            return None
        return f"needs {assignment.required_bytes} bytes, {max(0, free)} are free"

    def stage(
        self, state: SlotState, ballot: PlanEpoch, plan_hash: str, assignment: StageAssignment, now_us: int
    ) -> list[StageEffect]:
        """Make ``assignment`` the slot's staged load: label shared weights, or start, or wait. The older one leaves."""
        reused = self._reusable(state, assignment)
        self._last_weights += 1
        staged = Held(
            ballot=ballot,
            plan_hash=plan_hash,
            assignment=assignment,
            weights=self._last_weights if reused is None else reused.weights,
            phase="waiting",
            reuse=None if reused is None else reused.ballot,
            total_bytes=assignment.parameter_bytes,
            progress_at_us=now_us,
        )
        superseded, state.staged, state.failure = state.staged, staged, None
        effects: list[StageEffect] = []
        if reused is not None:
            effects += self._start(state, staged)
        if superseded is not None:
            effects += self.release(state, superseded)
        return effects + self.start_waiting()

    def release(self, state: SlotState, held: Held) -> list[StageEffect]:
        """Let go of a load that the caller has taken out of its place; one that never started is simply forgotten."""
        if held.phase == "waiting":
            return []
        state.leaving[held.ballot] = held
        return [Unload(state.slot, held.ballot)]

    def start_waiting(self) -> list[StageEffect]:
        """Start every waiting load that fits beside all that still occupies memory."""
        effects: list[StageEffect] = []
        for _, state in sorted(self._slots.items()):
            staged = state.staged
            if staged is not None and staged.phase == "waiting" and self._fits(staged):
                effects += self._start(state, staged)
        return effects

    def _fits(self, staged: Held) -> bool:
        return memory_bytes([*self._occupying(), staged]) <= self.usable_memory_bytes

    def _occupying(self) -> list[Held]:
        """Everything that started and is not known to be gone."""
        return [item for state in self._slots.values() for item in state.holds() if item.phase != "waiting"]

    def _start(self, state: SlotState, held: Held) -> list[StageEffect]:
        held.phase = "loading"
        return [Load(state.slot, held.ballot, held.assignment, held.reuse)]

    def _reusable(self, state: SlotState, assignment: StageAssignment) -> Held | None:
        return state.reusable(assignment) if self.keeps_loads else None

    def _stays(self, state: SlotState) -> list[Held]:
        """What is there when a newer ballot of ``state`` has superseded its staged load and the leaving are gone."""
        stays: list[Held] = []
        for other in self._slots.values():
            kept = (other.serving,) if other is state else (other.serving, other.staged)
            stays += [item for item in kept if item is not None]
        return stays
