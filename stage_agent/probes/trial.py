"""Best of several timed runs within a budget, with the load of the machine recorded and busy runs set aside.

On a machine that also works for others, results move by a factor of ten; the best run is the least disturbed one. A run
during which others used more than the allowed share of the cores counts only when no quiet one was seen, and the result
then says ``busy``: good enough to plan with today, not to be kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from stage_agent.probes.host import LoadSample, others_load_milli, sample_load

MIN_LOAD_WINDOW_S = 0.05
"""The kernel counts processor time in ticks of 10 ms; shorter runs are grouped until the load can be told."""
MAX_RUNS = 1_000


@dataclass(frozen=True, slots=True)
class Trial:
    """The best time of one run and what it was measured under."""

    best_s: float
    runs: int
    quiet_runs: int
    others_load_milli: int
    """During the group of runs that the best time is from."""

    @property
    def busy(self) -> bool:
        """No quiet run was seen."""
        return not self.quiet_runs


@dataclass(slots=True)
class _Group:
    best_s: float
    runs: int
    load_milli: int


def best_of(
    run: Callable[[], object],
    *,
    budget_s: float,
    busy_load_milli: int,
    cores: int,
    wanted_quiet_runs: int = 5,
    load: Callable[[], LoadSample] = sample_load,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Repeat ``run`` until ``wanted_quiet_runs`` quiet ones were seen or the budget is used; at least one group runs."""
    ends = clock() + budget_s
    groups: list[_Group] = []
    while True:
        groups.append(_measure_group(run, ends, cores, load, clock))
        quiet = [group for group in groups if group.load_milli <= busy_load_milli]
        runs = sum(group.runs for group in groups)
        if clock() >= ends or sum(group.runs for group in quiet) >= wanted_quiet_runs or runs >= MAX_RUNS:
            break
    best = min(quiet or groups, key=lambda group: group.best_s)
    return Trial(best.best_s, runs, sum(group.runs for group in quiet), best.load_milli)


def _measure_group(
    run: Callable[[], object], ends: float, cores: int, load: Callable[[], LoadSample], clock: Callable[[], float]
) -> _Group:
    before, began = load(), clock()
    best_s, runs = float("inf"), 0
    while True:
        started = clock()
        run()
        now = clock()
        best_s, runs = min(best_s, now - started), runs + 1
        if now - began >= MIN_LOAD_WINDOW_S or now >= ends or runs >= MAX_RUNS:
            return _Group(max(best_s, 1e-9), runs, others_load_milli(before, load(), cores))
