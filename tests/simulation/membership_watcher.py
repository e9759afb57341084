"""What must hold after every event of a mesh of membership cores: the part of PROTOCOL §7 that concerns membership."""

from dataclasses import dataclass, field

from protocol.ids import NodeId
from protocol.membership import MemberChanged
from tests.simulation.membership_mesh import MembershipPort, Mesh


@dataclass
class Watcher:
    """Checks the node that an event touched; give it to the network as ``after_event``."""

    mesh: Mesh
    versions: dict[MembershipPort, dict[NodeId, tuple[int, int]]] = field(default_factory=dict)
    states: dict[tuple[MembershipPort, NodeId], str | None] = field(default_factory=dict)
    graves: dict[tuple[MembershipPort, NodeId], tuple[int, int]] = field(default_factory=dict)
    seen: int = 0

    def __call__(self, name: str) -> None:
        port = next((port for port in self.mesh.ports.values() if port.name == name), None)
        if port is None:
            return
        port.core.validate()
        for change in self.mesh.changes[self.seen :]:
            self._change(port, change.observer, change.change)
        self.seen = len(self.mesh.changes)
        versions = self.versions.setdefault(port, {})
        for node_id, state, version in port.core.standings():
            assert version >= versions.get(node_id, (0, 0)), "a row went back"
            versions[node_id] = version
            assert state == self.states[port, node_id], "a member changed without a word"

    def _change(self, port: MembershipPort, observer: NodeId, change: MemberChanged) -> None:
        assert observer == port.name
        key = (port, change.node_id)
        assert self.states.get(key) == change.old, "the story of a member has a gap"
        self.states[key] = change.new
        if change.new is None:
            return
        member = port.core.members()[change.node_id]
        version = (member.row.boot_counter, member.row.seq)
        if change.new in {"dead", "left"}:
            self.graves[key] = version
        elif change.old in {"dead", "left"} or (change.old is None and key in self.graves):
            assert self.mesh.ran_lately(change.node_id, observer), "resurrected although it does not run"
            assert version > self.graves[key], "resurrected by an old row"
