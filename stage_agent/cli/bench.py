"""``stagemesh bench``: measure this machine, with progress, and keep the result for the daemon."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from config.load import cache_dir, load_settings
from config.settings import Settings
from stage_agent.cli.output import JsonOption, console, print_json
from stage_agent.probes.measure import NodeFacts, measure_node

_BUDGET_US = 8_000_000
"""Longer than at a daemon's start: the buffer can be touched in full, and more runs are seen."""
_NOTES = {
    "benchmark_busy": "others used this machine while it was measured: figures are too low, and are not kept",
    "benchmark_cache_suspected": "the buffer was under four times the reported cache: bandwidth may be too high",
}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="bench")(bench)


def bench(
    as_json: JsonOption = False,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file.")] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="How long to measure.")] = _BUDGET_US / 1e6,
) -> None:
    """Measure memory, memory bandwidth and compute of this machine. The daemon uses the result for a day."""
    settings = load_settings(config)
    probe = settings.probe.model_copy(update={"benchmark": True, "budget_us": int(seconds * 1e6)})
    facts = _with_progress(settings.model_copy(update={"probe": probe}))
    if as_json:
        print_json(facts_document(facts))
    else:
        print_facts(facts, console())


def facts_document(facts: NodeFacts) -> dict[str, Any]:
    """The facts as the JSON document of ``bench --json``; bytes, bytes per second, operations per second."""
    return {
        "detected_memory_bytes": facts.detected_memory_bytes,
        "available_memory_bytes": facts.available_memory_bytes,
        "memory_source": facts.memory_source,
        "devices": [device.model_dump() for device in facts.devices],
        "notes": list(facts.notes),
        "conditions": facts.conditions,
    }


def print_facts(facts: NodeFacts, screen: Console) -> None:
    """One row per device, then what to think of the figures."""
    screen.print(f"memory for layers {facts.detected_memory_bytes / 1e9:.1f} GB ({facts.memory_source})")
    table = Table()
    for heading in ("device", "kind", "layers"):
        table.add_column(heading)
    for heading in ("memory", "bandwidth", "compute"):
        table.add_column(heading, justify="right")
    table.add_column("source")
    for device in facts.devices:
        table.add_row(
            escape(device.name),
            device.kind,
            "here" if device.holds_layers else "",
            _figure(device.memory_bytes, "GB"),
            _figure(device.memory_bandwidth_bytes_per_s, "GB/s"),
            _figure(device.compute_flops_per_s, "GFLOP/s"),
            device.source,
        )
    screen.print(table)
    for note in facts.notes:
        screen.print(_NOTES[note], style="yellow")


def _figure(value: int | None, unit: str) -> str:
    return "unknown" if value is None else f"{value / 1e9:,.1f} {unit}"


def _with_progress(settings: Settings) -> NodeFacts:
    """Measure with a bar on stderr; nothing but the result goes to stdout. No bar when stderr is no terminal."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)
        return measure_node(
            settings,
            cache_dir(settings),
            lambda what, fraction: bar.update(task, description=what, completed=fraction),
            fresh=True,
        )
