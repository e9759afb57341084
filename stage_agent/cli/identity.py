"""``stagemesh init``, ``invite`` and ``join``: this node's identity, its mesh, and letting others in.

These work on the state directory alone; a daemon that runs there sees a new invitation at once.
"""

import asyncio
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from config.load import load_settings
from config.paths import state_dir as state_dir_of
from config.settings import Settings
from protocol.admission import MESH_NAME_MAX
from protocol.errors import AddressError, ConfigurationError, IdentityError, JoinError
from protocol.join_token import MAX_TOKEN_CHARACTERS, PREFIX, JoinToken, decode_token, encode_token
from protocol.quic.address import parse_address
from protocol.quic.identity import FILE_NAME as IDENTITY_FILE
from protocol.quic.identity import Identity
from protocol.quic.invites import InviteBox
from protocol.quic.joining import InviterUnreachable
from protocol.quic.joining import join as redeem
from protocol.quic.mesh_files import FILE_NAME as MESH_FILE
from protocol.quic.mesh_files import Membership, found_mesh, load_membership, store_first
from stage_agent.addresses import own_addresses
from stage_agent.cli.output import JsonOption, print_json
from stage_agent.discovery.hints import tag_of
from stage_agent.discovery.lan import find, require_zeroconf

_NAME = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{MESH_NAME_MAX - 2}}}[a-z0-9])?")
_TTL = re.compile(r"([1-9][0-9]{0,8})([smhd]?)")
_TTL_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
TTL_MAX_S = 30 * 86_400
FIND_S = 3.0
"""How long the inviter is looked for on the local network."""

ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Instead of the default place.")]
StateOption = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="Where this node's identity and promises are kept.")
]


def register(app: typer.Typer) -> None:
    """Add the three commands."""
    app.command("init")(init_command)
    app.command("invite")(invite_command)
    app.command("join")(join_command)


def init_command(
    *,
    mesh: Annotated[str, typer.Option("--mesh", metavar="NAME", help="A name for people: a-z, 0-9 and -.")] = "home",
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create this node's identity and a mesh with it as first member. Never overwrites anything."""
    if _NAME.fullmatch(mesh) is None:
        raise ConfigurationError(f"--mesh {mesh!r}: use 1 to {MESH_NAME_MAX} of a-z, 0-9 and -, as in --mesh home")
    _, directory = _place(config, state_dir)
    if (present := load_membership(directory)) is not None:
        raise IdentityError(
            f"{directory} is in mesh {present.name} already: `stagemesh invite` lets others in;"
            " for another mesh use another --state-dir"
        )
    identity = Identity.load(directory) if Identity.exists(directory) else Identity.create(directory)
    membership = found_mesh(directory, identity, mesh)
    _say(
        as_json,
        {"node_id": identity.node_id, "mesh_id": membership.mesh_id, "state_dir": str(directory)},
        f"node {identity.node_id}\nmesh {membership.mesh_id}\nstate {directory}\n"
        f"next: `stagemesh run{_same(config, state_dir)}`, and `stagemesh invite{_same(config, state_dir)}` for every"
        " further machine",
    )


def invite_command(
    *,
    address: Annotated[
        list[str] | None, typer.Option("--address", metavar="HOST:PORT", help="Where the newcomer reaches this node.")
    ] = None,
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="How long it is valid: 90s, 30m, 2h, 1d.")] = "1h",
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print one join token, valid once and for a while, and the command to paste on the new machine."""
    ttl_s = _seconds(ttl)
    settings, directory = _place(config, state_dir)
    identity = Identity.load(directory)
    membership = load_membership(directory)
    if membership is None:
        raise IdentityError(f"{directory} is in no mesh: run `stagemesh init`, or `stagemesh join` with a token")
    if identity.node_id not in membership.book():
        raise IdentityError(f"this node is no longer admitted in mesh {membership.name}: invite from another node")
    addresses = tuple(str(parse_address(text)) for text in address or ()) or own_addresses(settings.listen)
    token_id, secret = InviteBox(directory).create(ttl_s)
    token = encode_token(JoinToken(membership.mesh_id, identity.node_id, addresses, token_id, secret))
    _say(
        as_json,
        {"token": token, "command": f"stagemesh join {token}", "addresses": list(addresses), "ttl_s": ttl_s},
        f"{token}\n\nvalid once, for {ttl}, while `stagemesh run` runs here ({', '.join(addresses)}). On the new"
        f" machine:\n  stagemesh join {token}",
    )


def join_command(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The token, a file that holds it, or - for stdin.")],
    *,
    lan: Annotated[
        bool, typer.Option("--lan", help="Look for the inviter on this network too, if it announces itself there.")
    ] = False,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join the mesh of the node that made TOKEN. Creates this node's identity when there is none, or it was revoked."""
    invitation = decode_token(_token_text(token))
    settings, directory = _place(config, state_dir, lan=lan)
    if settings.discovery.lan:
        require_zeroconf()
    present = load_membership(directory)
    if present is not None and not _is_barred(directory, present):
        raise JoinError(
            f"{directory} is in mesh {present.name} already: nothing to do, or use another --state-dir for another mesh"
        )
    with _aside(directory) if present is not None else nullcontext():
        existing = Identity.exists(directory)
        identity = Identity.load(directory) if existing else Identity.create(directory)
        membership = _redeem_or_undo(identity, invitation, settings, None if existing else directory / IDENTITY_FILE)
        store_first(directory, membership)
    _say(
        as_json,
        {"node_id": identity.node_id, "mesh_id": membership.mesh_id, "seeds": list(membership.seeds)},
        f"joined mesh {membership.name} as node {identity.node_id}\nstate {directory}\n"
        f"next: `stagemesh run{_same(config, state_dir)}`",
    )


def _is_barred(directory: Path, present: Membership) -> bool:
    """Whether the identity that is stored there was revoked, or is an old copy of one whose key was rotated."""
    if not Identity.exists(directory):
        return False
    identity, book = Identity.load(directory), present.book()
    return book.is_barred(identity.node_id) and book.successor(identity.node_id) != (identity.successor or None)


@contextmanager
def _aside(directory: Path) -> Iterator[None]:
    """Without the barred identity and its mesh's file; both come back when what is tried meanwhile fails."""
    moved = [(directory / name, directory / f"{name}.barred") for name in (IDENTITY_FILE, MESH_FILE)]
    for file, aside in moved:
        file.replace(aside)
    try:
        yield
    except BaseException:
        for file, aside in moved:
            aside.replace(file)
        raise


def _same(config: Path | None, state_dir: Path | None) -> str:
    """The options that lead the next command to the same place."""
    given = (("--config", config), ("--state-dir", state_dir))
    return "".join(f" {option} {shlex.quote(str(path))}" for option, path in given if path is not None)


def _redeem_or_undo(identity: Identity, token: JoinToken, settings: Settings, made: Path | None) -> Membership:
    """Redeem; a refusal takes back the identity file that this very command made."""
    try:
        return _redeem(identity, token, settings)
    except (JoinError, AddressError):
        if made is not None:
            made.unlink(missing_ok=True)
        raise


def _redeem(identity: Identity, token: JoinToken, settings: Settings) -> Membership:
    """At the token's addresses, and where the inviter announces itself on this network if it is not there."""
    name = settings.node.name or socket.gethostname()[:64] or "node"
    try:
        return asyncio.run(redeem(identity, token, name))
    except InviterUnreachable:
        if not settings.discovery.lan:
            raise
        found = asyncio.run(find(settings.discovery, tag_of(token.mesh_id, token.inviter), FIND_S))
        if not found:
            raise
    return asyncio.run(redeem(identity, replace(token, addresses=found), name))


def _place(config: Path | None, state_dir: Path | None, *, lan: bool = False) -> tuple[Settings, Path]:
    where = str(state_dir.absolute()) if state_dir is not None else None
    settings = load_settings(config, {"node.state_dir": where, "discovery.lan": True if lan else None})
    return settings, state_dir_of(settings)


def _token_text(argument: str) -> str:
    """The token itself, or what a file or stdin holds: a secret need not stand on a command line."""
    if argument.startswith(PREFIX):
        return argument
    if argument == "-":
        return sys.stdin.read(MAX_TOKEN_CHARACTERS + 1)
    try:
        with Path(argument).open(encoding="utf-8") as file:
            return file.read(MAX_TOKEN_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError, ValueError):
        raise JoinError(
            f"this is neither a join token (it would start with {PREFIX}) nor a readable file: "
            "copy the token again from `stagemesh invite`"
        ) from None


def _seconds(text: str) -> int:
    match = _TTL.fullmatch(text)
    seconds = int(match[1]) * _TTL_SECONDS[match[2]] if match else 0
    if not 0 < seconds <= TTL_MAX_S:
        raise ConfigurationError(f"--ttl {text!r}: write a time up to 30 days, as in 90s, 30m, 2h or 1d")
    return seconds


def _say(as_json: bool, document: dict[str, object], text: str) -> None:
    if as_json:
        print_json(document)
    else:
        sys.stdout.write(text + "\n")
