"""Choosing among placements whose decode time is modelled: every node has a bandwidth, every hop an RTT.

Memory is the only thing a shape changes, so a smaller shape (context and lanes) admits every plan of a larger one.
The smallest shape is therefore solved first: its optimum bounds all others, and its node prices serve them. Steps 2–4
of the comparison then read: if any plan can meet the target, only plans that meet it count; values within
``objective_tolerance`` of the best count as equal (with ``prefer = "context"`` every plan that meets the target does);
of the shapes that reach such a value the one with the largest context, then the most lanes, wins, with its own best plan.

The throughput value of a plan is ``max(TPOT, c · period)`` µs per c tokens, c = min(concurrency, lanes). It is found by
bisection: "TPOT ≤ V and period ≤ V / c" is one serial search whose spans are limited by the period.
"""

from coordinator.planner.evaluate import evaluate
from coordinator.planner.instance import Candidate
from coordinator.planner.memory import Shape
from coordinator.planner.searcher import Choice, Searcher
from coordinator.planner.span_costs import INFINITE, SCALE
from coordinator.planner.ties import roomiest


def choose_interactive(searcher: Searcher, shapes: tuple[Shape, ...]) -> Choice | None:
    """Least decode time. ``None`` when no modelled plan is feasible."""
    request = searcher.instance.problem.request
    smallest = _smallest(shapes)
    best = searcher.solve(smallest)
    if best.best >= INFINITE:
        return None
    value, target = best.best // SCALE, request.target_decode_tpot_us
    ceiling = value * (1_000 + request.objective_tolerance_milli) // 1_000
    if value <= target:
        ceiling = target if request.prefer == "context" else min(ceiling, target)
    chosen, found = smallest, best
    for shape in shapes:
        if shape == smallest:
            break
        outcome = searcher.solve(shape, (ceiling + 1) * SCALE)
        if outcome.best < INFINITE:
            chosen, found = shape, outcome
            break
    return Choice(roomiest(searcher, chosen, found), found.best // SCALE, min(found.best, found.lower) // SCALE)


def choose_throughput(searcher: Searcher, shapes: tuple[Shape, ...]) -> Choice | None:
    """Most tokens per second at the stated concurrency. ``None`` when no modelled plan is feasible."""
    request = searcher.instance.problem.request
    serial = searcher.solve(_smallest(shapes))
    if serial.best >= INFINITE:
        return None
    target, within = request.target_decode_tpot_us, serial.best // SCALE <= request.target_decode_tpot_us
    cap = target if within else INFINITE // SCALE - 1
    streams = {shape: min(request.concurrency, shape.lanes) for shape in shapes}
    best: tuple[int, int] | None = None
    for count in sorted(set(streams.values())):
        shape = _smallest(tuple(shape for shape in shapes if streams[shape] == count))
        found = _least_value(searcher, shape, count, cap, INFINITE)
        if found is not None and (best is None or found.value_us * best[1] < best[0] * count):
            best = found.value_us, count
    if best is None:
        return None
    for shape in shapes:
        ceiling = best[0] * streams[shape] * (1_000 + request.objective_tolerance_milli) // (1_000 * best[1])
        if within and request.prefer == "context":
            ceiling = INFINITE
        found = _least_value(searcher, shape, streams[shape], cap, ceiling + 1)
        if found is not None:
            return _fewest(searcher, found, streams[shape], cap)
    return None


def _smallest(shapes: tuple[Shape, ...]) -> Shape:
    return min(shapes, key=lambda shape: (shape.context_length, shape.lanes))


def _value(searcher: Searcher, candidate: Candidate, streams: int) -> int:
    modeled = evaluate(searcher.instance, candidate).modeled
    assert modeled.decode_tpot_us is not None
    assert modeled.pipelined_period_us is not None
    return max(modeled.decode_tpot_us, streams * modeled.pipelined_period_us)


def _least_value(searcher: Searcher, shape: Shape, streams: int, cap: int, upper: int) -> Choice | None:
    """The plan of ``shape`` with the least value below ``upper`` whose TPOT is at most ``cap`` (µs)."""
    serial = searcher.solve(shape, _scaled(min(cap, upper - 1)))
    if serial.best >= INFINITE:
        return None
    candidate = searcher.candidate(shape, serial)
    value = _value(searcher, candidate, streams)
    best = (value, candidate) if value < upper else None
    low = proven = min(serial.best, serial.lower) // SCALE
    high = min(value, upper)
    while low < high:
        middle = (low + high) // 2
        probe = searcher.solve(shape, _scaled(min(middle, cap)), period_us=middle // streams)
        if probe.best < INFINITE:
            candidate = searcher.candidate(shape, probe)
            value = _value(searcher, candidate, streams)
            if best is None or value < best[0]:
                best = (value, candidate)
            if value <= middle:
                high = value
                continue
        # nothing at or below the middle: proven, unless the budget ran out or the reply walked back
        if low == proven and probe.best >= INFINITE and probe.lower >= _scaled(min(middle, cap)):
            proven = middle + 1
        low = middle + 1
    if best is None or best[0] >= upper:
        return None
    return Choice(best[1], best[0], min(proven, best[0]))


def _fewest(searcher: Searcher, choice: Choice, streams: int, cap: int) -> Choice:
    """Among plans of this value the one with the fewest stages, then the least TPOT."""
    shape = choice.candidate.shape
    limit = _scaled(min(choice.value_us, cap))
    found = searcher.fewest(shape, limit, choice.value_us // streams)
    if found.best >= INFINITE:
        return choice
    candidate = searcher.candidate(shape, found)
    shorter = len(candidate.sequence) <= len(choice.candidate.sequence)
    if shorter and _value(searcher, candidate, streams) <= choice.value_us:
        return Choice(candidate, choice.value_us, choice.lower_us)
    return choice


def _scaled(limit_us: int) -> int:
    """Exclusive scaled bound for plans of at most ``limit_us``."""
    return min(INFINITE, (limit_us + 1) * SCALE)
