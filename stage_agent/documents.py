"""Published plans: the coordinator's plan document on its way to every node, for people and metrics only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.ballots import PublishedPlan
from protocol.fencing import PlanEpoch, epoch_from_wire, epoch_to_wire
from protocol.ids import NodeId, Slot


@dataclass(frozen=True, slots=True)
class Published:
    """A slot's plan as its coordinator last told it; ``document`` is ``None`` when nothing is placed."""

    slot: Slot
    ballot: PlanEpoch
    generation: int
    state: str
    document: Mapping[str, Any] | None


def published_message(published: Published) -> PublishedPlan:
    """For the wire."""
    document = b"" if published.document is None else json.dumps(published.document, separators=(",", ":")).encode()
    return PublishedPlan(
        ballot=epoch_to_wire(published.ballot),
        slot=published.slot,
        generation=published.generation,
        state=published.state,
        document=document,
    )


def published_from(message: PublishedPlan) -> Published | None:
    """From the wire; ``None`` when the document is not a JSON object."""
    document: Any = None
    if message.document:
        try:
            document = json.loads(message.document)
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or not isinstance(document.get("stages"), list):
            return None
    return Published(Slot(message.slot), epoch_from_wire(message.ballot), message.generation, message.state, document)


class PublishedPlans(dict[Slot, Published]):
    """The latest known of every slot."""

    def learn(self, peer: NodeId, message: PublishedPlan) -> bool:
        """What ``peer`` tells, if it is the coordinator of that ballot; ``False`` when it cannot be read."""
        learnt = published_from(message)
        if learnt is None:
            return False
        known = self.get(learnt.slot)
        if peer == learnt.ballot.node_id and (known is None or learnt.ballot >= known.ballot):
            self[learnt.slot] = learnt
        return True

    def messages_of(self, node_id: NodeId) -> list[PublishedPlan]:
        """What ``node_id`` itself has published, for somebody who has just come."""
        return [published_message(each) for each in self.values() if each.ballot.node_id == node_id]
