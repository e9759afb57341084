"""What stage 0 measured under the running plan, and what a coordinator makes of it.

Three uses: the traffic that a migration has to pay for itself with, the plan that is far slower than promised (raised once
a plan), and the time per token before a cut is moved, which travels with the new plan so that whoever coordinates then can
move it back. Everything measured is forgotten with the plan it was measured under.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from coordinator.assignment.blame import far_below_predicted
from coordinator.assignment.running import Former, RunningPlan
from coordinator.replan import Observation
from coordinator.view import ClusterView
from protocol.fencing import PlanEpoch

HOUR_US = 3_600_000_000
CHECKPOINT_US = 300_000_000
"""Traffic is remembered in steps of five minutes, for an hour."""
MIN_WATCH_US = 60_000_000
"""Traffic of less than a minute is no rate."""


@dataclass(slots=True)
class Measured:
    """One slot's measurements. Ask with the plan that runs; those of another plan are not handed out."""

    _ballot: PlanEpoch | None = None
    _newest: Observation | None = None
    _checkpoints: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HOUR_US // CHECKPOINT_US))
    """Moment and tokens so far, oldest first."""
    _raised: bool = False

    def take(self, running: RunningPlan | None, observed: Observation, view: ClusterView, now_us: int) -> str | None:
        """News of stage 0; a sentence when the plan is far slower than predicted and that was not said before."""
        if running is None or observed.ballot not in {None, running.ballot}:
            return None  # of a plan that is gone, or not adopted here yet
        if self._ballot != running.ballot:
            self._ballot, self._raised = running.ballot, False
            self._checkpoints.clear()
        self._newest = observed
        if not self._checkpoints or now_us - self._checkpoints[-1][0] >= CHECKPOINT_US:
            self._checkpoints.append((now_us, observed.tokens))
        if self._raised:
            return None
        text = far_below_predicted(running, observed, view)
        self._raised = text is not None
        return text

    def of(self, running: RunningPlan | None, now_us: int) -> Observation | None:
        """The newest observation of ``running`` with the traffic of the last hour, as far as that is known."""
        newest = self._newest
        if running is None or newest is None or self._ballot != running.ballot:
            return None
        if newest.tokens_per_hour is not None:
            return newest
        return replace(newest, tokens_per_hour=self._per_hour(newest.tokens, now_us))

    def former(self, running: RunningPlan | None, now_us: int) -> Former | None:
        """``running`` as what to go back to if a move makes things worse; nothing without a measurement to compare."""
        observed = self.of(running, now_us)
        if running is None or observed is None:
            return None
        return Former(tuple(stage.layer_end for stage in running.stages), observed.tpot_us)

    def _per_hour(self, tokens: int, now_us: int) -> int | None:
        then_us, then = next(
            (point for point in self._checkpoints if now_us - point[0] <= HOUR_US), self._checkpoints[-1]
        )
        watched_us = now_us - then_us
        return None if watched_us < MIN_WATCH_US else max(0, tokens - then) * HOUR_US // watched_us
