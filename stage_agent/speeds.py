"""What this node knows of memory and links for engines that choose a placement when they start."""

from coordinator.layer_devices import layer_device
from coordinator.planner.readout import ReadoutSpeeds
from protocol.ids import NodeId
from protocol.membership.core import Membership
from stage_agent.clock import monotonic_us


def readout_speeds(membership: Membership, head: NodeId, last: str) -> ReadoutSpeeds:
    """``head`` is this node; unknown members have unknown speeds."""
    members = membership.members()
    own, far = members.get(head), members.get(NodeId(last))
    main = [] if own is None else [device for device in own.row.devices if device.kind == "cpu"]
    layers = None if far is None else layer_device(far.row.devices)
    link = next((fact for fact in membership.link_facts(monotonic_us()) if fact.target == last), None)
    return ReadoutSpeeds(
        head_bytes_per_s=main[0].memory_bandwidth_bytes_per_s if main else None,
        last_bytes_per_s=None if layers is None else layers.memory_bandwidth_bytes_per_s,
        link_bytes_per_s=None if link is None else link.receive_bytes_per_s,
    )
