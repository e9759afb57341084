"""What an active bandwidth probe must give way to, and which links it is for: read from what the node counts anyway."""

from collections.abc import Collection, Iterable, Mapping

from protocol.ids import NodeId
from protocol.membership.member import Member
from protocol.rows import StageFact
from stage_agent.journal import Journal


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
