"""The order of a subset that minimises the sum of adjacent directed hop costs, for every subset at once (Held–Karp).

Used where speeds are not known but links are. Unknown hops cost a pessimistic default; ties keep the capacity order.
``path[S, i]`` is the least cost of a path that starts at i and visits S. Up to ``EXACT_NODES`` nodes are ordered
exactly, in every subset; of a larger fleet the ones with the most memory enter, wanted nodes always.
"""

from dataclasses import dataclass

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.instance import Instance
from coordinator.planner.span_costs import INFINITE, UNKNOWN_HOP_US

EXACT_NODES = 12


@dataclass(frozen=True)
class EdgeOrders:
    """``nodes`` are capacity-order indices; the tables are over positions in ``nodes``."""

    nodes: tuple[int, ...]
    forward: Matrix
    reply: Matrix
    path: Matrix
    star: bool
    pin: int | None

    def orders(self, subsets: Matrix) -> Matrix:
        """The best order of every row of ``subsets`` (sorted indices), as indices."""
        place = {node: index for index, node in enumerate(self.nodes)}
        return np.array(
            [self._star(row) if self.star else self._chain([place[int(node)] for node in row]) for row in subsets],
            dtype=np.int64,
        ).reshape(subsets.shape)

    def network(self, orders: Matrix) -> Matrix:
        """Σ hops of every order, the reply included, unknown ones at the pessimistic default."""
        if orders.shape[1] < 2:
            return np.zeros(orders.shape[0], dtype=np.int64)
        place = np.zeros(max(self.nodes) + 1, dtype=np.int64)
        place[list(self.nodes)] = np.arange(len(self.nodes))
        rows = place[orders]
        if self.star:
            total: Matrix = self.forward[rows[:, :1], rows[:, 1:]].sum(axis=1)
            return total
        total = self.forward[rows[:, :-1], rows[:, 1:]].sum(axis=1)
        return total + self.reply[rows[:, -1], rows[:, 0]]

    def least(self, size: int) -> int:
        """A lower bound on ``network`` over all orders of ``size`` nodes."""
        if size < 2:
            return 0
        off = ~np.eye(len(self.nodes), dtype=bool)
        if self.star:
            return int(self.forward[off].min()) * (size - 1)
        return int(self.forward[off].min()) * (size - 1) + int(self.reply[off].min())

    def _chain(self, members: list[int]) -> list[int]:
        mask = sum(1 << member for member in members)
        starts = members if self.pin is None else [self.nodes.index(self.pin)]
        current = min(starts, key=lambda member: (int(self.path[mask, member]), member))
        order = [current]
        while mask != 1 << current:
            mask ^= 1 << current
            rest = [member for member in members if mask >> member & 1]
            source = current
            current = min(
                rest, key=lambda member: (int(self.forward[source, member] + self.path[mask, member]), member)
            )
            order.append(current)
        return [self.nodes[member] for member in order]

    def _star(self, row: Matrix) -> list[int]:
        place = {node: index for index, node in enumerate(self.nodes)}
        members = [int(node) for node in row]
        heads = members if self.pin is None else [self.pin]
        head = min(
            heads, key=lambda node: (sum(int(self.forward[place[node], place[m]]) for m in members if m != node), node)
        )
        return [head, *(node for node in members if node != head)]


def edge_orders(instance: Instance) -> EdgeOrders:
    """Prepare the tables for the eligible nodes."""
    request, ids = instance.problem.request, [node.node_id for node in instance.nodes]
    wanted = [i for i, node_id in enumerate(ids) if node_id in request.require_nodes or node_id == request.pin_stage0]
    rest = [i for i in range(len(ids)) if i not in wanted]
    chosen = tuple(sorted([*wanted, *rest[: max(0, EXACT_NODES - len(wanted))]]))
    count, network = len(chosen), instance.network
    forward, reply = np.zeros((count, count), dtype=np.int64), np.zeros((count, count), dtype=np.int64)
    for i, a in enumerate(chosen):
        for j, b in enumerate(chosen):
            if i == j:
                continue
            hop = network.round_trip(ids[a], ids[b], last=False) if network.star else network.forward(ids[a], ids[b])
            back = network.reply(ids[a], ids[b])
            forward[i, j] = UNKNOWN_HOP_US if hop.hop_us is None else hop.hop_us
            reply[i, j] = UNKNOWN_HOP_US if back.hop_us is None else back.hop_us
    pin = None if request.pin_stage0 is None else ids.index(request.pin_stage0)
    return EdgeOrders(chosen, forward, reply, _paths(forward), network.star, pin)


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
