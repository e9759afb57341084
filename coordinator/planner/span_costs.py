"""Arrays for the ordered search: what each node costs on each span, what each hop costs, and what is forbidden.

Costs are scaled: microseconds × ``SCALE`` plus one per stage, so that among plans of equal time fewer stages win without
a second comparison. ``INFINITE`` marks spans that memory, legality or the operator forbid; two of them still add up
inside int64.

A *reply mode* is one way the prediction may travel, each with its own hop arrays; a plan belongs to exactly one:
``direct`` over the return link, ``walk_back`` down the chain where that link refuses, ``star`` through the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from coordinator.planner.cost import STAGE_US_LIMIT, Matrix, StageTimes
from coordinator.planner.instance import Instance
from coordinator.planner.memory import Shape
from coordinator.planner.network import Network
from coordinator.planner.plan import PlannedHop
from coordinator.planner.validate import MAX_EXACT

SCALE = 256
INFINITE = 2**60
HOPELESS = INFINITE // 2
"""Sums from here on contain something infinite, even where a star's shorter reply was subtracted."""
UNKNOWN_HOP_US = 10_000_000
"""Pessimistic default of a hop nobody has measured: it orders candidates, it is never reported as a prediction."""


@dataclass(frozen=True)
class HopArrays:
    """Scaled hop costs of one reply mode over N nodes; ``egress`` ones are microseconds, for the period.

    ``arc[f or 0, l, n]`` is paid when n follows l in a plan that starts at f; ``final[l, f]`` when l is last.
    ``egress[f or 0, l, n]`` is what stage l waits for; ``last_egress[l, f]`` for the last stage, in ``walk_back``
    ``[l, previous]``.
    """

    mode: str
    arc: Matrix
    final: Matrix
    egress: Matrix
    last_egress: Matrix

    def take(self, chosen: tuple[int, ...]) -> "HopArrays":
        """The same arrays for some of the nodes."""
        rows = np.array(chosen, dtype=np.int64)
        pair = np.ix_(rows, rows)
        lead = rows if self.arc.shape[0] > 1 else np.zeros(1, dtype=np.int64)
        cube = np.ix_(lead, rows, rows)
        return HopArrays(self.mode, self.arc[cube], self.final[pair], self.egress[cube], self.last_egress[pair])


@dataclass(frozen=True)
class SpanCosts:
    """``base[g]`` is the scaled cost matrix of cost group g; ``group[i]`` maps node i to it. Memory is applied later."""

    ids: tuple[str, ...]
    base: Matrix
    group: Matrix
    usable: Matrix
    limit: Matrix
    legal: Matrix

    def at(self, required: Matrix) -> Matrix:
        """(N, L+1, L+1) scaled costs with ``INFINITE`` wherever the ``required`` bytes do not fit."""
        count = self.base.shape[1]
        cost: Matrix = np.full((len(self.ids), count, count), INFINITE, dtype=np.int64)
        fits = required[None] <= self.usable[:, None, None]
        index = np.arange(count)
        fits &= (index[None, :] - index[:, None])[None] <= self.limit[:, None, None]
        fits &= self.legal[None].astype(bool)
        for node, group in enumerate(self.group):
            np.copyto(cost[node], self.base[group], where=fits[node])
        return cost

    def take(self, chosen: tuple[int, ...]) -> "SpanCosts":
        """The same tables for some of the nodes."""
        rows = np.array(chosen, dtype=np.int64)
        ids = tuple(self.ids[index] for index in chosen)
        return SpanCosts(ids, self.base, self.group[rows], self.usable[rows], self.limit[rows], self.legal)


def required_matrix(instance: Instance, shape: Shape) -> Matrix:
    """``[a, b]`` = bytes of a stage on ``[a, b)``, saturated just above the largest memory that validation admits."""
    memory, count = instance.memory(shape), instance.layer_count + 1
    most = MAX_EXACT + 1
    prefix = np.minimum(np.array(memory.prefix, dtype=object), most * 256).astype(np.int64)
    required: Matrix = prefix[None, :] - prefix[:, None]
    required[0, :] += memory.model.shared_first_bytes
    required[:, count - 1] += memory.model.shared_last_bytes
    # a saturated prefix has lost its differences: nothing beyond it fits anywhere
    required[:, prefix >= most * 256] = most
    return required


def legal_spans(instance: Instance) -> Matrix:
    """1 where ``[a, b)`` is non-empty and neither end is a forbidden boundary."""
    count = instance.layer_count + 1
    index = np.arange(count)
    legal: Matrix = (index[:, None] < index[None, :]).astype(np.int64)
    for cut in instance.forbidden:
        legal[cut, :] = 0
        legal[:, cut] = 0
    return legal


def span_costs(instance: Instance, ids: tuple[str, ...]) -> SpanCosts:
    """Prepare the nodes ``ids``, which must all have a bandwidth."""
    nodes = {node.node_id: node for node in instance.nodes}
    distinct: dict[object, StageTimes] = {}
    for node_id in ids:
        times = instance.times[node_id]
        assert times is not None
        distinct.setdefault(times.key, times)
    place = {key: index for index, key in enumerate(distinct)}
    legal = legal_spans(instance)
    base = np.full((len(distinct), *legal.shape), INFINITE, dtype=np.int64)
    for row, times in zip(base, distinct.values(), strict=True):
        matrix = times.matrix()
        np.copyto(row, matrix * SCALE + 1, where=(legal == 1) & (matrix <= STAGE_US_LIMIT))
    group = [place[times.key] for node_id in ids if (times := instance.times[node_id]) is not None]
    return SpanCosts(
        ids=ids,
        base=base,
        group=np.array(group, dtype=np.int64),
        usable=np.array([instance.usable[node_id] for node_id in ids], dtype=np.int64),
        limit=np.array([instance.span_limit(nodes[node_id]) for node_id in ids], dtype=np.int64),
        legal=legal,
    )


def hop_arrays(network: Network, ids: tuple[str, ...], *, pessimistic: bool) -> tuple[HopArrays, ...]:
    """The reply modes that some plan over ``ids`` may use. Unknown hops are forbidden, or dear when ``pessimistic``."""
    if network.star:
        return (_star(network, ids, pessimistic=pessimistic),)
    forward = priced_pairs(network, ids, network.forward, pessimistic=pessimistic)
    reply = priced_pairs(network, ids, network.reply, pessimistic=pessimistic)
    place = {node_id: index for index, node_id in enumerate(ids)}
    direct = np.ones((len(ids), len(ids)), dtype=bool)
    for source, target in network.signals.return_refused:
        if source in place and target in place:
            direct[place[source], place[target]] = False
    modes = [_mode("direct", forward, np.where(direct, reply, INFINITE), forward, reply)]
    if not direct.all() and network.return_mode == "allow_fallback":
        both = np.minimum(forward + reply.T, INFINITE)
        modes.append(_mode("walk_back", both, np.where(direct, INFINITE, 0), forward, reply))
    return tuple(modes)


def priced_pairs(
    network: Network, ids: tuple[str, ...], hop: Callable[[str, str], PlannedHop], *, pessimistic: bool
) -> Matrix:
    """``hop`` for every ordered pair (µs). Pairs that no link touches differ only by RTT and are priced by value."""
    rtts = [network.signals.nodes[node_id].coordinator_rtt_us for node_id in ids]
    known = np.array([-1 if rtt is None else rtt for rtt in rtts], dtype=np.int64)
    pair = np.maximum(known[:, None], known[None, :])
    values, where = np.unique(pair, return_inverse=True)
    unknown = UNKNOWN_HOP_US if pessimistic else INFINITE
    prices = [unknown if rtt < 0 else min(network.priced_us(int(rtt), 0), STAGE_US_LIMIT) for rtt in values]
    matrix: Matrix = np.array(prices, dtype=np.int64)[where].reshape(pair.shape)
    place = {node_id: index for index, node_id in enumerate(ids)}
    for source, target in network.signals.edges:
        if source in place and target in place:
            matrix[place[source], place[target]] = _us(hop(source, target).hop_us, pessimistic=pessimistic)
            if (target, source) not in network.signals.edges:
                matrix[place[target], place[source]] = _us(hop(target, source).hop_us, pessimistic=pessimistic)
    np.fill_diagonal(matrix, 0)
    return matrix


def _mode(name: str, arc: Matrix, final: Matrix, egress: Matrix, last_egress: Matrix) -> HopArrays:
    scaled_arc = np.where(arc >= INFINITE, INFINITE, arc * SCALE)
    scaled_final = np.where(final >= INFINITE, INFINITE, final * SCALE)
    np.fill_diagonal(scaled_arc, INFINITE)
    np.fill_diagonal(scaled_final, 0 if name != "walk_back" else INFINITE)  # a single stage needs no reply
    return HopArrays(name, scaled_arc[None], scaled_final, egress[None], last_egress)


def _star(network: Network, ids: tuple[str, ...], *, pessimistic: bool) -> HopArrays:
    count = len(ids)
    trip = priced_pairs(network, ids, partial(network.round_trip, last=False), pessimistic=pessimistic)
    last = priced_pairs(network, ids, partial(network.round_trip, last=True), pessimistic=pessimistic)
    unknown = trip >= INFINITE
    scaled = np.where(unknown, INFINITE, trip * SCALE)
    arc = np.repeat(scaled[:, None, :], count, axis=1)
    index = np.arange(count)
    arc[:, index, index] = INFINITE  # no node follows itself
    arc[index, :, index] = INFINITE  # nor does the head come back
    final = np.where(unknown, INFINITE, (last - trip) * SCALE).T
    np.fill_diagonal(final, 0)
    egress = np.repeat(np.where(unknown, 0, trip)[:, :, None], count, axis=2)  # [f, l, n]: l's own round trip
    return HopArrays("star", arc, final, egress, np.where(unknown, 0, last).T)


def _us(hop_us: int | None, *, pessimistic: bool) -> int:
    if hop_us is None:
        return UNKNOWN_HOP_US if pessimistic else INFINITE
    return min(hop_us, STAGE_US_LIMIT)
