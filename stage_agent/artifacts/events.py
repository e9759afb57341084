"""What transfers tell the node; for the journal, never to decide anything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

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

Severity = Literal["debug", "info", "warning", "error"]

_FAULTS: dict[PeerFault, str] = {
    "wrong_bytes": "sent wrong bytes of",
    "wrong_size": "has another size of",
    "wrong_manifest": "sent a manifest that is not the one of",
    "wrong_model": "listed files that are not",
    "malformed": "answered nonsense when asked for",
}


def told(event: ArtifactEvent, name_of: Callable[[str], str]) -> tuple[str, str, Severity]:
    """Constant kind, one sentence for people, severity. ``name_of`` gives a node's name for its id."""
    match event:
        case PeerMisbehaved(peer, digest, fault):
            text = f"{name_of(peer)} {_FAULTS[fault]} {digest[:12]}: not asked for it again for a while"
            return "artifact_peer_misbehaved", text, "warning"
        case MixedPartsWrong(sha256, peers):
            text = f"{sha256[:12]} has wrong bytes from one of {', '.join(map(name_of, peers))}: fetched again from one"
            return "artifact_parts_wrong", text, "warning"
        case ArtifactFetched(sha256, size_bytes, _, duration_us, peers):
            text = (
                f"fetched {sha256[:12]} ({size_bytes} bytes) from {', '.join(map(name_of, peers))} "
                f"in {duration_us / 1_000_000:.1f} s"
            )
            return "artifact_fetched", text, "info"
        case ArtifactDiscarded(sha256, size_bytes, "damaged"):
            return "artifact_damaged", f"{sha256[:12]} ({size_bytes} bytes) was damaged on disk: deleted", "warning"
        case ArtifactDiscarded(sha256, size_bytes, _):
            return "artifact_evicted", f"{sha256[:12]} ({size_bytes} bytes) was deleted to make room", "info"
        case OwnFileDamaged(sha256, path):
            return "model_file_damaged", f"{path} is not {sha256[:12]} any more: replace it", "error"
        case _:
            assert_never(event)
