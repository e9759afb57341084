"""``stagemesh config check`` and ``config show``: what is set, by whom, and whether it holds."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from config.load import load, origin
from config.paths import cache_dir, default_config_files, state_dir
from stage_agent.cli.output import JsonOption, console, print_json
from stage_agent.cli.plan_view import columns

ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Instead of the default place.")]


def register(app: typer.Typer) -> None:
    """Add ``config`` with its two commands."""
    group = typer.Typer(no_args_is_help=True, help="Check or show the configuration.")
    group.command("check")(check_command)
    group.command("show")(show_command)
    app.add_typer(group, name="config")


def check_command(
    file: Annotated[Path | None, typer.Argument(help="The file to check; none = what the daemon would read.")] = None,
    *,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the configuration holds; the first mistake is named with file, line and key (exit 2)."""
    loaded = load(file or config)
    if as_json:
        print_json({"ok": True, "file": str(loaded.file) if loaded.file else None, "set": len(loaded.origins)})
        return
    searched = ", ".join(str(path) for path in default_config_files())
    source = str(loaded.file) if loaded.file else f"no file (looked for {searched})"
    console().print(
        f"ok: {source}; {len(loaded.origins)} values set, the rest are defaults", markup=False, soft_wrap=True
    )


def show_command(
    *,
    config: ConfigOption = None,
    show_origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every value, after file, environment and defaults."""
    loaded = load(config)
    origins = origin(loaded)
    values: dict[str, Any] = {}
    for section, knobs in loaded.settings.model_dump(mode="json").items():
        values.update({f"{section}.{key}": value for key, value in knobs.items()})
    paths = {"state": str(state_dir(loaded.settings)), "cache": str(cache_dir(loaded.settings))}
    if as_json:
        shown = {
            name: {"value": value, "origin": origins[name]} if show_origin else value for name, value in values.items()
        }
        print_json({"file": str(loaded.file) if loaded.file else None, "directories": paths, "values": shown})
        return
    table = columns("key", "value", *(["origin"] if show_origin else []))
    for name, value in values.items():
        style = "" if origins[name] != "default" else "dim"
        cells = [Text(name, style=style), Text(_toml(value), style=style)]
        table.add_row(*cells, *([Text(origins[name], style=style)] if show_origin else []))
    console().print(table)
    console().print(f"state in {paths['state']}, cache in {paths['cache']}", markup=False, soft_wrap=True)


def _toml(value: Any) -> str:
    """The value as one would write it in the file."""
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
