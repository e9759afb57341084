"""What a link is worth: settled RTT, passive bandwidth, ages, path changes. Pure."""

from protocol.links.bandwidth import merge_bytes_per_s
from protocol.links.facts import is_settled
from protocol.links.link import LinkView
from protocol.links.rtt import RttView
from protocol.links.yardstick import Path

__all__ = ["LinkView", "Path", "RttView", "is_settled", "merge_bytes_per_s"]
