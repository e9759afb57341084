"""How much of each model is here, in the planner's terms: weight bytes, as in ``ModelPackage.weight_bytes``.

``artifact_transfer`` says that what is missing can come from a peer: transfers are on and somebody offers the model. On a
node that has all of it, it says that the node offers it.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from coordinator.model.package import ModelPackage
from protocol.errors import ModelError
from protocol.rows import ModelFact, NodeRow
from stage_agent.artifacts.policy import Mode
from stage_agent.artifacts.stage_files import has_size, manifest_at
from stage_agent.model_files import PackageFiles, locate

MAX_FACTS = 64
"""A row's bound; complete models first, then by digest."""


def missing_weight_bytes(path: Path) -> int | None:
    """Tensor bytes of the model at ``path`` whose files are absent; ``None`` when it cannot be read at all. Blocks."""
    try:
        files = locate(path)
        if not isinstance(files, PackageFiles):
            return 0
        _, manifest = manifest_at(files.directory)
    except ModelError:
        return None
    return sum(
        artifact.tensor_bytes
        for artifact in manifest.artifacts
        if not artifact.role.startswith("projector")
        and not has_size(files.directory / artifact.path, artifact.artifact_bytes)
    )


def model_facts(
    mode: Mode, packages: Iterable[ModelPackage], missing: Mapping[str, int], offered: Collection[str]
) -> tuple[ModelFact, ...]:
    """For the own row. ``missing`` has the models of which something is here, ``offered`` those that a peer offers."""
    facts = [_fact(mode, package, missing.get(package.digest), package.digest in offered) for package in packages]
    facts.sort(key=lambda fact: (fact.missing_bytes > 0, fact.digest))
    return tuple(facts[:MAX_FACTS])


def offered_models(rows: Iterable[NodeRow]) -> frozenset[str]:
    """What other nodes hold at least a part of and would give."""
    return frozenset(
        fact.digest for row in rows for fact in row.models if fact.artifact_transfer and fact.cached_bytes > 0
    )


def holders_of(digest: str, rows: Iterable[NodeRow]) -> tuple[str, ...]:
    """Node ids worth asking: who serves the model first, then who has most of it, then by id."""
    ranked = [
        (not any(served.digest == digest for served in row.serves), -fact.cached_bytes, row.node_id)
        for row in rows
        for fact in row.models
        if fact.digest == digest and fact.artifact_transfer and fact.cached_bytes > 0
    ]
    return tuple(node_id for *_, node_id in sorted(ranked))


def _fact(mode: Mode, package: ModelPackage, missing: int | None, offered: bool) -> ModelFact:
    lacking = package.weight_bytes if missing is None else min(missing, package.weight_bytes)
    return ModelFact(
        digest=package.digest,
        cached_bytes=package.weight_bytes - lacking,
        missing_bytes=lacking,
        artifact_transfer=mode != "off" and (lacking == 0 or offered),
    )
