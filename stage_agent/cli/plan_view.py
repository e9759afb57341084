"""A plan, a refusal or an explanation as tables for people. Input is the JSON document, so live and described plans look alike."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stage_agent.cli.output import printable

Document = Mapping[str, Any]

_BAR_WIDTH = 12
_TOKEN_BAR_WIDTH = 60
_LEAST_TOKEN_BAR_WIDTH = 16
_UNBOUNDED = 10_000
"""A width at which a table shows how wide it would like to be."""
_STAGE_COLUMNS = (
    ">stage", "node", ">layers", ">count", ">weights", ">needs", ">usable", "memory", ">compute", "roles", "why",
)  # fmt: skip
_DROPPED = (
    (),
    ("why",),
    ("roles", "why"),
    (">count", "roles", "why"),
    (">count", "memory", "roles", "why"),
    (">count", ">weights", "memory", "roles", "why"),
)
"""Stage columns left out on narrower and narrower screens; roles and reasons then stand below the table."""


def milliseconds(us: float | None) -> str:
    """``12 345`` µs → ``12.3 ms``, from ten seconds on in seconds; unknown is shown as such."""
    if us is None:
        return "unknown"
    ms = us / 1_000
    if ms >= 10_000:
        return f"{ms / 1_000:,.1f} s"
    return f"{ms:,.0f} ms" if ms >= 1_000 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def size(count: float) -> str:
    """Bytes in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1_024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1_024
    return f"{value:.1f} TiB"


def columns(*headers: str, title: str | None = None) -> Table:
    """A plain table: a header starting with ``>`` is right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left", overflow="fold")
    return table


def plan_view(document: Document) -> RenderableType:
    """Everything a plan says: header, stages, hops, one token's time, target, certificate, diagnostics."""
    parts: list[RenderableType] = [_header(document), Text(), _Stages(document)]
    if document["hops"]:
        parts += [Text(), _hops(document)]
    parts += [Text(), _figures(document)]
    if document["diagnostics"]:
        parts += [Text(), *(_diagnostic(entry) for entry in document["diagnostics"])]
    return Group(*parts)


def refusal_view(document: Document) -> RenderableType:
    """A refusal with what it knows about why."""
    error = document["error"]
    lines: list[RenderableType] = [
        Text.assemble((f"no plan: {error['code']}", "bold red")),
        Text(str(error["message"])),
    ]
    details = error.get("details") or {}
    if details:
        table = columns("", "")
        for key, value in details.items():
            table.add_row(Text(key.replace("_", " "), style="dim"), _detail(value))
        lines += [Text(), table]
    return Group(*lines)


def _detail(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_detail(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return (
            "\n".join(_detail(entry) for entry in value)
            if value and isinstance(value[0], Mapping)
            else ", ".join(_detail(entry) for entry in value)
        )
    return str(value)


def _header(document: Document) -> Text:
    model = document["model"]
    lanes = document["parallel_lanes"]
    return Text.assemble(
        ("plan ", "dim"), (str(document["plan_id"]), "bold"),
        ("  model ", "dim"), f"{printable(model['name'])}, {model['layer_count']} layers",
        ("  context ", "dim"), f"{document['context_length']:,} × {lanes} lane{'s' if lanes != 1 else ''}",
        ("  objective ", "dim"), str(document["objective"]),
        ("  placement ", "dim"), str(document["placement"]),
        ("  engine profile ", "dim"), str(document["calibration"]),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages' table with as many columns as the screen has room for; what has none follows in lines of its own."""

    document: Document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=_UNBOUNDED)
        dropped = next(
            (
                each
                for each in _DROPPED
                if Measurement.get(console, wide, self._table(each)).maximum <= options.max_width
            ),
            _DROPPED[-1],
        )
        yield self._table(dropped)
        for stage in self.document["stages"] if dropped else ():
            roles = stage["roles"] if "roles" in dropped else ()
            words = ", ".join((*roles, *stage["reason_codes"]))
            yield Padding(Text(f"{stage['stage_index']}: {words}", style="dim"), (0, 0, 0, 2))

    def _table(self, dropped: tuple[str, ...]) -> Table:
        table = columns(*(header for header in _STAGE_COLUMNS if header not in dropped))
        for stage in self.document["stages"]:
            cells = zip(_STAGE_COLUMNS, _stage_cells(stage), strict=True)
            table.add_row(*(cell for header, cell in cells if header not in dropped))
        return table


def _stage_cells(stage: Document) -> tuple[str | Text, ...]:
    """One stage under ``_STAGE_COLUMNS``."""
    return (
        str(stage["stage_index"]),
        Text(stage["node_id"], style="bold"),
        f"{stage['layer_start']}–{stage['layer_end'] - 1}",
        str(stage["layer_end"] - stage["layer_start"]),
        size(stage["parameter_bytes"]),
        size(stage["required_bytes"]),
        size(stage["usable_bytes"]),
        _fill(stage["required_bytes"], stage["usable_bytes"]),
        milliseconds(stage["stage_us"]),
        ", ".join(stage["roles"]),
        Text(", ".join(stage["reason_codes"]), style="dim"),
    )


def _fill(used: int, usable: int) -> Text:
    share = used / usable if usable else 1.0
    full = min(_BAR_WIDTH, round(share * _BAR_WIDTH))
    style = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    return Text.assemble(("█" * full, style), ("░" * (_BAR_WIDTH - full), "dim"), f" {share:4.0%}")


def _hops(document: Document) -> Table:
    table = columns("hop", "", ">round trip", ">transfer", ">cost", "basis")
    for hop in document["hops"]:
        known = hop["hop_us"] is not None
        table.add_row(
            f"{hop['source']} → {hop['target']}",
            Text(hop["kind"], style="dim"),
            milliseconds(hop["rtt_us"]),
            milliseconds(hop["transfer_us"]),
            Text(milliseconds(hop["hop_us"]), style="" if known else "yellow"),
            Text(hop["basis"], style="" if known else "yellow"),
        )
    return table


def _figures(document: Document) -> RenderableType:
    modeled = document["modeled"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("time per token", _token_time(document))
    table.add_row("target", _target(document))
    if modeled["tokens_per_s"] is not None:
        speed = f"{modeled['tokens_per_s']:.1f} tokens/s"
        if modeled["pipelined_period_us"] is not None:
            speed += f"; slowest stage with its hop {milliseconds(modeled['pipelined_period_us'])}"
        table.add_row("throughput", speed)
    if modeled["ttft_us"] is not None:
        table.add_row("first token", milliseconds(modeled["ttft_us"]))
    table.add_row("certificate", _certificate(document))
    return table


@dataclass(frozen=True, slots=True)
class _TokenBar:
    """One token's time from left to right: the stages' compute, then the network, to scale."""

    document: Document

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_LEAST_TOKEN_BAR_WIDTH, options.max_width), min(_TOKEN_BAR_WIDTH, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, modeled = min(_TOKEN_BAR_WIDTH, options.max_width), self.document["modeled"]
        total, ends = max(modeled["decode_tpot_us"], 1), [0]
        parts = [stage["stage_us"] or 0 for stage in self.document["stages"]]
        for part in (*parts, modeled["network_us_per_token"] or 0):
            ends.append(ends[-1] + part)
        cells = [round(width * end / total) for end in ends]
        bar = Text(no_wrap=True, overflow="crop")
        for index, (begin, end) in enumerate(pairwise(cells)):
            network = index == len(parts)
            bar.append(("▒" if network else "█") * (end - begin), "magenta" if network else ("cyan", "blue")[index % 2])
        yield bar


def _token_time(document: Document) -> RenderableType:
    total = document["modeled"]["decode_tpot_us"]
    if total is None:
        return Text("not modelled: a bandwidth or a hop is unknown", style="yellow")
    network = document["modeled"]["network_us_per_token"] or 0
    text = Text(f"{milliseconds(total)} = compute {milliseconds(total - network)} + network {milliseconds(network)}")
    return Group(text, _TokenBar(document))


def _target(document: Document) -> Text:
    target = document["target"]
    wanted = f"{target['decode_tpot_ms']:g} ms"
    total = document["modeled"]["decode_tpot_us"]
    if target["met"] is None:
        return Text(f"{wanted}: unknown", style="yellow")
    if target["met"]:
        return Text(f"{wanted}: met", style="green")
    over = "" if total is None else f" by {milliseconds(total - target['decode_tpot_ms'] * 1_000)}"
    return Text(f"{wanted}: missed{over}", style="red")


def _certificate(document: Document) -> str:
    """What is known about better plans, and what it took to know that."""
    if document["placement"] == "locked":
        return "locked: exactly this split was ordered, nothing else was looked at"
    search = document["search"]
    effort = f"{search['expanded']:,} orders expanded in {search['elapsed_ms']} ms"
    if search["proven_optimal"]:
        return f"proven optimal; {effort}"
    if search["gap"] is None:
        why = (
            "capacity was asked for"
            if document["objective"] == "capacity"
            else "not every speed and round trip is known"
        )
        return f"not shown to be the fastest: {why}; {effort}"
    return f"within {search['gap']:.2%} of the best possible; {effort}"


def _diagnostic(entry: Document) -> Text:
    style = {"info": "dim", "warning": "yellow", "error": "red"}.get(entry["severity"], "")
    return Text(f"[{entry['severity']}] {entry['message']}", style=style)


def lines_view(title: str, lines: Iterable[str]) -> RenderableType:
    """A titled list."""
    return Group(Text(title, style="bold"), *(Text(f"  {line}") for line in lines))


def with_names(document: Document, names: Mapping[str, str]) -> dict[str, Any]:
    """``document`` with node names for node ids everywhere, for the eye only."""

    def spoken(value: Any) -> Any:
        if isinstance(value, str):
            for node_id, name in names.items():
                value = value.replace(node_id, name)
            return value
        if isinstance(value, Mapping):
            return {key: spoken(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [spoken(entry) for entry in value]
        return value

    return {key: spoken(entry) for key, entry in document.items()}
