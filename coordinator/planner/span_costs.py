"""Arrays for the ordered search: what each node costs on each span, what each hop costs, and what is forbidden.

Costs are scaled: microseconds × ``SCALE`` plus one per stage, so that among plans of equal time fewer stages win without
a second comparison. ``INFINITE`` marks spans that memory, legality or the operator forbid; two of them still add up
inside int64.

A *reply mode* is one way the prediction may travel, each with its own hop arrays; a plan belongs to exactly one:
``direct`` over the return link, ``walk_back`` down the chain where that link refuses, ``star`` through the head.
"""

from dataclasses import dataclass

import numpy as np

from coordinator.planner.cost import STAGE_US_LIMIT, Matrix
from coordinator.planner.instance import Instance
from coordinator.planner.memory import Shape
from coordinator.planner.network import Network
from coordinator.planner.validate import MAX_EXACT

SCALE = 256
INFINITE = 2**60
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


@dataclass(frozen=True)
class SpanCosts:
    """``base[g]`` is the scaled cost matrix of cost group g; ``group[i]`` maps node i to it. Memory is applied later."""

    ids: tuple[str, ...]
    base: Matrix
    group: Matrix
    usable: Matrix
    limit: Matrix
    legal: Matrix

    def at(self, instance: Instance, shape: Shape) -> Matrix:
        """(N, L+1, L+1) scaled costs with ``INFINITE`` wherever ``shape`` does not fit."""
        count = self.base.shape[1]
        cost: Matrix = np.full((len(self.ids), count, count), INFINITE, dtype=np.int64)
        fits = required_matrix(instance, shape)[None] <= self.usable[:, None, None]
        index = np.arange(count)
        fits &= (index[None, :] - index[:, None])[None] <= self.limit[:, None, None]
        fits &= self.legal[None].astype(bool)
        np.copyto(cost, self.base[self.group], where=fits)
        return cost


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
    groups: dict[object, int] = {}
    bases: list[Matrix] = []
    group = []
    legal = legal_spans(instance)
    for node_id in ids:
        times = instance.times[node_id]
        assert times is not None
        key = times.key
        if key not in groups:
            groups[key] = len(bases)
            matrix = times.matrix()
            bases.append(np.where((legal == 1) & (matrix <= STAGE_US_LIMIT), matrix * SCALE + 1, INFINITE))
        group.append(groups[key])
    return SpanCosts(
        ids=ids,
        base=np.stack(bases),
        group=np.array(group, dtype=np.int64),
        usable=np.array([instance.usable[node_id] for node_id in ids], dtype=np.int64),
        limit=np.array([instance.span_limit(nodes[node_id]) for node_id in ids], dtype=np.int64),
        legal=legal,
    )


def hop_arrays(network: Network, ids: tuple[str, ...], *, pessimistic: bool) -> tuple[HopArrays, ...]:
    """The reply modes that some plan over ``ids`` may use. Unknown hops are forbidden, or dear when ``pessimistic``."""
    if network.star:
        return (_star(network, ids, pessimistic=pessimistic),)
    count = len(ids)
    forward, reply = np.zeros((count, count), dtype=np.int64), np.zeros((count, count), dtype=np.int64)
    direct = np.ones((count, count), dtype=bool)
    for i, source in enumerate(ids):
        for j, target in enumerate(ids):
            if i != j:
                forward[i, j] = _us(network.forward(source, target).hop_us, pessimistic=pessimistic)
                reply[i, j] = _us(network.reply(source, target).hop_us, pessimistic=pessimistic)
                direct[i, j] = network.direct_return(source, target)
    modes = [_mode("direct", forward, np.where(direct, reply, INFINITE), forward, reply)]
    if not direct.all() and network.return_mode == "allow_fallback":
        both = np.minimum(forward + reply.T, INFINITE)
        modes.append(_mode("walk_back", both, np.where(direct, INFINITE, 0), forward, reply))
    return tuple(modes)


def _mode(name: str, arc: Matrix, final: Matrix, egress: Matrix, last_egress: Matrix) -> HopArrays:
    scaled_arc = np.where(arc >= INFINITE, INFINITE, arc * SCALE)
    scaled_final = np.where(final >= INFINITE, INFINITE, final * SCALE)
    np.fill_diagonal(scaled_arc, INFINITE)
    np.fill_diagonal(scaled_final, 0 if name != "walk_back" else INFINITE)  # a single stage needs no reply
    return HopArrays(name, scaled_arc[None], scaled_final, egress[None], last_egress)


def _star(network: Network, ids: tuple[str, ...], *, pessimistic: bool) -> HopArrays:
    count = len(ids)
    trip, last = np.zeros((count, count), dtype=np.int64), np.zeros((count, count), dtype=np.int64)
    for i, head in enumerate(ids):
        for j, node in enumerate(ids):
            if i != j:
                trip[i, j] = _us(network.round_trip(head, node, last=False).hop_us, pessimistic=pessimistic)
                last[i, j] = _us(network.round_trip(head, node, last=True).hop_us, pessimistic=pessimistic)
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
