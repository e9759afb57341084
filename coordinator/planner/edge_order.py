"""The order of a subset that minimises the sum of adjacent directed hop costs, for every subset at once (Held–Karp).

Used where speeds are not known but links are. Unknown hops cost a pessimistic default; ties keep the capacity order.
``path[S, i]`` is the least cost of a path that starts at i and visits S. Up to ``EXACT_NODES`` nodes are ordered
exactly, in every subset; of a larger fleet the ones with the most memory enter, wanted nodes always. A plan that needs
more stages than that takes the nodes with the most memory, ordered by a beam.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.instance import Instance
from coordinator.planner.span_costs import INFINITE, priced_pairs

EXACT_NODES = 12
BEAM_ORDERS = 8


@dataclass(frozen=True)
class EdgeOrders:
    """``forward`` and ``reply`` are over all nodes in capacity order, ``path`` over the positions of ``nodes``."""

    nodes: tuple[int, ...]
    forward: Matrix
    reply: Matrix
    path: Matrix
    star: bool
    pin: int | None

    def orders(self, subsets: Matrix) -> Matrix:
        """The best order of every row of ``subsets`` (sorted indices), as indices."""
        return np.array([self._order([int(node) for node in row]) for row in subsets], dtype=np.int64).reshape(
            subsets.shape
        )

    def network(self, orders: Matrix) -> Matrix:
        """Σ hops of every order, the reply included, unknown ones at the pessimistic default."""
        if orders.shape[1] < 2:
            return np.zeros(orders.shape[0], dtype=np.int64)
        if self.star:
            trips: Matrix = self.forward[orders[:, :1], orders[:, 1:]].sum(axis=1)
            return trips
        total: Matrix = self.forward[orders[:, :-1], orders[:, 1:]].sum(axis=1)
        return total + self.reply[orders[:, -1], orders[:, 0]]

    def least(self, size: int) -> int:
        """A lower bound on ``network`` over all orders of ``size`` nodes."""
        if size < 2:
            return 0
        off = ~np.eye(self.forward.shape[0], dtype=bool)
        replies = 0 if self.star else int(self.reply[off].min())
        return int(self.forward[off].min()) * (size - 1) + replies

    def _order(self, members: list[int]) -> list[int]:
        if self.star:
            return self._star(members)
        if set(members) <= set(self.nodes):
            return self._chain(members)
        return self._beam(members)

    def _chain(self, members: list[int]) -> list[int]:
        place = {node: index for index, node in enumerate(self.nodes)}
        mask = sum(1 << place[member] for member in members)
        starts = members if self.pin is None else [self.pin]
        current = min(starts, key=lambda member: (int(self.path[mask, place[member]]), member))
        order = [current]
        while len(order) < len(members):
            mask ^= 1 << place[current]
            rest = [member for member in members if mask >> place[member] & 1]
            current = self._nearest(current, rest, self.path[mask], place)
            order.append(current)
        return order

    def _nearest(self, source: int, rest: list[int], onward: Matrix, place: dict[int, int]) -> int:
        return min(rest, key=lambda member: (int(self.forward[source, member] + onward[place[member]]), member))

    def _star(self, members: list[int]) -> list[int]:
        heads = members if self.pin is None else [self.pin]
        head = min(heads, key=lambda node: (sum(int(self.forward[node, m]) for m in members if m != node), node))
        return [head, *(node for node in members if node != head)]

    def _beam(self, members: list[int]) -> list[int]:
        starts = members if self.pin is None else [self.pin]
        beam: list[tuple[int, tuple[int, ...]]] = [(0, (start,)) for start in starts]
        for _ in range(len(members) - 1):
            longer = [
                (cost + int(self.forward[order[-1], node]), (*order, node))
                for cost, order in beam
                for node in members
                if node not in order
            ]
            beam = sorted(longer)[:BEAM_ORDERS]
        return list(beam[0][1])


def edge_orders(instance: Instance) -> EdgeOrders:
    """Prepare the tables for the eligible nodes."""
    request, ids = instance.problem.request, tuple(node.node_id for node in instance.nodes)
    wanted = [i for i, node_id in enumerate(ids) if node_id in request.require_nodes or node_id == request.pin_stage0]
    rest = [i for i in range(len(ids)) if i not in wanted]
    chosen = tuple(sorted([*wanted[:EXACT_NODES], *rest[: max(0, EXACT_NODES - len(wanted))]]))
    network = instance.network
    out = partial(network.round_trip, last=False) if network.star else network.forward
    forward = priced_pairs(network, ids, out, pessimistic=True)
    reply = priced_pairs(network, ids, network.reply, pessimistic=True)
    pin = None if request.pin_stage0 is None else ids.index(request.pin_stage0)
    path = _paths(forward[np.ix_(chosen, chosen)])
    return EdgeOrders(chosen, forward, reply, path, network.star, pin)


def _paths(forward: Matrix) -> Matrix:
    count = forward.shape[0]
    masks = np.arange(1 << count)
    sizes = np.array([int(mask).bit_count() for mask in masks])
    path: Matrix = np.full((1 << count, count), INFINITE, dtype=np.int64)
    for node in range(count):
        path[1 << node, node] = 0
    for size in range(2, count + 1):
        for node in range(count):
            chosen = masks[(sizes == size) & ((masks >> node) & 1 == 1)]
            path[chosen, node] = np.minimum((path[chosen ^ (1 << node)] + forward[node][None, :]).min(axis=1), INFINITE)
    return path
