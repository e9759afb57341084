"""What an operator may tell the coordinator. Commands live as long as the process; settings survive it."""

from dataclasses import dataclass
from typing import Literal

from coordinator.planner.problem import LockedTopology
from protocol.ids import NodeId, Slot


@dataclass(frozen=True, slots=True)
class Pin:
    """This node, if it can, coordinates (``coordinator``) or drives every plan (``stage0``); empty = nobody in particular."""

    what: Literal["coordinator", "stage0"]
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Exclude:
    """Never plan this node; ``exclude=False`` takes that back."""

    node_id: NodeId
    exclude: bool = True


@dataclass(frozen=True, slots=True)
class Lock:
    """This exact split for the slot; ``None`` frees the planner again."""

    slot: Slot
    topology: LockedTopology | None


@dataclass(frozen=True, slots=True)
class Replan:
    """Forget that the present participant set was considered: one planning round now."""

    slot: Slot


OperatorCommand = Pin | Exclude | Lock | Replan
