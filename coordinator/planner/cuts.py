"""Where to cut, once the order of the nodes is fixed: exact, one min-plus product per stage."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.span_costs import HOPELESS, INFINITE, HopArrays
from coordinator.planner.states import min_plus


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """One order over one table of span costs. ``hops[i]`` leaves stage i; the last stage pays ``reply``."""

    cost: Matrix
    sequence: tuple[int, ...]
    hops: tuple[int, ...]
    reply: int

    def reached(self) -> list[Matrix]:
        """``[i][a]`` = least cost of having placed ``[0, a)`` on the stages before i, the hop into i included."""
        start: Matrix = np.full((1, self.cost.shape[1]), INFINITE, dtype=np.int64)
        start[0, 0] = 0
        reached = [start]
        for node, hop in zip(self.sequence, (*self.hops, 0), strict=True):
            reached.append(np.minimum(min_plus(reached[-1], self.cost[node]) + hop, INFINITE))
        return [row[0] for row in reached]

    def best(self) -> int:
        """Least scaled cost of the whole order, ``INFINITE`` when it cannot hold the model."""
        total = int(self.reached()[-1][-1]) + self.reply
        return INFINITE if total >= HOPELESS else total

    def cuts(self) -> tuple[int, ...]:
        """Cuts of ``best``; among equals the earliest ones. Only for an order that can hold the model."""
        reached = self.reached()
        cuts = [self.cost.shape[1] - 1]
        for index in range(len(self.sequence) - 1, -1, -1):
            cuts.append(int((reached[index] + self.cost[self.sequence[index]][:, cuts[-1]]).argmin()))
        return tuple(reversed(cuts))

    def rooms(self, best: int, left: list[Matrix]) -> list[Matrix]:
        """Per stage, ``left[i]`` on the spans that some cut of cost ``best`` uses, −1 elsewhere."""
        reached, rooms = self.reached(), []
        after: Matrix = np.full(self.cost.shape[1], INFINITE, dtype=np.int64)
        after[-1] = self.reply
        hops = (*self.hops, 0)
        for index in range(len(self.sequence) - 1, -1, -1):
            onward = self.cost[self.sequence[index]] + hops[index] + after[None, :]
            rooms.append(np.where(reached[index][:, None] + onward == best, left[index], -1))
            after = np.minimum(onward.min(axis=1), INFINITE)
        return rooms[::-1]


def fixed_order(cost: Matrix, hops: HopArrays, sequence: tuple[int, ...]) -> FixedOrder:
    """Look up the hops of ``sequence``; an impossible reply or hop makes ``best`` infinite."""
    lead = sequence[0] if hops.arc.shape[0] > 1 else 0
    steps = tuple(int(hops.arc[lead, a, b]) for a, b in pairwise(sequence))
    return FixedOrder(cost, sequence, steps, int(hops.final[sequence[-1], sequence[0]]))
