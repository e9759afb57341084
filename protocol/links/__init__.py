"""What a link is worth: settled RTT, passive bandwidth, ages, path changes. Pure."""

from protocol.links.facts import frames_bytes_per_s, is_settled
from protocol.links.link import LinkView
from protocol.links.rtt import RttView
from protocol.links.yardstick import Path

__all__ = ["LinkView", "Path", "RttView", "frames_bytes_per_s", "is_settled"]
