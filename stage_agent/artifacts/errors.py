"""Why a model's files could not be fetched or kept."""

from typing import Literal

from protocol.errors import ModelError

ArtifactFault = Literal[
    "mode_off",
    "no_peer",
    "gave_up",
    "store_full",
    "disk_full",
    "disk_failed",
    "in_use",
    "wrong_model",
]


class ArtifactError(ModelError):
    """The stage's files are not here and could not be made to be; what was verified before stays in the store.

    ``reason`` is a constant label.
    """

    def __init__(self, reason: ArtifactFault, message: str) -> None:
        super().__init__(message)
        self.reason: ArtifactFault = reason
