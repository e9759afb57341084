"""An explanation as tables: what each part of a token costs, the rivals, what would change the plan."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stage_agent.cli.mesh_view import orders_view
from stage_agent.cli.plan_view import Document, columns, lines_view, milliseconds

_RIVALS = {
    "memory_order": "same nodes, by memory",
    "single_node": "one node alone",
}
"""Shorter than the document's own labels; the other kinds name a node and keep theirs."""


def explanation_view(document: Document) -> RenderableType:
    """Terms, rivals and changes of one explanation document."""
    total = document["decode_tpot_us"]
    head = Text.assemble(
        ("plan ", "dim"), (str(document["plan_id"]), "bold"), ("  per token ", "dim"), milliseconds(total)
    )
    parts: list[RenderableType] = [head, Text(), _terms(document, total), Text(), *_rivals(document)]
    if document["changes"]:
        parts += [Text(), lines_view("what would change it", document["changes"])]
    if document.get("orders"):
        parts += [Text(), orders_view(document["orders"])]
    return Group(*parts)


def _terms(document: Document, total: int | None) -> Table:
    table = columns("part of a token", "", ">cost", ">share", title="what each part costs")
    for term in document["terms"]:
        cost = term["cost_us"]
        share = "" if cost is None or not total else f"{cost / total:.0%}"
        bar = Text("" if cost is None or not total else "█" * round(30 * cost / total), style="cyan")
        table.add_row(Text.assemble((f"{term['kind']} ", "dim"), term["name"]), bar, milliseconds(cost), share)
    return table


def _rivals(document: Document) -> list[RenderableType]:
    """A row per rival that can be placed; below them, in lines of their own, why the others cannot."""
    impossible: list[RenderableType] = []
    table = columns("rival", "placement", ">per token", ">difference", "because of", title="rivals")
    for rival in document["rivals"]:
        label = ", ".join((_RIVALS.get(rival["kind"], rival["label"]), *rival["also"]))
        if not rival["nodes"]:
            impossible.append(Text(f"{label}: {rival['reason'] or 'none'}", style="dim"))
            continue
        difference = rival["difference_us"]
        style = "" if difference is None else "green" if difference < 0 else "red"
        signed = "" if difference is None else f"{'+' if difference >= 0 else '−'}{milliseconds(abs(difference))}"
        placement = " → ".join(
            f"{node} ({end - start})" for node, (start, end) in zip(rival["nodes"], rival["layers"], strict=True)
        )
        table.add_row(
            label,
            placement,
            milliseconds(rival["decode_tpot_us"]),
            Text(signed, style=style),
            _because(rival),
        )
    return [table, *impossible] if table.row_count else [Text("rivals", style="bold"), *impossible]


def _because(rival: Document) -> str:
    term = rival["term"]
    if term is None:
        return ""
    change = rival["term_difference_us"]
    by = "" if change is None else f" {'+' if change >= 0 else '−'}{milliseconds(abs(change))}"
    return f"{term['kind']} {term['name']}{by}"
