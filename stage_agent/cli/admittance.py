"""``stagemesh revoke`` and ``rotate-key``: who belongs to the mesh, changed through a running daemon."""

import sys
import time
from typing import Annotated

import typer

from protocol.errors import DaemonUnreachable, StagemeshError
from stage_agent.cli.client import get_json, post_json
from stage_agent.cli.operate import YesOption
from stage_agent.cli.output import JsonOption, NodeOption, print_json, printable

ROTATED_WITHIN_S = 45.0
LOOK_S = 0.2


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command("revoke")(revoke_command)
    app.command("rotate-key")(rotate_key_command)


def revoke_command(
    name: Annotated[str, typer.Argument(metavar="NODE", help="Its id, the start of it, or its name.")],
    *,
    yes: YesOption = False,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Expel a node for good: every node disconnects it and refuses it from then on. Its machine may join anew, as another."""
    if not yes and not typer.confirm(f"expel {name} from the mesh for good?", err=True):
        raise typer.Exit(1)
    answer = post_json(node, "/api/v1/revoke", {"node": name})
    who = f"{printable(answer['name'])} ({answer['node_id']})"
    if answer["already"]:
        text = f"{who} was revoked before; nothing changes"
    else:
        text = f"{who} is revoked: refused here at once, everywhere as the mesh hears of it"
    _say(answer, text, as_json=as_json)


def rotate_key_command(*, as_json: JsonOption = False, node: NodeOption = None) -> None:
    """Give this node a new key and id, signed by the old one, which is worth nothing from then on.

    The daemon goes on under the new key within seconds and loads its stage anew. Tokens that this node made before are void.
    """
    answer = post_json(node, "/api/v1/rotate-key", {})
    deadline = time.monotonic() + ROTATED_WITHIN_S
    while _id_of(node) != answer["successor"]:
        if time.monotonic() > deadline:
            raise StagemeshError(
                f"the daemon did not come back as {answer['successor']} within {ROTATED_WITHIN_S:.0f} s: look at its log;"
                " the key is replaced, and it begins under the new one whenever it is started"
            )
        time.sleep(LOOK_S)
    text = f"this node is {answer['successor']} now (was {answer['node_id']})"
    _say(answer, text, as_json=as_json)


def _id_of(node: str | None) -> str:
    """Who answers there; empty when nobody does at the moment."""
    try:
        return str(get_json(node, "/api/v1/status")["node"]["node_id"])
    except DaemonUnreachable:
        return ""


def _say(answer: dict[str, object], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        sys.stdout.write(text + "\n")
