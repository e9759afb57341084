"""Where things live: configuration, state and cache directories.

State (identity, promises) and cache (what may be deleted) are apart. Order of precedence for both: the setting, what
systemd prepared (``STATE_DIRECTORY``, ``CACHE_DIRECTORY``), the system directory for root, the user's XDG directory.
Nothing is created here.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from config.settings import Settings

SYSTEM_CONFIG = Path("/etc/stagemesh/stagemesh.toml")
SYSTEM_STATE = Path("/var/lib/stagemesh")
SYSTEM_CACHE = Path("/var/cache/stagemesh")


def _xdg(environment: Mapping[str, str], variable: str, fallback: str) -> Path:
    """The XDG base directory; a relative value is ignored, as its specification asks."""
    value = environment.get(variable, "")
    if value.startswith("/"):
        return Path(value)
    home = environment.get("HOME", "")
    return (Path(home) if home.startswith("/") else Path("~").expanduser()) / fallback


def _systemd(environment: Mapping[str, str], variable: str) -> Path | None:
    """The first of the directories that systemd prepared, if it did."""
    first = environment.get(variable, "").split(":")[0]
    return Path(first) if first.startswith("/") else None


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def default_config_files(environment: Mapping[str, str] | None = None, *, root: bool | None = None) -> tuple[Path, ...]:
    """Where a configuration is looked for when none is named, best first: root prefers /etc, a user their own."""
    environment = os.environ if environment is None else environment
    own = _xdg(environment, "XDG_CONFIG_HOME", ".config") / "stagemesh" / "stagemesh.toml"
    as_root = _is_root() if root is None else root
    return (SYSTEM_CONFIG, own) if as_root else (own, SYSTEM_CONFIG)


def state_dir(settings: Settings, environment: Mapping[str, str] | None = None, *, root: bool | None = None) -> Path:
    """The directory of identity and promises (absolute, not created). A leading ``~`` is the user's home."""
    environment = os.environ if environment is None else environment
    if settings.node.state_dir:
        return Path(settings.node.state_dir).expanduser().absolute()
    if prepared := _systemd(environment, "STATE_DIRECTORY"):
        return prepared
    if _is_root() if root is None else root:
        return SYSTEM_STATE
    return _xdg(environment, "XDG_STATE_HOME", ".local/state") / "stagemesh"


def cache_dir(settings: Settings, environment: Mapping[str, str] | None = None, *, root: bool | None = None) -> Path:
    """The directory of models and artifacts that may be deleted at any time (absolute, not created)."""
    environment = os.environ if environment is None else environment
    if settings.node.cache_dir:
        return Path(settings.node.cache_dir).expanduser().absolute()
    if prepared := _systemd(environment, "CACHE_DIRECTORY"):
        return prepared
    if _is_root() if root is None else root:
        return SYSTEM_CACHE
    return _xdg(environment, "XDG_CACHE_HOME", ".cache") / "stagemesh"
