"""What an active bandwidth probe must give way to, and which links it is for: read from what the node counts anyway.

Most traffic of a machine is not the mesh's: a download of its user takes the same link. The counters of the network cards
know of it; what the node's own probe moves meanwhile is subtracted.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import psutil

from protocol.ids import NodeId
from protocol.membership.member import Member
from protocol.rows import StageFact
from stage_agent.addresses import is_card
from stage_agent.journal import Journal

FOREIGN_BYTES = 1_048_576
"""More than this within ``WINDOW_US`` is traffic: 8 Mbit/s."""
PROBE_SLACK_BYTES = 4_194_304
"""Cards are ahead of what was read from a socket, or behind what was written to it, by its buffers."""
WINDOW_US = 1_000_000
DRAIN_US = 5_000_000
"""After a probe's last byte was written the cards may still be sending: until then its account stays open."""
WIRE_PERMILLE = 1_100
"""Headers and TLS, per byte of a probe; acknowledgements the other way are less than the excess of this."""


def other_traffic(journal: Journal) -> int:
    """Changes with every stage frame and every byte of an engine's tunnel, either way."""
    tunnels = journal.tunnels.counters()
    return journal.frames.total() + tunnels.sent_bytes + tunnels.received_bytes


def stages_load(facts: Iterable[StageFact]) -> bool:
    """Whether a stage of this node loads: its pieces may be under way from peers or from the disk."""
    return any(fact.state == "loading" for fact in facts)


def unknown_links(members: Mapping[NodeId, Member], connected: Collection[NodeId]) -> list[NodeId]:
    """Connected, living peers to which nothing large was sent, or not for so long that the estimate has expired."""
    return [
        peer
        for peer, member in members.items()
        if peer in connected and member.state == "alive" and (member.link is None or member.link.send is None)
    ]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes each way since some beginning."""

    sent: int
    received: int

    def since(self, before: "Moved") -> "Moved":
        """What came after ``before``."""
        return Moved(self.sent - before.sent, self.received - before.received)


def card_bytes() -> Moved:
    """What this machine's network cards have moved: all programs' traffic, without loopback, bridges and tunnels."""
    cards = [each for name, each in psutil.net_io_counters(pernic=True).items() if is_card(name)]
    return Moved(sum(each.bytes_sent for each in cards), sum(each.bytes_recv for each in cards))


class ForeignTraffic:
    """Whether the cards carry more than this node's probes account for. ``probed``: bytes of probes, both ways."""

    def __init__(self, cards: Callable[[], Moved], probed: Callable[[], Moved], now_us: int) -> None:
        self._cards = cards
        self._probed = probed
        self._begun = now_us, cards(), probed()
        self._probe = now_us - DRAIN_US, probed()
        """When a probe moved last, and what all had moved then."""

    def flows(self, now_us: int) -> bool:
        """Ask every second or more often, every few milliseconds while a probe runs."""
        begun_us, cards_before, probed_before = self._begun
        cards, probed = self._cards(), self._probed()
        moved, own = cards.since(cards_before), probed.since(probed_before)
        if probed != self._probe[1]:
            self._probe = now_us, probed
        slack = FOREIGN_BYTES + (PROBE_SLACK_BYTES if own.sent or own.received else 0)
        ways = ((moved.sent, own.sent, own.received), (moved.received, own.received, own.sent))
        foreign = any(
            card - (carried * WIRE_PERMILLE + answered * (WIRE_PERMILLE - 1_000)) // 1_000 > slack
            for card, carried, answered in ways
        )
        if foreign or min(now_us - begun_us - WINDOW_US, now_us - self._probe[0] - DRAIN_US) >= 0:
            self._begun = now_us, cards, probed
        return foreign
