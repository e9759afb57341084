"""What readers see of a member."""

from dataclasses import dataclass

from protocol.ids import NodeId
from protocol.links.link import LinkView
from protocol.membership.effects import MemberState
from protocol.membership.ground import Connection
from protocol.membership.own import OwnRow
from protocol.membership.table import Entry
from protocol.rows import NodeRow


@dataclass(frozen=True, slots=True)
class Member:
    """One node as this node sees it at one moment. All times are monotonic µs of this node.

    ``flaps``: when it came back from the dead or restarted without a goodbye, oldest first, at most 16; whoever decides
    what is plannable damps by them. ``conflict``: two processes use this identity, it must not be planned. ``link`` is
    this node's own measurement of the way there (``None``: never connected); what others measured is in their rows.
    """

    node_id: NodeId
    row: NodeRow
    state: MemberState
    direct: bool
    address: str
    received_us: int
    changed_us: int
    heard_us: int | None
    flaps: tuple[int, ...]
    conflict: bool
    link: LinkView | None
    is_self: bool = False


def member_of(entry: Entry, connection: Connection | None, link: LinkView | None, *, conflict: bool) -> Member:
    """Another node."""
    return Member(
        node_id=entry.node_id,
        row=entry.row,
        state=entry.state,
        direct=connection is not None,
        address="" if connection is None else connection.address,
        received_us=entry.received_us,
        changed_us=entry.changed_us,
        heard_us=entry.heard_us,
        flaps=entry.flaps,
        conflict=conflict,
        link=link,
    )


def own_member(own: OwnRow, *, conflict: bool, left: bool) -> Member:
    """This node itself: always direct, never suspect."""
    assert own.row is not None
    return Member(
        node_id=NodeId(own.row.node_id),
        row=own.row,
        state="left" if left else "alive",
        direct=True,
        address="",
        received_us=own.issued_us,
        changed_us=own.started_us,
        heard_us=None,
        flaps=(),
        conflict=conflict,
        link=None,
        is_self=True,
    )
