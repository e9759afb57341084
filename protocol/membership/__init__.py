"""Who is in the mesh: failure detector, replicated node table, digests and deltas. Pure.

``Membership`` (in ``core``) is the room's door; ``effects`` is what it asks for, ``Member`` what it shows.
"""

from protocol.membership.core import Membership
from protocol.membership.effects import (
    AdmissionLearned,
    CloseConnection,
    Conflict,
    Dial,
    Effect,
    MemberChanged,
    MemberState,
    Rejected,
    Send,
)
from protocol.membership.member import Member
from protocol.membership.table import Tombstone

__all__ = [
    "AdmissionLearned",
    "CloseConnection",
    "Conflict",
    "Dial",
    "Effect",
    "Member",
    "MemberChanged",
    "MemberState",
    "Membership",
    "Rejected",
    "Send",
    "Tombstone",
]
