"""Statements about who belongs to the mesh: kept for digests, spread, and acted upon. The shell's book judges them.

Who is barred, revoked or succeeded by another key, is dropped at once. Who merely lost the one that vouched for it keeps
its place for ``CUT_OFF_US``: a revocation and a succession bring new vouchers with them, which may arrive a moment later.
"""

from protocol.ids import NodeId
from protocol.membership.ground import Ground
from protocol.messages import DigestRequest, Gossip, GossipPush, RowVersion
from protocol.rows import Admission

CUT_OFF_US = 10_000_000
STATEMENTS_PER_MESSAGE = 64


class Admissions:
    """What the book accepted, by node. Timer ``cut``: look for members that nobody vouches for any more."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._held: dict[NodeId, Admission] = {}

    def keep(self, admission: Admission, told_by: NodeId | None) -> bool:
        """The shell accepted it: keep and spread it. Whether it is news."""
        node_id = NodeId(admission.node_id)
        held = self._held.get(node_id)
        if held is not None and not _supersedes(admission, held):
            return False
        self._held[node_id] = admission
        self._ground.queue.add("admission", node_id, admission, told_by=told_by)
        return True

    def is_news(self, admission: Admission) -> bool:
        """Whether the shell has not accepted it (or a better one) yet."""
        held = self._held.get(NodeId(admission.node_id))
        return held is None or _supersedes(admission, held)

    def barred_by(self, admission: Admission, now_us: int) -> tuple[NodeId, str] | None:
        """Who is out for good because of it, and why. Others that lost their voucher get ``CUT_OFF_US``."""
        ground, signer = self._ground, self._held.get(NodeId(admission.signer))
        succeeded = signer is not None and signer.successor == admission.node_id
        if not admission.revoked and not succeeded:
            return None
        if ground.timers.deadline("cut") is None:
            ground.timers.set("cut", "", now_us + CUT_OFF_US)
        return (NodeId(admission.node_id), "revoked") if admission.revoked else (NodeId(admission.signer), "superseded")

    def cut_off(self) -> list[NodeId]:
        """Members that are not admitted."""
        return [entry.node_id for entry in self._ground.table if not self._ground.is_admitted(entry.node_id)]

    def tell(self, peers: list[NodeId], admissions: list[Admission]) -> None:
        """Straight to these peers, many in one message: who hears of a succession hears of its vouchers with it."""
        for start in range(0, len(admissions), STATEMENTS_PER_MESSAGE):
            gossip = Gossip(admissions=tuple(admissions[start : start + STATEMENTS_PER_MESSAGE]))
            for peer in peers:
                self._ground.send(peer, GossipPush(gossip=gossip), "stream")

    def lines(self) -> tuple[RowVersion, ...]:
        """For a digest: revocations outrank versions."""
        return tuple(
            RowVersion(node_id=node_id, boot_counter=int(admission.revoked), seq=admission.version)
            for node_id, admission in self._held.items()
        )

    def exchange(self, sender: NodeId, digest: DigestRequest) -> bool:
        """Send what is newer here; whether there is something newer at the sender's."""
        theirs = {line.node_id: (line.boot_counter, line.seq) for line in digest.admissions}
        mine = {node_id: (int(held.revoked), held.version) for node_id, held in self._held.items()}
        newer_here = [self._held[node] for node, version in mine.items() if version > theirs.get(node, (-1, -1))]
        self.tell([sender], newer_here)
        return any(version > mine.get(NodeId(node_id), (-1, -1)) for node_id, version in theirs.items())


def _supersedes(new: Admission, held: Admission) -> bool:
    """A revocation wins; otherwise the higher version."""
    return (int(new.revoked), new.version) > (int(held.revoked), held.version)
