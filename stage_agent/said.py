"""What operators said at or through this node, as the state directory keeps it: standing orders, and that it is drained.

A reboot is no change of mind: a node that was taken out of planning for its maintenance stays out until ``resume``.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from protocol.errors import StateError
from protocol.ids import NodeId
from protocol.orders import OperatorOrder
from stage_agent.clock import monotonic_us, wall_text
from stage_agent.graves import GRAVES_SPACE
from stage_agent.orders import MAX_AGE_US, Orders
from stage_agent.state.store import StateStore

ORDERS_SPACE: Final = "orders"
"""One document with all of them, so that several orders given at once are kept at once."""
SERVED_SPACE: Final = "served"
"""Where the store keeps wishes, by slot."""
CONFIGURED_SPACE: Final = "configured"
"""What the configuration wished when it was last followed, by slot."""
DRAIN_SPACE: Final = "drain"
_KEY = "all"


def restored_orders(store: StateStore, node_id: NodeId, now: Callable[[], str] = wall_text) -> Orders:
    """The orders kept in the state directory; further ones are kept there. Raises ``StateError`` for another's document.

    The time while the process was down is read off the wall clock, for the ages that people see; nothing is decided by it.
    """

    def keep(orders: tuple[OperatorOrder, ...]) -> None:
        documents = [order.model_dump(mode="json") for order in orders]
        store.put(ORDERS_SPACE, _KEY, {"kept_at": now(), "orders": documents})

    orders = Orders(node_id, keep)
    document = store.get(ORDERS_SPACE, _KEY)
    if document is not None:
        down_us = _since_us(str(document.get("kept_at", "")), now())
        try:
            kept = [OperatorOrder.model_validate(_strict(each)) for each in document["orders"]]
        except (KeyError, TypeError, ValidationError) as error:
            raise StateError(f"the kept orders cannot be read ({type(error).__name__}): remove the state") from None
        aged = [order.model_copy(update={"age_us": min(MAX_AGE_US, order.age_us + down_us)}) for order in kept]
        orders.restore(aged, monotonic_us())
    return orders


def keep_drained(store: StateStore, *, drained: bool) -> None:
    """Remember whether this node is out of planning. Raises ``StateError``."""
    if drained:
        store.put(DRAIN_SPACE, _KEY, {"drained": True})
    else:
        store.remove(DRAIN_SPACE, _KEY)


def is_drained(store: StateStore) -> bool:
    """It was drained and not resumed."""
    return store.get(DRAIN_SPACE, _KEY) is not None


def forget_said(store: StateStore) -> None:
    """This node has left its mesh: what was said there counts in no other. Raises ``StateError``."""
    for space in (ORDERS_SPACE, SERVED_SPACE, CONFIGURED_SPACE, DRAIN_SPACE, GRAVES_SPACE):
        for key in store.documents(space):
            store.remove(space, key)


def _strict(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "stages": tuple(document.get("stages", ()))}


def _since_us(then: str, now: str) -> int:
    """Wall-clock time between two texts of ``wall_text``; 0 when it cannot be told or ran backwards."""
    try:
        gap = datetime.fromisoformat(now) - datetime.fromisoformat(then)
    except (ValueError, TypeError):
        return 0
    return max(0, round(gap.total_seconds() * 1e6))
