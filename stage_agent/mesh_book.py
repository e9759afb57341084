"""The admissions and seeds of this node's mesh, kept in its state directory."""

from dataclasses import dataclass, field
from pathlib import Path

from protocol.admission import AdmissionBook
from protocol.errors import StateError
from protocol.quic.mesh_files import FILE_NAME, save_membership
from protocol.rows import Admission


@dataclass(slots=True)
class MeshBook:
    """The only writer of ``mesh.json`` besides those who sign statements. Seeds are where peers were last seen.

    What this node signs is on the disk before anybody hears it; what it hears is written within moments, many statements
    at once, and comes again from others if the power goes first. A full disk costs the memory of it, not the daemon.
    """

    book: AdmissionBook
    state_dir: Path
    seeds: dict[str, None] = field(default_factory=dict)
    _changed: bool = False
    _forgotten: bool = False

    def learn(self, admission: Admission) -> bool:
        """Take a statement that others spread; whether it was new and held. On the disk with the next ``keep``."""
        news = self.book.merge(admission)
        self._changed |= news
        return news

    def touched(self) -> None:
        """The transport has merged something by itself: a greeting's proof, a newcomer, why this node is turned away."""
        self._changed = True

    def seen(self, address: str) -> None:
        """A peer answers at ``address``; remembered for the next start."""
        if address and address not in self.seeds:
            self.seeds[address] = None
            self._changed = True

    def keep(self) -> str:
        """Write what changed since the last time; why that failed, or nothing. Call at once for news, and once a second."""
        if self._changed and not self._forgotten:
            try:
                self.save()
            except StateError as error:
                return str(error)
        return ""

    def forget(self) -> None:
        """This node has left for good: its mesh's file is set aside, so that coming back needs an invitation."""
        self._forgotten = True
        file = self.state_dir / FILE_NAME
        file.replace(file.with_name(f"{FILE_NAME}.left"))

    def save(self) -> None:
        """Write both. Raises ``StateError``; the old file is then still there."""
        save_membership(self.state_dir, self.book, self.seeds)
        self._changed = False
