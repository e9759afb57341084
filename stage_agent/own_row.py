"""This node's row, put together from what its parts say of themselves."""

from dataclasses import dataclass

from config.settings import NodeSettings
from protocol.ids import Instance, NodeId
from protocol.orders import OperatorOrder
from protocol.rows import DeviceFact, ModelFact, NodeRow, ServedModel, StageFact


@dataclass(frozen=True, slots=True)
class Identification:
    """What never changes while the process lives."""

    node_id: NodeId
    public_key: bytes
    instance: Instance
    boot_counter: int
    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """What was measured or is pretended: bytes, and devices with their speeds."""

    detected_memory_bytes: int
    memory_shaped: bool
    devices: tuple[DeviceFact, ...]


def usable_memory_bytes(hardware: Hardware, settings: NodeSettings) -> int:
    """What layers may use: the planner's own rule, for the agent's checks."""
    headroom = settings.runtime_headroom_bytes
    if headroom is None:
        headroom = -(-hardware.detected_memory_bytes // 10)
    offered = hardware.detected_memory_bytes
    if settings.memory_cap_bytes is not None:
        offered = min(offered, settings.memory_cap_bytes)
    return max(0, offered - headroom)


def build_row(
    who: Identification,
    hardware: Hardware,
    settings: NodeSettings,
    *,
    addresses: tuple[str, ...],
    api_address: str,
    draining: bool,
    leaving: bool,
    degraded: tuple[str, ...],
    stages: tuple[StageFact, ...],
    models: tuple[ModelFact, ...],
    serves: tuple[ServedModel, ...],
    orders: tuple[OperatorOrder, ...],
    max_term: int,
    engine: str,
    keeps_loads: bool,
) -> NodeRow:
    """Everything but numbering, incarnation and links, which the membership core adds."""
    return NodeRow(
        node_id=who.node_id,
        public_key=who.public_key,
        boot_counter=who.boot_counter,
        seq=0,
        instance=who.instance,
        name=who.name,
        version=who.version,
        addresses=addresses,
        api_address=api_address,
        status="leaving" if leaving else "draining" if draining else "running",
        degraded=degraded,
        detected_memory_bytes=hardware.detected_memory_bytes,
        memory_cap_bytes=settings.memory_cap_bytes,
        runtime_headroom_bytes=settings.runtime_headroom_bytes,
        memory_source="shaped" if hardware.memory_shaped else "measured",
        devices=hardware.devices,
        stages=stages,
        models=models,
        serves=serves,
        orders=orders,
        max_term=max_term,
        can_coordinate=settings.can_coordinate,
        can_host_stage=settings.can_host_stage,
        engine=engine,
        keeps_loads=keeps_loads,
    )
