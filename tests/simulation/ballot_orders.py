"""Operators' orders in the simulated mesh: as tests say them, and as a simulated disk keeps them."""

import json

from protocol.errors import StateError
from protocol.ids import NodeId
from protocol.orders import EXCLUDE, LOCK, PIN_COORDINATOR, PIN_STAGE0, OperatorOrder, OrderedStage
from stage_agent.orders import Orders
from tests.simulation.ballot_world import Disk


def exclude(node_id: str, *, removed: bool = False) -> OperatorOrder:
    return OperatorOrder(kind=EXCLUDE, subject=node_id, removed=removed, author="here")


def pin_coordinator(node_id: str) -> OperatorOrder:
    return OperatorOrder(kind=PIN_COORDINATOR, value=node_id, removed=not node_id, author="here")


def pin_stage0(node_id: str) -> OperatorOrder:
    return OperatorOrder(kind=PIN_STAGE0, value=node_id, removed=not node_id, author="here")


def lock(slot: str, *spans: tuple[str, int, int]) -> OperatorOrder:
    """No spans: free again."""
    stages = tuple(OrderedStage(node_id=node, layer_start=start, layer_end=end) for node, start, end in spans)
    return OperatorOrder(kind=LOCK, subject=slot, stages=stages, removed=not stages, author="here")


def kept_orders(node_id: NodeId, disk: Disk, now_us: int) -> Orders:
    """The register over a simulated disk; kept orders come back through JSON, as on a real one."""

    def keep(orders: tuple[OperatorOrder, ...]) -> None:
        if disk.full:
            raise StateError("the disk is full")
        disk.orders = json.dumps([order.model_dump(mode="json") for order in orders])

    orders = Orders(node_id, keep)
    kept = [OperatorOrder.model_validate(each | {"stages": tuple(each["stages"])}) for each in json.loads(disk.orders)]
    orders.restore(kept, now_us)
    return orders
