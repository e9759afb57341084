"""The links of this node to all its peers, and what of them is worth publishing."""

from collections.abc import Callable

from config.settings import LinkSettings
from protocol.ids import NodeId
from protocol.links.bandwidth import Direction, LimitedBy
from protocol.links.facts import fact_of, is_material
from protocol.links.link import Link, LinkMark, LinkView
from protocol.rows import LinkFact


class LinkBook:
    """One ``Link`` per peer that was ever connected and is not forgotten."""

    def __init__(self, settings: LinkSettings, is_shaped: Callable[[NodeId], bool] = lambda _: False) -> None:
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

    def refresh(self, now_us: int) -> bool:
        """Look at every link (about once a second); ``True`` if a new row is worth it."""
        material = False
        for peer, link in self._links.items():
            link.refresh(now_us)
            material = material or is_material(self._published.get(peer), link.mark(now_us))
        return material

    def facts(self, now_us: int) -> tuple[LinkFact, ...]:
        """Facts of everything measured, by node id."""
        facts = (
            fact_of(peer, self._links[peer].view(now_us), now_us, shaped=self._is_shaped(peer))
            for peer in sorted(self._links)
        )
        return tuple(fact for fact in facts if fact is not None)

    @property
    def degraded(self) -> bool:
        """Whether any link is far worse than it was."""
        return any(link.degraded for link in self._links.values())

    def publish(self, now_us: int) -> tuple[LinkFact, ...]:
        """``facts``, remembered as what the mesh was told."""
        self._published = {peer: link.mark(now_us) for peer, link in self._links.items()}
        return self.facts(now_us)
