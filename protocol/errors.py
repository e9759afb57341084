"""The error tree.

    StagemeshError                 one sentence: what is wrong, where, what to do; `exit_code` for the command line
    ├── ConfigurationError         a file, key or flag of the operator is wrong; nothing was started
    ├── StateError                 the state directory cannot be used (full, read-only, corrupt); nothing was written
    ├── IdentityError              no identity, or one that cannot be read; nothing was sent
    │   └── IdentityBarred         this identity is revoked, superseded, or in use by another process; the daemon ends
    ├── ModelError                 a model file is not what it claims; nothing was loaded
    ├── AddressError               a port is in use or an address cannot be bound or reached
    ├── JoinError                  a token is wrong, used or expired, or the inviter cannot be reached; state unchanged
    ├── WireError                  bytes from a peer are refused; the connection may close, the cores saw nothing
    │   └── reason                 a short constant label, counted in `gossip_rejected_total{reason}`
    └── DaemonUnreachable          the command needs a running daemon and found none

Expected refusals (no plan fits, a ballot is old) are values, not exceptions. Our own bugs are asserts.
"""

from config.errors import ConfigurationError, StagemeshError

__all__ = [
    "AddressError",
    "ConfigurationError",
    "DaemonUnreachable",
    "IdentityBarred",
    "IdentityError",
    "JoinError",
    "ModelError",
    "StagemeshError",
    "StateError",
    "WireError",
]


class StateError(StagemeshError):
    """The state directory cannot be used; what was there before is untouched."""


class IdentityError(StagemeshError):
    """This node's key or certificate is missing, unreadable or too widely readable."""


class IdentityBarred(IdentityError):  # noqa: N818 - it names the situation
    """The mesh does not take this identity any more: starting again would not mend it."""

    exit_code = 6


class ModelError(StagemeshError):
    """A model file is malformed, truncated or unsupported. Raised before anything is loaded."""


class AddressError(StagemeshError):
    """An address cannot be bound, parsed or reached."""


class JoinError(StagemeshError):
    """Joining a mesh failed; this node's state is as before."""


class DaemonUnreachable(StagemeshError):  # noqa: N818 - it names the situation, as in the interface document
    """No daemon answered at the given address."""

    exit_code = 5


class WireError(StagemeshError):
    """Bytes from a peer were refused by the codec or the handshake; no core has seen them.

    ``reason`` is one of a bounded set of labels (oversized, truncated, malformed, version, unknown_sender, …).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
