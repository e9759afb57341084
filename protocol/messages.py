"""Messages of the control plane: connection and membership, and ``Message``, the union of everything on the wire.

Every message is a frozen, strict pydantic model with a ``type`` literal. Unknown fields are ignored (newer peers),
unknown types are dropped by the codec, absurd values never get past validation.
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol.ballots import (
    Abort,
    Activate,
    Active,
    Keepalive,
    Nack,
    Prepare,
    Promise,
    PublishedPlan,
    Ready,
    Retire,
    Stage,
    StageProgress,
)
from protocol.rows import Accusation, Admission, Refutation, SignedRow
from protocol.wire import Address, Count, Digest, Id, InstanceId, Label, Micros, NodeName, Wire


class Hello(Wire):
    """First message in both directions on an admitted connection.

    ``admissions`` is the sender's chain of statements up to the founder, so that a peer that gossip has not told of the
    newcomer yet need not turn it away.
    """

    type: Literal["hello"] = "hello"
    mesh_id: Id
    instance: InstanceId
    boot_counter: Count
    name: NodeName
    version: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=16)] = ()
    observed_address: Annotated[str, Field(max_length=128)] = ""
    admissions: Annotated[tuple[Admission, ...], Field(max_length=32)] = ()
    trial: bool = False
    """This connection only tries another path beside the one that counts (``quic.trials``)."""


class PathEcho(Wire):
    """Measures a path between two connections of the same peers; comes back with ``answer`` on the lane it came by."""

    type: Literal["path_echo"] = "path_echo"
    seq: Count
    answer: bool = False


class PathTake(Wire):
    """From the one who tried a path: this connection counts from now on. The other end agrees by the same message."""

    type: Literal["path_take"] = "path_take"


class JoinRequest(Wire):
    """The only message an unadmitted peer may send. ``proof`` binds the token's secret to both connection ids.

    ``successor`` is the id of the key that may follow the newcomer's (``protocol.admission``).
    """

    type: Literal["join_request"] = "join_request"
    token_id: Id
    proof: Annotated[bytes, Field(min_length=32, max_length=32)]
    name: NodeName
    successor: Annotated[str, Field(max_length=64)] = ""


class JoinAccepted(Wire):
    """The newcomer's signed admission, those of the others, and where they can be dialled."""

    type: Literal["join_accepted"] = "join_accepted"
    mesh_id: Id
    admissions: Annotated[tuple[Admission, ...], Field(max_length=4096)]
    seeds: Annotated[tuple[Address, ...], Field(max_length=256)]


class JoinRefused(Wire):
    """Says nothing an attacker could use: ``reason`` is a constant."""

    type: Literal["join_refused"] = "join_refused"
    reason: Literal["unknown_or_used_token", "expired", "bad_proof", "busy"]


class RowVersion(Wire):
    """One line of a digest, or the news that such a row exists."""

    node_id: Id
    boot_counter: Count
    seq: Count
    dead: bool = False


class Gossip(Wire):
    """Piggy-backed facts; every item stands alone."""

    rows: Annotated[tuple[SignedRow, ...], Field(max_length=64)] = ()
    accusations: Annotated[tuple[Accusation, ...], Field(max_length=64)] = ()
    admissions: Annotated[tuple[Admission, ...], Field(max_length=64)] = ()
    refutations: Annotated[tuple[Refutation, ...], Field(max_length=64)] = ()
    versions: Annotated[tuple[RowVersion, ...], Field(max_length=64)] = ()


class Ping(Wire):
    """Direct probe; ``seq`` comes back in the acknowledgement, which gives the round trip."""

    type: Literal["ping"] = "ping"
    seq: Count
    gossip: Gossip = Gossip()


class Ack(Wire):
    """Answer to ``Ping``; ``target`` is set when the answer was fetched for somebody else by ``PingRequest``.

    ``held_us`` passed between the arrival of the ping at this machine and the answer: no time of the link. ``echo`` is not
    0 when the answerer wants to measure the link, too: it is to be answered like a ping of that ``seq``.
    """

    type: Literal["ack"] = "ack"
    seq: Count
    held_us: Micros = 0
    target: Annotated[str, Field(max_length=64)] = ""
    health: Count = 0
    echo: Count = 0
    gossip: Gossip = Gossip()


class PingRequest(Wire):
    """Please probe ``target`` for me and send me an ``Ack`` with my ``seq``."""

    type: Literal["ping_request"] = "ping_request"
    seq: Count
    target: Id


class GossipPush(Wire):
    """Extra dissemination between probes."""

    type: Literal["gossip"] = "gossip"
    gossip: Gossip


class DigestRequest(Wire):
    """Anti-entropy: all versions I hold; answer with what is newer at yours and ask for what is newer at mine."""

    type: Literal["digest"] = "digest"
    rows: Annotated[tuple[RowVersion, ...], Field(max_length=4096)]
    admissions: Annotated[tuple[RowVersion, ...], Field(max_length=4096)] = ()
    reply: bool = False


class RowRequest(Wire):
    """Please send me your rows of these nodes; answered by ``GossipPush`` messages on the stream."""

    type: Literal["row_request"] = "row_request"
    rows: Annotated[tuple[Id, ...], Field(max_length=256)]


class IdentityContested(Wire):
    """To a node whose connection stands: another living process showed your key at ``address`` here and was turned away."""

    type: Literal["identity_contested"] = "identity_contested"
    instance: InstanceId
    address: Annotated[str, Field(max_length=128)]


class PackageRequest(Wire):
    """Please describe the model with this digest, so that I can plan it."""

    type: Literal["package_request"] = "package_request"
    digest: Digest


class PackageOffer(Wire):
    """The description asked for (``coordinator.model.exchange``); empty when I do not have it."""

    type: Literal["package_offer"] = "package_offer"
    digest: Digest
    document: Annotated[bytes, Field(max_length=524_288)] = b""


Message = Annotated[
    Hello
    | JoinRequest
    | JoinAccepted
    | JoinRefused
    | Ping
    | Ack
    | PingRequest
    | GossipPush
    | DigestRequest
    | RowRequest
    | IdentityContested
    | Prepare
    | Promise
    | Nack
    | Stage
    | StageProgress
    | Ready
    | Activate
    | Active
    | Abort
    | Retire
    | Keepalive
    | PublishedPlan
    | PackageRequest
    | PackageOffer
    | PathEcho
    | PathTake,
    Field(discriminator="type"),
]

MembershipMessage = Ping | Ack | PingRequest | GossipPush | DigestRequest | RowRequest
