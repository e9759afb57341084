"""CPU memory bandwidth as decoding sees it: a matrix of weights streamed once through a matrix-vector product.

numpy's BLAS uses all cores for it, like an engine's decoder. The matrix must not fit in the cache: four times the last
level is wanted. Virtual machines report their host's cache, so the wish is bounded per core, by free memory and by time:
memory is touched step by step until the share of the budget for that is used. What was reached is part of the result.
"""

import time
from dataclasses import dataclass

import numpy as np

from stage_agent.probes.host import available_memory_bytes, last_level_cache_bytes, usable_cores
from stage_agent.probes.trial import Trial, best_of

CACHE_MULTIPLE = 4
MAX_CACHE_PER_CORE_BYTES = 64 * 1024 * 1024
"""No processor has more last-level cache per core; a larger report is a host's, shared with other guests."""
MAX_BUFFER_BYTES = 2 * 1024**3
_COLUMNS = 4_096
_STEP_BYTES = 16 * 1024 * 1024
_ALLOCATION_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """``bytes_per_s`` read, with its conditions."""

    bytes_per_s: int
    buffer_bytes: int
    cache_bytes: int
    """As reported; ``buffer_bytes`` below four times this may show some cache."""
    trial: Trial


def measure_bandwidth(budget_s: float, busy_load_milli: int) -> Bandwidth:
    """Takes about ``budget_s``; allocates and frees up to a quarter of the free memory."""
    started = time.perf_counter()
    cores, cache = usable_cores(), last_level_cache_bytes()
    matrix = _touched_matrix(buffer_target_bytes(cache, cores, available_memory_bytes()), budget_s * _ALLOCATION_SHARE)
    vector = np.ones(_COLUMNS, dtype=np.float32)
    trial = best_of(
        lambda: matrix @ vector,
        budget_s=max(0.05, budget_s - (time.perf_counter() - started)),
        busy_load_milli=busy_load_milli,
        cores=cores,
    )
    return Bandwidth(int(matrix.nbytes / trial.best_s), matrix.nbytes, cache, trial)


def buffer_target_bytes(cache_bytes: int, cores: int, available_bytes: int) -> int:
    """The wished size: four caches, bounded per core, by a quarter of what is free, and by 2 GiB; at least one step."""
    cache = min(cache_bytes, cores * MAX_CACHE_PER_CORE_BYTES)
    return max(_STEP_BYTES, min(CACHE_MULTIPLE * cache, available_bytes // 4, MAX_BUFFER_BYTES))


def _touched_matrix(target_bytes: int, budget_s: float) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """Up to ``target_bytes`` of written memory: pages never written would all be one page of zeros in the cache."""
    rows = target_bytes // (4 * _COLUMNS)
    step = _STEP_BYTES // (4 * _COLUMNS)
    matrix = np.empty((rows, _COLUMNS), dtype=np.float32)
    ends = time.perf_counter() + budget_s
    touched = 0
    while touched < rows and (touched == 0 or time.perf_counter() < ends):
        matrix[touched : touched + step] = 1
        touched = min(rows, touched + step)
    return matrix[:touched]
