"""Secrets come from files or systemd credentials: never from a flag, a variable or the configuration itself."""

import os
from collections.abc import Mapping
from pathlib import Path

from config.errors import fault
from config.settings import Settings

API_TOKEN_CREDENTIAL = "api-token"  # noqa: S105 - the name of a credential, not one
MIN_TOKEN_CHARACTERS = 16
MAX_TOKEN_CHARACTERS = 512


def api_token(settings: Settings, environment: Mapping[str, str] | None = None) -> str | None:
    """The HTTP API's bearer token: ``api.token_file``, else systemd's credential ``api-token``, else ``None``.

    Raises ``ConfigurationError`` when a named file is missing, unreadable, too short or not one printable line.
    """
    environment = os.environ if environment is None else environment
    if settings.api.token_file:
        return _read(Path(settings.api.token_file).expanduser(), "api.token_file")
    directory = environment.get("CREDENTIALS_DIRECTORY", "")
    credential = Path(directory) / API_TOKEN_CREDENTIAL
    return _read(credential, f"credential {API_TOKEN_CREDENTIAL}") if directory and credential.exists() else None


def _read(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TOKEN_CHARACTERS + 2)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise fault(
            f"{name}: {path} cannot be read ({reason}); create it, for example with openssl rand -hex 32"
        ) from None
    text = raw.decode("ascii", errors="replace").strip()
    if not MIN_TOKEN_CHARACTERS <= len(text) <= MAX_TOKEN_CHARACTERS or not text.isprintable() or " " in text:
        raise fault(
            f"{name}: {path} must hold one line of {MIN_TOKEN_CHARACTERS} to {MAX_TOKEN_CHARACTERS} printable ASCII "
            "characters; create it with openssl rand -hex 32"
        )
    if not text.isascii() or "\ufffd" in text:
        raise fault(f"{name}: {path} is not ASCII text; create it with openssl rand -hex 32")
    return text
