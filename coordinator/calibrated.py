"""What calibration from live runs has found, as standing orders that every node repeats, and as the planner takes it. Pure.

``stagemesh calibrate live --apply`` says two kinds of things. A node's speed, as the bandwidth that its layers really get:
it stands above the node's own benchmark for as long as the node has the same devices and the same engine, which a
fingerprint tells. And what a hop costs with an engine: it stands above the profile of that name. Both are estimates from
measured times, so a plan that only they change moves its cuts half-way (DESIGN §10, ``timeless_hash``). A plan names the
profile that priced it with ``+live.`` and the version of the order.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TypeGuard

from coordinator.planner.problem import Calibration
from protocol.rows import NodeRow

LIVE_MARK = "+live."
MOST_BYTES_PER_S, MOST_MULTIPLIER_MILLI, MOST_HOP_US = 2**50, 100_000, 10_000_000


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """What a node's layers get, found while it had these devices and this engine."""

    bytes_per_s: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class HopCosts:
    """What a hop costs with an engine, and the version of the order that says so."""

    rtt_multiplier_milli: int
    per_hop_us: int
    version: int = 0


def fingerprint(row: NodeRow) -> str:
    """Of what a node's speed depends on: the devices that hold layers, and the engine with its build."""
    devices = sorted((device.kind, device.name) for device in row.devices if device.holds_layers)
    return hashlib.sha256(json.dumps([row.engine, devices]).encode()).hexdigest()[:16]


def speed_text(speed: NodeSpeed) -> str:
    """The value of a ``NODE_SPEED`` order."""
    return json.dumps({"bytes_per_s": speed.bytes_per_s, "of": speed.fingerprint})


def costs_text(costs: HopCosts) -> str:
    """The value of a ``HOP_COSTS`` order."""
    return json.dumps({"rtt_multiplier_milli": costs.rtt_multiplier_milli, "per_hop_us": costs.per_hop_us})


def read_speed(text: str) -> NodeSpeed | None:
    """``None`` when it is not one, or out of bounds: such an order changes nothing."""
    found = _object(text)
    rate, of = found.get("bytes_per_s"), found.get("of")
    if not _whole(rate, 1, MOST_BYTES_PER_S) or not isinstance(of, str):
        return None
    return NodeSpeed(rate, of)


def read_costs(text: str, version: int) -> HopCosts | None:
    """``None`` as ``read_speed``."""
    found = _object(text)
    multiplier, hop_us = found.get("rtt_multiplier_milli"), found.get("per_hop_us")
    if not _whole(multiplier, 0, MOST_MULTIPLIER_MILLI) or not _whole(hop_us, 0, MOST_HOP_US):
        return None
    return HopCosts(multiplier, hop_us, version)


def calibrated_rate(row: NodeRow, speed: NodeSpeed | None) -> int | None:
    """What ``speed`` says of the node as it is now; ``None`` when it was found with other devices or another engine."""
    return None if speed is None or speed.fingerprint != fingerprint(row) else speed.bytes_per_s


def with_costs(profile: Calibration, costs: HopCosts | None) -> Calibration:
    """``profile`` with what live runs say of its hops, marked in its name."""
    if costs is None:
        return profile
    return replace(
        profile,
        name=f"{profile.name}{LIVE_MARK}{costs.version}",
        rtt_multiplier_milli=costs.rtt_multiplier_milli,
        per_hop_us=costs.per_hop_us,
    )


def profile_name(calibration: str) -> str:
    """The profile under the mark."""
    return calibration.partition(LIVE_MARK)[0]


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(value: object, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
