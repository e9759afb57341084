"""What a link is worth: settled RTT, passive bandwidth, ages, path changes. Pure."""

from protocol.links.bandwidth import merge_bytes_per_s
from protocol.links.facts import is_settled
from protocol.links.link import LinkView, Path
from protocol.links.rtt import RttView

__all__ = ["LinkView", "Path", "RttView", "is_settled", "merge_bytes_per_s"]
