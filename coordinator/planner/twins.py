"""Interchangeable nodes: equal costs, memory and hops to everybody. Used in id order, a class is searched once."""

import numpy as np

from coordinator.planner.cost import Matrix
from coordinator.planner.instance import Instance
from coordinator.planner.span_costs import HopArrays


def twins_of(instance: Instance, ids: tuple[str, ...], modes: tuple[HopArrays, ...]) -> Matrix:
    """``out[n]`` = the twin that must be used before node n (capacity order sorts twins by id), or −1."""
    request = instance.problem.request
    nodes = {node.node_id: node for node in instance.nodes}
    special = set(request.require_nodes) | {request.pin_stage0}
    out = np.full(len(ids), -1, dtype=np.int64)
    classes: dict[object, list[int]] = {}
    for index, node_id in enumerate(ids):
        if node_id in special:
            continue
        times = instance.times[node_id]
        node = nodes[node_id]
        cached = (node.cached_bytes, node.missing_bytes) if request.prefer_cached else None
        key = (instance.usable[node_id], instance.span_limit(node), None if times is None else times.key, cached)
        members = classes.setdefault(key, [])
        for member in reversed(members):
            if all(_swappable(mode, member, index) for mode in modes):
                out[index] = member
                break
        members.append(index)
    return out


def _swappable(mode: HopArrays, i: int, j: int) -> bool:
    """Exchanging i and j leaves every hop array as it is."""
    count = mode.final.shape[0]
    swap = np.arange(count)
    swap[[i, j]] = swap[[j, i]]
    if not np.array_equal(mode.final, mode.final[np.ix_(swap, swap)]):
        return False
    if mode.arc.shape[0] == 1:
        return bool(np.array_equal(mode.arc[0], mode.arc[0][np.ix_(swap, swap)]))
    return bool(np.array_equal(mode.arc, mode.arc[np.ix_(swap, swap, swap)]))
