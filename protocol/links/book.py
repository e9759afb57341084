"""The links of this node to all its peers, and what of them is worth publishing."""

from collections.abc import Callable

from config.settings import LinkSettings
from protocol.ids import NodeId
from protocol.links.bandwidth import Direction, LimitedBy
from protocol.links.facts import Change, change_of, fact_of, has_bandwidth
from protocol.links.link import Link, LinkMark, LinkView
from protocol.rows import LinkFact

FACTS_MAX = 128
"""Links that one row tells of: twice the connections that a node of a large mesh holds."""


def _never(_: NodeId) -> bool:
    return False


class LinkBook:
    """One ``Link`` per peer that was ever connected and is not forgotten."""

    def __init__(self, settings: LinkSettings, is_shaped: Callable[[NodeId], bool] = _never) -> None:
        self._settings = settings
        self._is_shaped = is_shaped
        self._links: dict[NodeId, Link] = {}
        self._published: dict[NodeId, LinkMark] = {}

    def link(self, peer: NodeId) -> Link:
        """The peer's link, made at first use."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(self._settings)
        return link

    def known(self, peer: NodeId) -> Link | None:
        """The peer's link if anything was ever recorded."""
        return self._links.get(peer)

    def forget(self, peer: NodeId) -> None:
        """The node is gone for good."""
        self._links.pop(peer, None)
        self._published.pop(peer, None)

    def on_transfer(
        self, peer: NodeId, direction: Direction, size: int, duration_us: int, limited_by: LimitedBy, now_us: int
    ) -> None:
        """A bulk transfer with ``peer`` ended now; see ``Link.on_transfer``."""
        self.link(peer).on_transfer(direction, size, duration_us, limited_by, now_us)

    def void(self) -> None:
        """Every sample was taken before a clock gap."""
        for link in self._links.values():
            link.void()

    def view(self, peer: NodeId, now_us: int) -> LinkView | None:
        """Snapshot of one link."""
        link = self._links.get(peer)
        return None if link is None else link.view(now_us)

    def refresh(self, now_us: int, is_sampled: Callable[[NodeId], bool] = _never) -> Change:
        """Look at every link (about once a second): the greatest change of any. See ``change_of`` for sampled."""
        greatest: Change = "none"
        for peer, link in self._links.items():
            link.refresh(now_us)
            if greatest != "material":
                change = change_of(self._published.get(peer), link.mark(now_us), sampled=is_sampled(peer))
                greatest = greatest if change == "none" else change
        return greatest

    def facts(self, now_us: int) -> tuple[LinkFact, ...]:
        """Facts of everything measured, by node id."""
        return self._facts(sorted(self._links), now_us)

    @property
    def degraded(self) -> bool:
        """Whether any link is far worse than it was."""
        return any(link.degraded for link in self._links.values())

    def publish(self, now_us: int, is_sampled: Callable[[NodeId], bool] = _never) -> tuple[LinkFact, ...]:
        """``facts``, remembered as what the mesh was told. What is only sampled is told by this node's coordinate.

        A link with a bandwidth is always told. At most ``FACTS_MAX``, the latest measured.
        """
        marks = {peer: link.mark(now_us) for peer, link in self._links.items()}
        told = [peer for peer, mark in marks.items() if has_bandwidth(mark) or not is_sampled(peer)]
        if len(told) > FACTS_MAX:
            told = sorted(told, key=lambda peer: (-self._links[peer].measured_us, peer))[:FACTS_MAX]
        self._published = {peer: marks[peer] for peer in told}
        return self._facts(sorted(told), now_us)

    def _facts(self, peers: list[NodeId], now_us: int) -> tuple[LinkFact, ...]:
        facts = (fact_of(peer, self._links[peer].view(now_us), now_us, shaped=self._is_shaped(peer)) for peer in peers)
        return tuple(fact for fact in facts if fact is not None)
