"""Operators' standing orders on the wire: registers that every node repeats in its row.

An order says one thing about one subject: who coordinates, who holds stage 0, which node is left out, which split a slot
is held on, what plans aim for. Per ``(kind, subject)`` the highest rank wins on every node, so no node's death ends an
order and a healed partition agrees on one. Taking an order back is an order too (``removed``): it outlives what it ends.
Kinds that this version does not know are repeated and not obeyed.
"""

from typing import Annotated, Final

from pydantic import Field

from protocol.wire import Count, Id, Label, Micros, Wire

PIN_COORDINATOR: Final = "pin_coordinator"
"""``value`` is the node that coordinates if it can."""
PIN_STAGE0: Final = "pin_stage0"
"""``value`` is the node that drives every plan."""
EXCLUDE: Final = "exclude"
"""``subject`` is a node that is not planned; removed: it is planned, whatever a configuration says."""
LOCK: Final = "lock"
"""``subject`` is a slot, ``stages`` its exact split; ``model`` and ``manifest_digest`` must match when given."""
POLICY: Final = "policy"
"""``subject`` is a planner setting, ``value`` the JSON of what it is set to; removed: the configuration counts again."""
NODE_SPEED: Final = "node_speed"
"""``subject`` is a node, ``value`` the JSON of the speed that live runs found; removed: its benchmark counts again."""
HOP_COSTS: Final = "hop_costs"
"""``subject`` is an engine profile, ``value`` the JSON of what live runs say that its hops cost."""

MAX_ORDERS: Final = 128
"""Per row, those taken back included."""
MAX_LOCKS: Final = 16
"""Locks among them: as many as there are slots."""
MAX_LOCKED_STAGES: Final = 64
"""Stages of one locked split: 16 locks of 64 stages are 77 KB of a row's 256."""

OrderKey = tuple[str, str]


class OrderedStage(Wire):
    """One stage of a locked split, half-open."""

    node_id: Id
    layer_start: Count
    layer_end: Count


class OperatorOrder(Wire):
    """One order as it stands. ``author`` is the node where it was said, ``age_us`` how long ago."""

    kind: Label
    subject: Annotated[str, Field(max_length=64, pattern=r"^[a-zA-Z0-9_.\-]*$")] = ""
    value: Annotated[str, Field(max_length=256)] = ""
    stages: Annotated[tuple[OrderedStage, ...], Field(max_length=MAX_LOCKED_STAGES)] = ()
    model: Annotated[str, Field(max_length=256)] = ""
    manifest_digest: Annotated[str, Field(max_length=128)] = ""
    version: Count = 0
    author: Id
    age_us: Micros = 0
    removed: bool = False

    @property
    def key(self) -> OrderKey:
        """What it is about: of two orders with one key only one can stand."""
        return self.kind, self.subject


def outranks(one: OperatorOrder, other: OperatorOrder) -> bool:
    """``one`` stands and ``other`` falls. Total over different orders of one key: version, author, then what they say."""
    return _rank(one) > _rank(other)


def _rank(order: OperatorOrder) -> tuple[int, str, bool, str, str, str, tuple[tuple[str, int, int], ...]]:
    stages = tuple((stage.node_id, stage.layer_start, stage.layer_end) for stage in order.stages)
    return order.version, order.author, order.removed, order.value, order.model, order.manifest_digest, stages
