"""What the membership core asks the shell to do. Frozen values; the core never does any of it itself."""

from dataclasses import dataclass
from typing import Literal

from protocol.ids import NodeId
from protocol.messages import MembershipMessage
from protocol.rows import Admission

Lane = Literal["datagram", "stream"]
MemberState = Literal["alive", "suspect", "dead", "left"]
DialPurpose = Literal["join", "reconnect", "explore"]


@dataclass(frozen=True, slots=True)
class Send:
    """Give ``message`` to the connection of ``peer``; drop it silently if there is none.

    Lane ``datagram`` may be upgraded to ``stream`` when the peer takes no datagrams or the encoding is too large.
    """

    peer: NodeId
    message: MembershipMessage
    lane: Lane


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to ``address``; ``peer`` is ``None`` for a seed whose identity is not known yet.

    No report of failure is needed: the core dials again, later and later, until ``on_connected``. With purpose
    ``explore`` a connection to the peer exists already and this address may be the better path: replace the old
    connection if the new handshake succeeds, else change nothing.
    """

    peer: NodeId | None
    address: str
    purpose: DialPurpose = "reconnect"


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close the connection of ``peer``; the shell then reports ``on_disconnected``. ``reason`` is a constant."""

    peer: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """``old`` is ``None`` for a newcomer, ``new`` is ``None`` for a forgotten or revoked node. ``reason`` is a constant."""

    node_id: NodeId
    old: MemberState | None
    new: MemberState | None
    reason: str


@dataclass(frozen=True, slots=True)
class AdmissionLearned:
    """Judge this admission; if it is accepted, hand it back through ``Membership.spread_admission``."""

    admission: Admission


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something ``peer`` sent was refused; nothing changed. ``reason`` is one of a bounded set of labels to count by."""

    peer: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two live processes use the identity ``node_id`` (perhaps this very node); ``boot_counter`` is the other's."""

    node_id: NodeId
    boot_counter: int


Effect = Send | Dial | CloseConnection | MemberChanged | AdmissionLearned | Rejected | Conflict
