"""What ``stagemesh doctor`` looks at on this machine, without a daemon: directories, identity, ports, clock, engine, model.

A finding is a value: what was looked at, how it is, and the next step when it is not well. Nothing is changed, except for
one small file that is written to the state directory and removed again, since only that shows a full or read-only disk.
"""

import contextlib
import datetime as dt
import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config.load import state_dir
from config.settings import Settings
from protocol.errors import ConfigurationError, IdentityError, ModelError, StateError
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import Membership, load_membership
from stage_agent.runtimes.direct import direct_warning, is_direct
from stage_agent.runtimes.factory import NOT_FOR_PRODUCTION, engine_label

Verdict = Literal["ok", "note", "fail"]
MIN_FREE_BYTES = 64 * 1_048_576
SUSPEND_NOTE_S = 5.0
EARLIEST_YEAR = 2025


@dataclass(frozen=True, slots=True)
class Finding:
    """One look. ``next_step`` is empty only when all is well."""

    check: str
    verdict: Verdict
    text: str
    next_step: str = ""


def local_findings(settings: Settings, *, daemon_runs: bool) -> list[Finding]:
    """All looks that need no daemon; ports are only tried when no daemon holds them."""
    findings = [check_state(state_dir(settings)), check_identity(state_dir(settings)), check_clock()]
    if not daemon_runs:
        findings += [
            check_port("udp", settings.listen.host, settings.listen.port, "listen.port"),
            check_port("tcp", settings.listen.host, settings.listen.port, "listen.port"),
            check_port("tcp", settings.api.host, settings.api.port, "api.port"),
        ]
    return [*findings, check_engine(settings), check_model(settings)]


def check_state(directory: Path) -> Finding:
    """Can promises be stored: does the directory exist, take a file, and have room."""
    if not directory.is_dir():
        return Finding("state", "fail", f"{directory} does not exist", "run `stagemesh init` or `stagemesh join TOKEN`")
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as probe:
            probe.write(b"x" * 4_096)
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return Finding(
            "state",
            "fail",
            f"{directory} takes no file ({error.strerror})",
            "free space there or mend its permissions: promises must survive a restart",
        )
    if free < MIN_FREE_BYTES:
        return Finding("state", "fail", f"{directory} has {free >> 20} MiB left", "free space on that file system")
    return Finding("state", "ok", f"{directory}, {free / 2**30:.1f} GiB free")


def check_identity(directory: Path) -> Finding:
    """Is there a key, only ours to read, and does the mesh take it."""
    try:
        identity = Identity.load(directory)
    except IdentityError as error:
        return Finding("identity", "fail", str(error), "follow the line above")
    except OSError as error:
        return Finding("identity", "fail", f"{directory}: {error.strerror}", "run doctor as the user of the daemon")
    try:
        mesh = load_membership(directory)
    except StateError as error:
        return Finding("identity", "fail", str(error), "follow the line above")
    if mesh is None:
        return Finding(
            "identity",
            "fail",
            f"node {identity.node_id} is in no mesh",
            "run `stagemesh init` or `stagemesh join TOKEN`",
        )
    return _standing(identity, mesh)


def _standing(identity: Identity, mesh: Membership) -> Finding:
    node_id, book = identity.node_id, mesh.book()
    if (successor := book.successor(node_id)) == (identity.successor or None) is not None:
        return Finding(
            "identity", "ok", f"node {successor} in mesh {mesh.name} from the next start on: its key was rotated"
        )
    if barred := book.barred_as(node_id):
        return Finding(
            "identity",
            "fail",
            f"node {node_id} is {barred} in mesh {mesh.name}",
            "`stagemesh join TOKEN` with a token from a member makes a new identity",
        )
    if node_id not in book:
        text = f"nobody who is admitted vouches for node {node_id} in mesh {mesh.name}"
        return Finding("identity", "fail", text, "start the daemon so that it hears of new statements, else join anew")
    return Finding("identity", "ok", f"node {node_id} in mesh {mesh.name}")


def check_clock() -> Finding:
    """Is the wall clock plausible (tokens expire by it), and was the machine asleep (measurements end then)."""
    year = dt.datetime.now(dt.UTC).year
    if year < EARLIEST_YEAR:
        return Finding("clock", "fail", f"the wall clock says {year}", "set it (timedatectl set-ntp true)")
    slept_s = 0.0
    with contextlib.suppress(AttributeError, OSError):
        slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if slept_s > SUSPEND_NOTE_S:
        return Finding(
            "clock",
            "note",
            f"plausible; this machine slept {slept_s:.0f} s since it started",
            "a node that sleeps leaves its plans: keep it awake, or set node.can_host_stage = false",
        )
    return Finding("clock", "ok", "plausible, no sleep since start")


def check_port(kind: Literal["udp", "tcp"], host: str, port: int, key: str) -> Finding:
    """Could the daemon bind it now."""
    name = f"port {port}/{kind}"
    try:
        found = socket.getaddrinfo(
            host or None,
            port,
            type=socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        family, socket_kind, protocol, _, address = found[0]
        with socket.socket(family, socket_kind, protocol) as probe:
            if kind == "tcp":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return Finding(
            name, "fail", f"{host} cannot be bound ({error.strerror or error})", f"stop what uses it, or set {key}"
        )
    return Finding(name, "ok", f"free on {host}")


def check_engine(settings: Settings) -> Finding:
    """Is the configured runtime there."""
    runtime = settings.runtime
    if runtime.kind == "llama_cpp":
        try:
            label = engine_label(runtime)
        except ConfigurationError as error:
            return Finding("engine", "fail", str(error), "install llama.cpp with RPC, or set both programs' paths")
        if is_direct(runtime):
            text = f"{label}; DIRECT MODE: {direct_warning(runtime)}"
            return Finding(
                "engine", "note", text, "unset runtime.llama_direct_host unless you trust that whole network"
            )
        return Finding("engine", "ok", label)
    if runtime.kind == "mapped":
        text = "runtime.kind is mapped: it holds a stage's bytes and computes nothing"
        return Finding("engine", "note", text, "to answer requests set runtime.kind to llama_cpp or process")
    if runtime.kind == "reference":
        return Finding("engine", "note", NOT_FOR_PRODUCTION, "to serve people set runtime.kind to llama_cpp or process")
    if not runtime.command:
        return Finding("engine", "fail", "runtime.kind is process without a command", "set runtime.command")
    program = shutil.which(runtime.command[0])
    if program is None:
        return Finding(
            "engine", "fail", f"{runtime.command[0]} is not on PATH", "install it or set runtime.command to its path"
        )
    return Finding("engine", "ok", program)


def check_model(settings: Settings) -> Finding:
    """Can the model that this node asks for be read."""
    if not settings.model.path:
        return Finding("model", "note", "this node asks for none", "`stagemesh serve MODEL`, or set model.path")
    from stage_agent.model_source import open_model

    try:
        package = open_model(settings.model.path)
    except ModelError as error:
        return Finding("model", "fail", str(error), "name a complete model in model.path")
    return Finding("model", "ok", f"{settings.model.path}: {package.layer_count} layers")
