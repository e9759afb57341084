"""Network coordinates (Vivaldi with height vectors): RTT estimates for pairs that nobody measures in meshes over 64 nodes.

Dabek, Cox, Kaashoek, Morris: "Vivaldi: a decentralized network coordinate system", SIGCOMM 2004, with the constants of the
paper (c_c = c_e = 0.25). An estimate is marked as such on every fact that uses it and never counts as settled.
"""

import math
from dataclasses import dataclass
from random import Random

from protocol.rows import Coordinate

_CC = _CE = 0.25
_ERROR_MAX = 1.5
_HEIGHT_MIN_US = 10.0
_EXTENT_US = 30_000_000.0
"""Coordinates beyond half a minute of light are nonsense; they are clamped."""


@dataclass(slots=True)
class VivaldiNode:
    """This node's coordinate, moved by every RTT sample to a peer whose coordinate is known."""

    random: Random
    x_us: float = 0.0
    y_us: float = 0.0
    z_us: float = 0.0
    height_us: float = _HEIGHT_MIN_US
    error: float = _ERROR_MAX

    def observe(self, rtt_us: int, peer: Coordinate) -> None:
        """Pull towards (or push from) the peer by the misfit of this sample, weighted by both confidences."""
        here = self.coordinate()
        distance = max(1.0, float(estimate_us(here, peer)))
        peer_error = max(0.001, peer.error_milli / 1000)
        weight = self.error / (self.error + peer_error)
        misfit = abs(distance - rtt_us) / rtt_us
        self.error = min(_ERROR_MAX, misfit * _CE * weight + self.error * (1 - _CE * weight))
        force = _CC * weight * (rtt_us - distance)
        dx, dy, dz = self.x_us - peer.x_us, self.y_us - peer.y_us, self.z_us - peer.z_us
        norm = math.sqrt(dx * dx + dy * dy + dz * dz)
        if norm < 1.0:
            dx, dy, dz = (self.random.uniform(-1, 1) for _ in range(3))
            norm = math.sqrt(dx * dx + dy * dy + dz * dz) or 1.0
        self.x_us = _clamped(self.x_us + force * dx / norm)
        self.y_us = _clamped(self.y_us + force * dy / norm)
        self.z_us = _clamped(self.z_us + force * dz / norm)
        share = (self.height_us + peer.height_us) / distance
        self.height_us = min(_EXTENT_US, max(_HEIGHT_MIN_US, self.height_us + force * share))

    def coordinate(self) -> Coordinate:
        """As it travels in the row."""
        return Coordinate(
            x_us=round(self.x_us),
            y_us=round(self.y_us),
            z_us=round(self.z_us),
            height_us=round(self.height_us),
            error_milli=round(self.error * 1000),
        )


def is_placed(coordinate: Coordinate) -> bool:
    """Whether samples have given it any worth: a new node stands at the origin, next to every other new node."""
    return coordinate.error_milli < 1000 * _ERROR_MAX


def estimate_us(a: Coordinate, b: Coordinate) -> int:
    """Estimated RTT between two nodes, rounded up; at least 1."""
    dx, dy, dz = a.x_us - b.x_us, a.y_us - b.y_us, a.z_us - b.z_us
    return max(1, math.isqrt(dx * dx + dy * dy + dz * dz) + a.height_us + b.height_us)


def _clamped(value: float) -> float:
    return max(-_EXTENT_US, min(_EXTENT_US, value))
