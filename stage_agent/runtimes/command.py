"""The operator's engine command: placeholders in, argument list out. Checked before anything starts."""

import re
from collections.abc import Mapping
from pathlib import Path

from protocol.ballots import StageAssignment
from protocol.errors import ConfigurationError
from protocol.fencing import PlanEpoch

PLACEHOLDERS = frozenset({
    "context", "driver", "driver_id", "epoch_instance", "epoch_node", "epoch_term", "cache_epoch", "cache_type", "first_request_id",
    "lanes", "layer_count", "layer_end", "layer_start", "model", "next", "next_id", "node_id", "port", "previous",
    "previous_id", "slot", "stage_count", "stage_index",
})  # fmt: skip
_OF_THE_PLAN = frozenset({
    "cache_epoch", "driver", "driver_id", "first_request_id", "next", "next_id", "previous", "previous_id", "stage_count",
    "stage_index",
})  # fmt: skip
_PLACEHOLDER = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)\}")
"""``{name}`` is replaced, ``{{name}}`` becomes ``{name}``; other braces, such as JSON's, are left alone."""
# Private to the agent: what systemd hands to it, and its own settings, which may name secrets.
_WITHHELD = re.compile(r"STAGEMESH_|NOTIFY_SOCKET$|WATCHDOG_|LISTEN_(FDS|PID)|CREDENTIALS_DIRECTORY$")


def check_command(command: tuple[str, ...]) -> None:
    """Raises ``ConfigurationError`` for an empty command or a placeholder that does not exist."""
    if not command or not command[0]:
        raise ConfigurationError("runtime.command is empty: give the engine's argument list, or another runtime.kind")
    for argument in command:
        for _, name in _PLACEHOLDER.findall(argument):
            if name and name not in PLACEHOLDERS:
                known = ", ".join(sorted(PLACEHOLDERS))
                raise ConfigurationError(
                    f"runtime.command: {{{name}}} is unknown; there are {known} (to pass it on as it is, double its braces)"
                )


def names_other_stages(command: tuple[str, ...]) -> bool:
    """Whether the command may change with a plan that leaves this stage's layers, context and lanes alone."""
    return any(name in _OF_THE_PLAN for argument in command for _, name in _PLACEHOLDER.findall(argument))


def placeholder_values(
    assignment: StageAssignment, epoch: PlanEpoch, model: Path, addresses: Mapping[str, str], port: int
) -> dict[str, str]:
    """A value for every placeholder. ``addresses`` maps ``previous``, ``next`` and ``driver`` to ``host:port`` or ""."""
    values: dict[str, object] = {
        "context": assignment.context_length,
        "driver_id": assignment.driver,
        "epoch_instance": epoch.instance,
        "epoch_node": epoch.node_id,
        "epoch_term": epoch.term,
        "cache_epoch": assignment.cache_epoch.value,
        "cache_type": assignment.cache_type,
        "first_request_id": assignment.first_request_id,
        "lanes": assignment.lanes,
        "layer_count": assignment.layer_end - assignment.layer_start,
        "layer_end": assignment.layer_end,
        "layer_start": assignment.layer_start,
        "model": model,
        "next_id": assignment.next,
        "node_id": assignment.node_id,
        "port": port,
        "previous_id": assignment.previous,
        "slot": assignment.slot,
        "stage_count": assignment.stage_count,
        "stage_index": assignment.stage_index,
        **{name: addresses.get(name, "") for name in ("previous", "next", "driver")},
    }
    assert values.keys() == PLACEHOLDERS
    return {name: str(value) for name, value in values.items()}


def render(command: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """The argument list; every argument stays one argument, whatever its value holds. No shell is involved."""

    def replaced(match: re.Match[str]) -> str:
        literal, name = match.groups()
        return values[name] if literal is None else f"{{{literal}}}"

    return [_PLACEHOLDER.sub(replaced, argument) for argument in command]


def engine_environment(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment without what is its own, plus the configured additions."""
    return {name: value for name, value in inherited.items() if not _WITHHELD.match(name)} | dict(added)
