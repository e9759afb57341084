"""Status, nodes, links, stages and events as tables for people. Input is the API's JSON; text of peers is only text."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stage_agent.cli.plan_view import columns, milliseconds, size

_TONES = {
    "alive": "green", "active": "green", "serving": "green", "ready": "green", "running": "green",
    "suspect": "yellow", "loading": "yellow", "draining": "yellow", "preparing": "yellow", "activating": "yellow",
    "dead": "red", "failed": "red", "degraded": "red", "refused": "red", "withdrawn": "red",
}  # fmt: skip
UNKNOWN = "–"
LEFT_OUT_SHOWN = 8
"""Nodes named per slot in the table for people; ``--json`` has all."""


def status_view(document: dict[str, Any]) -> RenderableType:
    """The node at a glance: who it is, who coordinates, what is served."""
    node, lead = document["node"], document["coordinator"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("node", Text(f"{clean(node['name'])}  {node['node_id']}"))
    table.add_row("mesh", Text(node["mesh_id"] or "none; make one with `stagemesh init` or join one"))
    table.add_row(
        "version", Text(f"{node['version']}, up {duration(node['uptime_us'])}, listens on {node['listen'] or UNKNOWN}")
    )
    table.add_row("ready", _ready(document))
    table.add_row("coordinator", _lead(lead))
    members = ", ".join(f"{count} {state}" for state, count in document["members"].items())
    table.add_row("nodes", Text(members or "none"))
    if document["status"]:
        table.add_row("doing", Text(clean(document["status"])))
    parts: list[RenderableType] = [table, Text(), _slots(document["slots"])]
    if document.get("orders"):
        parts += [Text(), orders_view(document["orders"])]
    return Group(*parts)


def orders_view(orders: list[dict[str, Any]]) -> RenderableType:
    """What operators ordered, by whom and when: it holds until it is taken back, whoever coordinates."""
    table = columns("order", "said on", ">age", title="operators' orders")
    for order in orders:
        table.add_row(Text(clean(order["text"])), Text(clean(order["author_name"])), age(order["age_us"]))
    return table


def _ready(document: dict[str, Any]) -> Text:
    if document["ready"]:
        return Text("yes", style="green")
    return Text("no: " + clean("; ".join(document["not_ready_reasons"])), style="yellow")


def _lead(lead: dict[str, Any]) -> Text:
    if not lead["node_id"]:
        return Text(f"none yet{': ' + clean(lead['election']) if lead['election'] else ''}", style="yellow")
    name = "this node" if lead["is_self"] else clean(lead["name"] or lead["node_id"])
    return Text(f"{name}, term {lead['term']}{'; ' + clean(lead['election']) if lead['election'] else ''}")


def _slots(slots: list[dict[str, Any]]) -> RenderableType:
    if not slots:
        return Text("nothing is served; ask for a model with `stagemesh serve MODEL`", style="dim")
    table = columns("slot", "model", "state", "routable", "plan", "epoch", ">predicted", ">measured", "why")
    for slot in slots:
        refusal = slot["refusal"]
        table.add_row(
            Text(slot["slot"]),
            Text(clean(slot["model"]) or UNKNOWN),
            tone(slot["state"]),
            Text("yes", style="green") if slot["routable"] else Text("no", style="yellow"),
            Text(slot["plan_id"] or UNKNOWN),
            Text(slot["epoch"] or UNKNOWN),
            _time(slot["modeled_tpot_us"]),
            _time(slot["measured_tpot_us"]),
            Text(
                clean(
                    refusal["message"] if refusal else "; ".join(filter(None, (slot.get("warning"), slot["reason"])))
                ),
                style="red" if refusal or slot.get("warning") else "dim",
            ),
        )
    missed = [line for slot in slots if (line := _left_out(slot))]
    return Group(table, Text(), *missed) if missed else table


def _left_out(slot: dict[str, Any]) -> Text | None:
    """Nodes that the slot does without, and why."""
    nodes = slot.get("left_out") or []
    if not nodes:
        return None
    named = [f"{clean(node['name'])} ({clean(node['reason'])})" for node in nodes[:LEFT_OUT_SHOWN]]
    more = len(nodes) - len(named)
    text = f"left out of {clean(slot['slot'])}: {', '.join(named)}{f' and {more} more' if more else ''}"
    return Text(text, style="yellow")


def peers_view(document: dict[str, Any]) -> RenderableType:
    """Every node: alive or not, plannable or why not, what it has and where that figure comes from."""
    table = columns(
        "node", "id", "state", "plannable", "address", ">usable", ">detected", ">bandwidth", "source", ">RTT", "heard"
    )
    for node in document["nodes"]:
        marks = [word for word, set_ in (("this", node["is_self"]), ("coordinator", node["is_coordinator"])) if set_]
        why = node["why_not_plannable"] or "no"
        table.add_row(
            Text(clean(node["name"]) + (f" ({', '.join(marks)})" if marks else ""), style="bold"),
            Text(node["node_id"][:8], style="dim"),
            tone(node["state"] if node["status"] == "running" else node["status"]),
            Text("yes", style="green") if node["plannable"] else Text(clean(why), style="yellow"),
            Text(clean(node["address"]) or UNKNOWN),
            size(node["usable_memory_bytes"]),
            Text(f"{size(node['detected_memory_bytes'])}{_pretended(node['memory_source'])}"),
            rate(node["memory_bandwidth_bytes_per_s"]),
            Text(node["bandwidth_source"], style="dim"),
            _time(node["rtt_us"]),
            age(node["last_heard_age_us"]),
        )
    return table


def links_view(document: dict[str, Any]) -> RenderableType:
    """Every directed link: RTT with its trust, bandwidth with its age and limit."""
    if not document["links"]:
        return Text("no links measured yet", style="dim")
    table = columns("link", ">RTT", ">jitter", ">samples", "newest", "settled", ">send", ">receive", "limited by", "")
    for link in document["links"]:
        words = [word.replace("_", " ") for word in ("shaped", "estimated", "degraded", "over_tcp") if link.get(word)]
        table.add_row(
            Text(f"{clean(link['source_name'])} → {clean(link['target_name'])}"),
            _time(link["rtt_us"]),
            _time(link["jitter_us"]),
            str(link["samples"]),
            age(link["last_age_us"]),
            Text("yes", style="green") if link["settled"] else Text(_unsettled(link), style="yellow"),
            rate(link["send_bytes_per_s"]),
            rate(link["receive_bytes_per_s"]),
            Text(link["bandwidth_limited_by"] or UNKNOWN, style="dim"),
            Text(
                ", ".join([*words, *_history(link)]), style="red" if link["degraded"] or link.get("over_tcp") else "dim"
            ),
        )
    return table


def _unsettled(link: dict[str, Any]) -> str:
    return "no" if link.get("estimated") else "not yet"


def _history(link: dict[str, Any]) -> Iterator[str]:
    """What only a node's own links tell."""
    if (loaded_us := link.get("loaded_rtt_us")) is not None:
        yield f"under load {_time(loaded_us)}"
    if link.get("bandwidth_source") == "active":
        yield "probed"
    if changes := link.get("path_changes"):
        yield f"{changes} path change{'s' if changes > 1 else ''}, the latest {age(link.get('path_changed_age_us'))}"


def stages_view(document: dict[str, Any]) -> RenderableType:
    """Every agent's own word about its stages."""
    if not document["stages"]:
        return Text("no stage on any node yet", style="dim")
    table = columns("node", "slot", "state", ">layers", ">loaded", "epoch", ">decode/layer", "detail")
    for stage in document["stages"]:
        epoch = stage["active"] or stage["accepted"] or stage["promised"]
        table.add_row(
            Text(clean(stage["name"]), style="bold"),
            Text(stage["slot"]),
            tone(stage["state"]),
            f"{stage['layer_start']}–{stage['layer_end'] - 1}" if stage["layer_end"] else UNKNOWN,
            f"{size(stage['loaded_bytes'])} of {size(stage['total_bytes'])}" if stage["total_bytes"] else UNKNOWN,
            f"{epoch['term']}/{epoch['node_id'][:8]}/{epoch['instance'][:8]}" if epoch else UNKNOWN,
            _time(stage["decode_us_per_layer"]),
            Text(clean(stage["detail"]), style="dim"),
        )
    return table


def events_view(document: dict[str, Any]) -> RenderableType:
    """What happened, oldest first."""
    if not document["events"]:
        return Text("nothing happened yet", style="dim")
    table = columns("when", "what", "")
    for event in document["events"]:
        table.add_row(age(event["age_us"]), Text(clean(event["kind"]), style="bold"), Text(clean(event["text"])))
    return table


def event_line(event: dict[str, Any]) -> RenderableType:
    """One event, for following."""
    return event_row(Text(event["at"], "dim"), Text(f"{clean(event['kind']):<16}", "bold"), clean(event["text"]))


def event_row(when: Text, kind: Text, text: str) -> RenderableType:
    """When, what, and the sentence; a sentence too long for the terminal goes on under itself."""
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(when, kind, Text(text))
    return row


def tone(word: str) -> Text:
    """A state in its colour."""
    return Text(word, style=_TONES.get(word, ""))


def age(us: int | None) -> str:
    """How long ago."""
    return UNKNOWN if us is None else f"{duration(us)} ago"


def duration(us: int) -> str:
    """A length of time in the two units that matter."""
    seconds = us // 1_000_000
    days, hours, minutes = seconds // 86_400, seconds // 3_600 % 24, seconds // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


def rate(bytes_per_s: int | None) -> str:
    """Bytes per second in decimal units, as vendors print them."""
    if bytes_per_s is None:
        return UNKNOWN
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def clean(text: str) -> str:
    """Text of a peer without control characters: a name must not drive the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _time(us: int | None) -> str:
    return UNKNOWN if us is None else milliseconds(us)


def _pretended(source: str) -> str:
    return " (shaped)" if source == "shaped" else ""
