"""What ``stagemesh doctor`` asks a running daemon: readiness, reachability per peer, trust of its measurements."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol.errors import AddressError
from protocol.quic.address import parse_address
from stage_agent.cli.doctor_local import Finding
from stage_agent.cli.mesh_view import age, clean, rate
from stage_agent.cli.plan_view import milliseconds

MAX_DIALLED_PEERS = 32
DIAL_S = 2.0


def mesh_findings(status: dict[str, Any], nodes: list[dict[str, Any]], links: list[dict[str, Any]]) -> list[Finding]:
    """All looks at the daemon's documents. Dials the bulk port of peers that are not well."""
    peers = [node for node in nodes if not node["is_self"]]
    ailing = [peer for peer in peers if peer["state"] in ("suspect", "dead")][:MAX_DIALLED_PEERS]
    with ThreadPoolExecutor(max_workers=8) as dialling:
        reachable = dict(
            zip((peer["node_id"] for peer in ailing), dialling.map(_dial, (p["address"] for p in ailing)), strict=True)
        )
    findings = [check_ready(status), check_coordinator(status), check_own_signals(nodes)]
    findings += [check_peer(peer, reachable.get(peer["node_id"])) for peer in peers if peer["state"] != "left"]
    if not peers:
        findings.append(
            Finding("peers", "note", "this mesh has one node", "`stagemesh invite` on it, `join` elsewhere")
        )
    me = status["node"]["node_id"]
    return [*findings, *(check_link(link) for link in links if link["source"] == me)]


def check_ready(status: dict[str, Any]) -> Finding:
    """Does the daemon call itself ready."""
    if status["ready"]:
        return Finding("daemon", "ok", f"ready, version {status['node']['version']}")
    return Finding(
        "daemon", "fail", "; ".join(status["not_ready_reasons"]), "`stagemesh stages` and `events` show how far it is"
    )


def check_coordinator(status: dict[str, Any]) -> Finding:
    """Is anybody coordinating."""
    lead = status["coordinator"]
    if not lead["node_id"]:
        return Finding(
            "coordinator",
            "fail",
            f"none{': ' + lead['election'] if lead['election'] else ''}",
            "wait for membership to settle (about 8 s); then see `stagemesh peers` for who is not plannable and why",
        )
    return Finding("coordinator", "ok", f"{clean(lead['name'] or lead['node_id'])}, term {lead['term']}")


def check_own_signals(nodes: list[dict[str, Any]]) -> Finding:
    """Does this node tell the planner how fast it is."""
    mine = next((node for node in nodes if node["is_self"]), None)
    if mine is None or mine["memory_bandwidth_bytes_per_s"] is None:
        return Finding(
            "signals", "fail", "memory bandwidth is not known: plans go by capacity only", "run `stagemesh bench`"
        )
    return Finding(
        "signals", "ok", f"bandwidth {rate(mine['memory_bandwidth_bytes_per_s'])}, {mine['bandwidth_source']}"
    )


def check_peer(peer: dict[str, Any], bulk_port_answers: bool | None) -> Finding:
    """One peer: alive and plannable, or what to do about it. ``None`` = its bulk port was not dialled."""
    name = f"peer {clean(peer['name'])}"
    heard = age(peer["last_heard_age_us"])
    if peer["state"] == "alive":
        if peer["plannable"]:
            return Finding(name, "ok", f"alive at {clean(peer['address'])}")
        why = clean(peer["why_not_plannable"]) or "not plannable"
        return Finding(name, "note", f"alive, but {why}", "it joins plans by itself once that is over")
    if bulk_port_answers:
        step = f"its TCP port answers, so UDP is blocked: open UDP {peer['address'].rpartition(':')[2]} both ways"
    else:
        step = "start it, or open its port for UDP and TCP in firewalls on the way; if it is gone: `stagemesh exclude`"
    return Finding(name, "fail", f"{peer['state']} at {clean(peer['address'])}, heard {heard}", step)


def check_link(link: dict[str, Any]) -> Finding:
    """One outgoing link: is its latency trusted."""
    name = f"link to {clean(link['target_name'])}"
    if link["degraded"]:
        return Finding(
            name,
            "note",
            f"{_rtt(link)}, much slower than it was",
            "look for Wi-Fi instead of cable, a VPN or a relay on the way",
        )
    if link.get("over_tcp"):
        step = "open its UDP port both ways: over TCP one lost packet holds up everything behind it"
        return Finding(name, "note", f"{_rtt(link)}, UDP does not pass, control runs over TCP", step)
    if not link["settled"]:
        return Finding(name, "note", f"{_rtt(link)}, not settled yet", "wait for 2 samples over 5 s")
    return Finding(name, "ok", _rtt(link) + (" (shaped)" if link["shaped"] else ""))


def _rtt(link: dict[str, Any]) -> str:
    return f"round trip {milliseconds(link['rtt_us'])}"


def _dial(address: str) -> bool:
    """Whether the peer's TCP port of the same number takes a connection."""
    try:
        parsed = parse_address(address)
        with socket.create_connection((parsed.host, parsed.port), timeout=DIAL_S):
            return True
    except (OSError, AddressError):
        return False
