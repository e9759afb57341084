"""What a runtime may know of the node it runs on."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.planner.readout import ReadoutSpeeds
from protocol.ballots import StageAssignment
from protocol.fencing import PlanEpoch
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.interface import StageLink
from stage_agent.tunnel.tunnels import Tunnels


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """Given to the factory by the driver, once per runtime."""

    tasks: asyncio.TaskGroup
    """Owns the runtime's background tasks; they end with ``unload``."""
    node_id: str
    epoch: PlanEpoch
    """The ballot that this runtime is loaded for."""
    link: StageLink
    model_path: Callable[[StageAssignment], Path]
    """Where this node has the assigned model. Raises ``ModelError``."""
    peer_address: Callable[[str], str]
    """``host:port`` of a node id, for engines that dial themselves; "" for an unknown or empty id."""
    budget: StartBudget
    """One per slot, kept across runtimes."""
    shaped_bytes_per_s: int | None = None
    """Pretended memory bandwidth: the verification engine decodes no faster than this."""
    tunnels: Tunnels | None = None
    """Loopback ways to engines of other nodes, for engines that only speak TCP."""
    engine: str = ""
    """This node's engine build, as its row tells it."""
    readout_speeds: Callable[[str], ReadoutSpeeds] = lambda _last: ReadoutSpeeds(None, None, None)
    """What is known of this node as head and of the last stage's node."""
    frames: Counter[str] = field(default_factory=Counter)
    """Stage frames of the whole process, by direction and reason of drop."""
