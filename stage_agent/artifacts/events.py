"""What transfers tell the node; for the journal, never to decide anything."""

from dataclasses import dataclass
from typing import Literal

from protocol.ids import NodeId

PeerFault = Literal["wrong_bytes", "wrong_size", "wrong_manifest", "wrong_model", "malformed"]


@dataclass(frozen=True, slots=True)
class PeerMisbehaved:
    """``peer`` alone answered for ``digest`` (a file's SHA-256, or a model's digest) and it was not what it claimed.

    The whole file was discarded, and the peer is not asked for it again for a while.
    """

    peer: NodeId
    digest: str
    fault: PeerFault


@dataclass(frozen=True, slots=True)
class MixedPartsWrong:
    """A file put together from several peers, or over a restart, had wrong bytes; it begins anew from one peer."""

    sha256: str
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArtifactFetched:
    """``sha256`` is verified and installed. ``fetched_bytes`` excludes what an earlier attempt had left."""

    sha256: str
    size_bytes: int
    fetched_bytes: int
    duration_us: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArtifactDiscarded:
    """A file of the store turned out damaged, or made room for others."""

    sha256: str
    size_bytes: int
    reason: Literal["damaged", "evicted"]


@dataclass(frozen=True, slots=True)
class OwnFileDamaged:
    """The operator's own file does not have the content that its manifest or its earlier hash states: replace it."""

    sha256: str
    path: str


ArtifactEvent = PeerMisbehaved | MixedPartsWrong | ArtifactFetched | ArtifactDiscarded | OwnFileDamaged
