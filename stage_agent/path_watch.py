"""Says which way each peer is reached and when that way is bad: a silent fall-back from cable to Wi-Fi costs the most.

Reads what transport and membership report, tells the journal; decides nothing.
"""

from protocol.ids import NodeId
from protocol.links.yardstick import Path as LinkPath
from protocol.membership.core import Membership
from protocol.quic.address import HostPort
from protocol.quic.interface import Path, PeerConnected, PeerMoved
from stage_agent.clock import monotonic_us
from stage_agent.journal import Journal
from stage_agent.narrator import Narrator

BLOCKED_US = 3_000_000
"""TCP may be first to reach a node that is starting; that UDP is blocked is said when it stays so."""


class PathWatch:
    """Remembers the present way to every connected peer, and which links are known to be degraded."""

    def __init__(self, membership: Membership, journal: Journal) -> None:
        self._membership = membership
        self._journal = journal
        self._narrator = Narrator(membership, journal)
        self._ways: dict[NodeId, tuple[str, str, Path]] = {}
        self._degraded: set[NodeId] = set()
        self._over_tcp: dict[NodeId, int] = {}
        """Since when control runs over TCP; until it was told."""

    def connected(self, event: PeerConnected) -> None:
        """The first way of a connection."""
        self._ways[event.peer] = (event.address, event.interface, event.path)
        self._time_tcp(event.peer, event.path, "quic")

    def moved(self, event: PeerMoved) -> None:
        """Call before the membership hears of it: the old way's round trip is told."""
        peer = event.peer
        before = self._ways.get(peer, ("", "", event.path))
        self._ways[peer] = (event.address, event.interface, event.path)
        self._time_tcp(peer, event.path, before[2])
        if event.interface and not before[1] and (event.address, event.path) == (before[0], before[2]):
            return  # it was the way all along
        name, now, then = self._narrator.name_of(peer), _way(*self._ways[peer]), _way(*before)
        member = self._membership.members().get(peer)
        rtt = None if member is None or member.link is None else member.link.rtt
        slow = "" if rtt is None else f", {_ms(rtt.min_rtt_us)} there"
        self._journal.tell(
            "path_changed",
            f"{name} is reached at {now} now (was {then}{slow})",
            node_id=peer,
            address=event.address,
            interface=event.interface,
            path=event.path,
            was_address=before[0],
            was_interface=before[1],
            was_rtt_us=None if rtt is None else rtt.min_rtt_us,
        )

    def disconnected(self, peer: NodeId) -> None:
        """No way is left."""
        self._ways.pop(peer, None)
        self._over_tcp.pop(peer, None)
        self._degraded.discard(peer)

    def look(self) -> None:
        """Tell what has become far worse than it was, or good again. Call when the membership has news."""
        for peer, member in self._membership.members().items():
            link = member.link
            if link is None or not member.direct or link.degraded is (peer in self._degraded):
                continue
            name, way = self._narrator.name_of(peer), _way(*self._ways.get(peer, (member.address, "", "quic")))
            if not link.degraded:
                self._degraded.discard(peer)
                self._journal.tell("link_recovered", f"the link to {name} at {way} is as it was", node_id=peer)
                continue
            self._degraded.add(peer)
            best = f"{_ms(link.best_rtt_us)} at {_best(link.best_path)}"
            rtt_us = None if link.rtt is None else link.rtt.min_rtt_us
            self._journal.tell(
                "link_degraded",
                f"the link to {name} at {way} takes {_ms(rtt_us)}; it was {best} once: see what has changed there",
                "warning",
                node_id=peer,
                address=member.address,
                interface="" if link.path is None else link.path.interface,
                rtt_us=rtt_us,
                best_rtt_us=link.best_rtt_us,
                best_host="" if link.best_path is None else link.best_path.host,
                best_interface="" if link.best_path is None else link.best_path.interface,
            )

    def tell_blocked(self, now_us: int) -> None:
        """Tell to whom UDP has not passed for a while. Call about once a second; most calls cost nothing."""
        for peer, since_us in list(self._over_tcp.items()):
            if now_us - since_us >= BLOCKED_US:
                del self._over_tcp[peer]
                self._tell_blocked(peer, self._ways[peer][0])

    def _time_tcp(self, peer: NodeId, path: Path, before: Path) -> None:
        if path != "tls":
            self._over_tcp.pop(peer, None)
        elif before != "tls":
            self._over_tcp[peer] = monotonic_us()

    def _tell_blocked(self, peer: NodeId, address: str) -> None:
        self._journal.tell(
            "udp_blocked",
            f"UDP does not pass to {self._narrator.name_of(peer)} at {address}: control runs over TCP (let UDP through)",
            "warning",
            node_id=peer,
            address=address,
        )


def _way(address: str, interface: str, path: Path) -> str:
    return address + (f" by {interface}" if interface else "") + (" over TCP" if path == "tls" else "")


def _best(path: LinkPath | None) -> str:
    if path is None:
        return "an unknown address"
    interface = path.interface.partition("~")[0]
    host = str(HostPort(path.host, 1)).rpartition(":")[0]
    return host + (f" by {interface}" if interface else "")


def _ms(time_us: int | None) -> str:
    return "an unknown time" if time_us is None else f"{time_us / 1_000:.1f} ms"
