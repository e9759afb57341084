"""CPU compute as prompt processing sees it: a float32 matrix product."""

from dataclasses import dataclass

import numpy as np

from stage_agent.probes.host import usable_cores
from stage_agent.probes.trial import Trial, best_of

_SIZE = 768
"""Large enough for BLAS to reach its speed, small enough for tens of runs in a second."""


@dataclass(frozen=True, slots=True)
class Compute:
    """``flops_per_s`` of one sgemm, with its conditions."""

    flops_per_s: int
    trial: Trial


def measure_compute(budget_s: float, busy_load_milli: int) -> Compute:
    """Takes about ``budget_s`` and 7 MB."""
    left = np.full((_SIZE, _SIZE), 0.5, dtype=np.float32)
    right = left.copy()
    trial = best_of(lambda: left @ right, budget_s=budget_s, busy_load_milli=busy_load_milli, cores=usable_cores())
    return Compute(int(2 * _SIZE**3 / trial.best_s), trial)
