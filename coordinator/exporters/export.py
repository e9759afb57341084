"""What an exporter answers, and what it is told besides the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.planner.plan import Plan, PlannedStage


@dataclass(frozen=True, slots=True)
class Host:
    """A node as another engine knows it: a name for people, and the address its neighbours reach it by (no port)."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A plan for people who run another engine. ``hosts`` has every node of the plan.

    ``model`` is what that engine is to load: a path for llama.cpp, a repository or directory for the others.
    """

    plan: Plan
    hosts: Mapping[str, Host]
    model: str
    port: int
    """First port to use; some engines use the next ones as well."""
    tied_embeddings: bool | None = None
    """``None`` = not known; decides only what can be said about the output layer."""

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """In pipeline order: stage 0 holds the first layers."""
        return self.plan.stages

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers per stage, in pipeline order."""
        return tuple(stage.layer_end - stage.layer_start for stage in self.plan.stages)

    def host(self, stage: PlannedStage) -> Host:
        """Where ``stage`` runs."""
        return self.hosts[stage.node_id]


@dataclass(frozen=True, slots=True)
class HostPart:
    """What to do on one host: put ``files`` there, then run ``commands`` in order (the last one stays running)."""

    host: Host
    stage_index: int
    commands: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Relative path → content."""


@dataclass(frozen=True, slots=True)
class Export:
    """All hosts, in the order in which they should be started."""

    engine: str
    parts: tuple[HostPart, ...]
    cannot: tuple[str, ...]
    """What the plan says and this engine has no way to be told, or does otherwise."""


def export_document(export: Export) -> dict[str, Any]:
    """``export --json``."""
    return {
        "engine": export.engine,
        "hosts": [
            {
                "name": part.host.name,
                "address": part.host.address,
                "stage_index": part.stage_index,
                "commands": list(part.commands),
                "files": dict(part.files),
            }
            for part in export.parts
        ],
        "cannot_express": list(export.cannot),
    }
