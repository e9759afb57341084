"""What a reload (SIGHUP) may change: the knobs that are read again each time they are used; the rest needs a restart."""

from dataclasses import dataclass

from config.settings import Settings

LIVE_SECTIONS = frozenset({"log", "planner", "replan"})
"""Read anew for every line, every planning round and every decision to keep or replace."""


@dataclass(frozen=True, slots=True)
class Reload:
    """``settings`` = the old ones with all live changes; the names are ``section.key``, sorted."""

    settings: Settings
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


def reload(old: Settings, new: Settings) -> Reload:
    """Take over from ``new`` what can change live, and name what cannot."""
    changed = [
        (section, key)
        for section in Settings.model_fields
        for key in type(getattr(old, section)).model_fields
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]
    live = {section: getattr(new, section) for section in LIVE_SECTIONS}
    return Reload(
        settings=old.model_copy(update=live),
        applied=tuple(sorted(f"{section}.{key}" for section, key in changed if section in LIVE_SECTIONS)),
        needs_restart=tuple(sorted(f"{section}.{key}" for section, key in changed if section not in LIVE_SECTIONS)),
    )
