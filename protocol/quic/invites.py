"""Open invitations, one file each in ``<state dir>/invites``, shared by the command line and the running daemon.

``stagemesh invite`` only creates files and the daemon only replaces them, so neither can undo the other's work, and the
daemon sees a new invitation the moment somebody tries to use it. A file holds the verifier of the secret, never the
secret. Expiry is judged by this machine's own clock alone.
"""

import base64
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from protocol.errors import StateError
from protocol.join_token import SECRET_BYTES, verifier_of
from protocol.quic.private_file import make_private_directory, read_private, write_private

FOLDER = "invites"
MAX_OPEN = 256
KEEP_USED_S = 86_400
"""A used invitation is remembered this long after its expiry, so that a repeated request gets the same answer."""
_TOKEN_ID = re.compile(r"[a-z2-7]{16}")


def wall_clock_s() -> int:
    """Seconds since 1970."""
    return time.time_ns() // 1_000_000_000


@dataclass(frozen=True, slots=True)
class Invite:
    """``used_by`` is the node that redeemed it, empty while it is open."""

    token_id: str
    verifier: str
    expires_at_s: int
    used_by: str = ""


class InviteBox:
    """The invitations of one state directory."""

    def __init__(self, state_dir: Path, *, wall_s: Callable[[], int] = wall_clock_s) -> None:
        self._folder = state_dir / FOLDER
        self._wall_s = wall_s

    def create(self, ttl_s: int) -> tuple[str, bytes]:
        """A new invitation: its token id and the secret, which is nowhere else. Raises ``StateError``."""
        make_private_directory(self._folder)
        self.prune()
        if len(self._files()) >= MAX_OPEN:
            raise StateError(
                f"{MAX_OPEN} invitations are open: wait until some expire, or remove files in {self._folder}"
            )
        secret = os.urandom(SECRET_BYTES)
        token_id = base64.b32encode(os.urandom(10)).decode().lower()
        self._write(Invite(token_id, verifier_of(secret).hex(), self._wall_s() + ttl_s), replace=False)
        return token_id, secret

    def find(self, token_id: str) -> Invite | None:
        """The invitation, freshly read. None for an unknown, malformed or unreadable one."""
        if _TOKEN_ID.fullmatch(token_id) is None:
            return None
        return self._read(self._folder / f"{token_id}.json")

    def expired(self, invite: Invite) -> bool:
        """Whether it is too late."""
        return self._wall_s() >= invite.expires_at_s

    def use(self, invite: Invite, joiner: str) -> None:
        """Durably bind it to ``joiner``. Raises ``StateError``; then it is as before."""
        self._write(replace(invite, used_by=joiner), replace=True)

    def prune(self) -> None:
        """Forget what expired (used ones a day later) and what cannot be read."""
        for path in self._files():
            invite = self._read(path)
            keep_s = KEEP_USED_S if invite is not None and invite.used_by else 0
            if invite is None or self._wall_s() >= invite.expires_at_s + keep_s:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []

    def _read(self, path: Path) -> Invite | None:
        content = read_private(path)
        if content is None:
            return None
        try:
            plain = json.loads(content)
            invite = Invite(**plain)
            bytes.fromhex(invite.verifier)
        except (ValueError, TypeError):
            return None
        return invite if isinstance(invite.expires_at_s, int) and isinstance(invite.used_by, str) else None

    def _write(self, invite: Invite, *, replace: bool) -> None:
        content = json.dumps(asdict(invite)).encode()
        write_private(self._folder / f"{invite.token_id}.json", content, replace=replace)
