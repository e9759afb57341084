"""The admissions and seeds of this node's mesh, kept in its state directory."""

from dataclasses import dataclass, field
from pathlib import Path

from protocol.admission import AdmissionBook
from protocol.quic.mesh_files import FILE_NAME, save_membership
from protocol.rows import Admission


@dataclass(slots=True)
class MeshBook:
    """The only writer of ``mesh.json`` besides the admission desk. Seeds are where peers were last seen."""

    book: AdmissionBook
    state_dir: Path
    seeds: dict[str, None] = field(default_factory=dict)

    def learn(self, admission: Admission) -> bool:
        """Take a statement; whether it was new and held. Durable before it is believed by others' gossip."""
        if not self.book.merge(admission):
            return False
        self.save()
        return True

    def seen(self, address: str) -> None:
        """A peer answers at ``address``; remembered for the next start."""
        if address and address not in self.seeds:
            self.seeds[address] = None
            self.save()

    def forget(self) -> None:
        """This node has left for good: its mesh's file is set aside, so that coming back needs an invitation."""
        file = self.state_dir / FILE_NAME
        file.replace(file.with_name(f"{FILE_NAME}.left"))

    def save(self) -> None:
        """Write both. Raises ``StateError``; the old file is then still there."""
        save_membership(self.state_dir, self.book, self.seeds)
