"""The operators' standing orders that this node knows: said here or learnt from others, kept, and repeated in the own row.

The same way as a wish for a model: a register per subject, the highest rank wins (``protocol.orders``), every node keeps
what it has seen in its state directory and repeats it. So an order holds whoever coordinates, and ends only by being taken
back, never with the node where it was said.

Ages are for people. They travel as durations, so what a row says is too young by the row's own age at most; of several
tellings of one order the oldest counts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from protocol.errors import StagemeshError
from protocol.ids import NodeId
from protocol.orders import (
    EXCLUDE,
    LOCK,
    MAX_LOCKS,
    MAX_ORDERS,
    NODE_SPEED,
    PIN_COORDINATOR,
    PIN_STAGE0,
    OperatorOrder,
    OrderKey,
    outranks,
)
from protocol.rows import NodeRow
from protocol.wire import MAX_INTEGER

MAX_AGE_US = MAX_INTEGER


class OrderRefusedError(StagemeshError):
    """The order is not taken; what stood before stands."""


@dataclass(slots=True)
class Orders:
    """All orders by key. ``keep`` makes the whole set durable; it raises ``StateError``, and then nothing has changed."""

    node_id: NodeId
    keep: Callable[[tuple[OperatorOrder, ...]], None]
    _known: dict[OrderKey, OperatorOrder] = field(default_factory=dict)
    _said_us: dict[OrderKey, int] = field(default_factory=dict)
    """When each was said, on this node's monotonic clock; negative when before it started."""
    _read: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The rows that were read, by node: 100 rows of 128 orders are compared only when they are new."""

    def restore(self, orders: Iterable[OperatorOrder], now_us: int) -> None:
        """Orders that were kept before the restart, with their ages by now."""
        for order in orders:
            self._known[order.key] = order
            self._said_us[order.key] = now_us - order.age_us

    def say(self, orders: Iterable[OperatorOrder], now_us: int) -> None:
        """New orders of this node's operator, all or none; version, author and age are set here.

        Raises ``OrderRefusedError`` at a limit, ``StateError`` on a full disk.
        """
        fresh = {order.key: self._stamped(order) for order in orders}
        known = self._known | fresh
        if len(known) > MAX_ORDERS:
            raise OrderRefusedError(f"{MAX_ORDERS} orders are known in this mesh: change one of those instead")
        if _locks(known.values()) > MAX_LOCKS:
            raise OrderRefusedError(f"{MAX_LOCKS} slots are locked: release one with `stagemesh lock --release`")
        self._take(fresh, dict.fromkeys(fresh, now_us), now_us)

    def adopt(self, rows: Iterable[NodeRow], now_us: int) -> bool:
        """Learn what other nodes know; whether anything was news. Raises ``StateError``.

        At a limit further keys are not learnt: what is known stays. A row that was read before says nothing new.
        """
        fresh: dict[OrderKey, OperatorOrder] = {}
        said_us: dict[OrderKey, int] = {}
        present = {row.node_id: row for row in rows if row.orders}
        versions = {node_id: (row.boot_counter, row.seq) for node_id, row in present.items()}
        for node_id, row in present.items():
            if self._read.get(node_id) == versions[node_id]:
                continue
            for order in row.orders:
                key, at_us = order.key, now_us - order.age_us
                known = fresh.get(key) or self._known.get(key)
                if known is not None and not outranks(order, known):
                    if known.version == order.version and known.author == order.author:
                        self._older(key, at_us, said_us if key in fresh else self._said_us)
                    continue
                if self._has_room(fresh, order):
                    fresh[key], said_us[key] = order, at_us
        if fresh:
            self._take(fresh, said_us, now_us)
        self._read = versions
        return bool(fresh)

    def known(self, now_us: int) -> tuple[OperatorOrder, ...]:
        """For the own row and for people, by kind and subject, those taken back included."""
        return _aged(self._known, self._said_us, now_us)

    def _stamped(self, order: OperatorOrder) -> OperatorOrder:
        known = self._known.get(order.key)
        version = 1 if known is None else known.version + 1
        if version > MAX_INTEGER:
            raise OrderRefusedError(f"no newer version of the order {order.kind} {order.subject} can be given")
        return order.model_copy(update={"version": version, "author": self.node_id, "age_us": 0})

    def _has_room(self, fresh: dict[OrderKey, OperatorOrder], order: OperatorOrder) -> bool:
        known = self._known | fresh | {order.key: order}
        return len(known) <= MAX_ORDERS and _locks(known.values()) <= MAX_LOCKS

    @staticmethod
    def _older(key: OrderKey, at_us: int, said_us: dict[OrderKey, int]) -> None:
        said_us[key] = min(said_us[key], at_us)

    def _take(self, fresh: dict[OrderKey, OperatorOrder], said_us: dict[OrderKey, int], now_us: int) -> None:
        known, moments = self._known | fresh, self._said_us | said_us
        self.keep(_aged(known, moments, now_us))
        self._known, self._said_us = known, moments


def in_place_of(orders: Iterable[OperatorOrder], heirs: Mapping[str, str]) -> list[OperatorOrder]:
    """What has to be said so that standing orders about nodes whose key was rotated hold for their new ids.

    ``heirs``: new id by old one. An exclusion moves to the new id, unless that has one of its own; the rest names it.
    """
    said: list[OperatorOrder] = []
    orders = tuple(orders)
    spoken_for = {order.subject for order in orders if order.kind == EXCLUDE}
    for order in (each for each in orders if not each.removed):
        if order.kind == EXCLUDE and order.subject in heirs:
            heir = heirs[order.subject]
            said.append(order.model_copy(update={"removed": True}))
            if heir not in spoken_for:
                said.append(order.model_copy(update={"subject": heir}))
        elif order.kind == NODE_SPEED and order.subject in heirs:
            said.append(order.model_copy(update={"removed": True}))
            said.append(order.model_copy(update={"subject": heirs[order.subject]}))
        elif order.kind in {PIN_STAGE0, PIN_COORDINATOR} and order.value in heirs:
            said.append(order.model_copy(update={"value": heirs[order.value]}))
        elif order.kind == LOCK and any(stage.node_id in heirs for stage in order.stages):
            stages = tuple(
                stage.model_copy(update={"node_id": heirs.get(stage.node_id, stage.node_id)}) for stage in order.stages
            )
            said.append(order.model_copy(update={"stages": stages}))
    return said


def _aged(
    orders: dict[OrderKey, OperatorOrder], said_us: dict[OrderKey, int], now_us: int
) -> tuple[OperatorOrder, ...]:
    ages = {key: min(MAX_AGE_US, max(0, now_us - said_us[key])) for key in orders}
    return tuple(orders[key].model_copy(update={"age_us": ages[key]}) for key in sorted(orders))


def _locks(orders: Iterable[OperatorOrder]) -> int:
    return sum(order.kind == LOCK and not order.removed for order in orders)
