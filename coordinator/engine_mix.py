"""Which nodes may serve together: a plan uses one engine build. Pure.

Two builds of an engine may refuse each other, or agree and compute differently; both show only when a model is loaded. So
builds are told in the rows, and only the nodes of one build are planned: the build with the most installed memory, then
the smallest label. Installed memory does not change while a machine runs, so the choice does not flap.
"""

from collections.abc import Iterable

from coordinator.view import MemberFacts
from protocol.ids import NodeId


def other_engines(candidates: Iterable[MemberFacts]) -> dict[NodeId, str]:
    """The candidates to leave out, each with a reason that names both builds."""
    members = sorted(candidates, key=lambda member: member.node_id)
    memory: dict[str, int] = {}
    for member in members:
        memory[member.row.engine] = memory.get(member.row.engine, 0) + member.row.detected_memory_bytes
    if len(memory) < 2:
        return {}
    chosen = min(memory, key=lambda engine: (-memory[engine], engine))
    return {
        member.node_id: f"runs {member.row.engine or 'an unknown engine'}, the mesh {chosen or 'an unknown engine'}"
        for member in members
        if member.row.engine != chosen
    }
