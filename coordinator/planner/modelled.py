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
from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.memory import Shape
from coordinator.planner.searcher import Choice, Searcher, searcher_for
from coordinator.planner.span_costs import INFINITE, SCALE
from coordinator.planner.states import Budget
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
    best, known = _best_rate(searcher, streams, cap)
    for shape in shapes:
        ceiling = best.value_us * streams[shape] * (1_000 + request.objective_tolerance_milli)
        ceiling //= 1_000 * streams[best.candidate.shape]
        if within and request.prefer == "context":
            ceiling = INFINITE
        found = known[shape] if shape in known else _least_value(searcher, shape, streams[shape], cap, ceiling + 1)
        if found is not None and found.value_us <= ceiling:
            return _fewest(searcher, found, streams[shape], cap)
    return best


def _best_rate(searcher: Searcher, streams: dict[Shape, int], cap: int) -> tuple[Choice, dict[Shape, Choice]]:
    """The best value per stream over all shapes, and what was solved on the way. Memory binds least in small shapes."""
    best: Choice | None = None
    known: dict[Shape, Choice] = {}
    for count in sorted(set(streams.values()), reverse=True):
        shape = _smallest(tuple(shape for shape in streams if streams[shape] == count))
        # fewer streams must beat the rate already reached
        upper = INFINITE if best is None else -(-best.value_us * count // streams[best.candidate.shape])
        found = _least_value(searcher, shape, count, cap, upper)
        if found is not None:
            best = known[shape] = found
    assert best is not None, "a serial plan exists at the smallest shape"
    return best, known


def choose_unmodelled(instance: Instance, rival: Candidate, budget: Budget) -> Candidate | None:
    """Known speeds but unknown hops: the plan with the least stage time at ``rival``'s shape, if it needs no more stages.

    Unknown hops are priced at a pessimistic default, so fewer and known hops come first and the stages decide the rest.
    """
    searcher = searcher_for(instance, budget, pessimistic=True)
    if searcher is None:
        return None
    found = searcher.solve(rival.shape)
    if found.best >= INFINITE or len(found.sequence) > len(rival.sequence):
        return None
    return roomiest(searcher, rival.shape, found)


def _smallest(shapes: tuple[Shape, ...]) -> Shape:
    return min(shapes, key=lambda shape: (shape.context_length, shape.lanes))


def _value(searcher: Searcher, candidate: Candidate, streams: int) -> int:
    modeled = evaluate(searcher.instance, candidate).modeled
    assert modeled.decode_tpot_us is not None
    assert modeled.pipelined_period_us is not None
    return max(modeled.decode_tpot_us, streams * modeled.pipelined_period_us)


def _least_value(searcher: Searcher, shape: Shape, streams: int, cap: int, upper: int) -> Choice | None:
    """The plan of ``shape`` with the least value below ``upper`` whose TPOT is at most ``cap`` (µs).

    ``low`` rises over refuted values, ``high`` falls to the best value known. A refuted middle is followed by a probe
    just below ``high``, which ends the search when it is refuted too.
    """
    serial = searcher.solve(shape, _scaled(min(cap, upper - 1)))
    if serial.best >= INFINITE:
        return None
    candidate = searcher.candidate(shape, serial)
    value = _value(searcher, candidate, streams)
    best = (value, candidate) if value < upper else None
    low = proven = min(serial.best, serial.lower) // SCALE
    high, refuted = min(value, upper), False
    while low < high and searcher.budget.left > 0:
        middle = high - 1 if refuted else (low + high) // 2
        limit = _scaled(min(middle, cap))
        probe = searcher.solve(shape, limit, period_us=middle // streams)
        refuted = True
        if probe.best < INFINITE:
            candidate = searcher.candidate(shape, probe)
            value = _value(searcher, candidate, streams)
            if best is None or value < best[0]:
                best = (value, candidate)
            if value <= middle:
                high, refuted = value, False
                continue
        # nothing at or below the middle: proven, unless the budget ran out
        if low == proven and probe.best >= INFINITE and probe.lower >= limit:
            proven = middle + 1
        low = middle + 1
    if best is None or best[0] >= upper:
        return None
    return Choice(best[1], best[0], min(proven, best[0]))


def _fewest(searcher: Searcher, choice: Choice, streams: int, cap: int) -> Choice:
    """Among plans of this value the one with the fewest stages, then the least TPOT, then the most memory left."""
    shape = choice.candidate.shape
    limit = _scaled(min(choice.value_us, cap))
    found = searcher.fewest(shape, limit, choice.value_us // streams)
    if found.best >= INFINITE:
        return choice
    candidate = roomiest(searcher, shape, found, choice.value_us // streams)
    shorter = len(candidate.sequence) <= len(choice.candidate.sequence)
    if shorter and _value(searcher, candidate, streams) <= choice.value_us:
        return Choice(candidate, choice.value_us, choice.lower_us)
    return choice


def _scaled(limit_us: int) -> int:
    """Exclusive scaled bound for plans of at most ``limit_us``."""
    return min(INFINITE, (limit_us + 1) * SCALE)
