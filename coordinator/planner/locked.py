"""An operator's exact split: checked against the instance, then never moved (DESIGN §6).

Checks, each with its own refusal code: ``locked_stage_count``, ``locked_invalid_range`` (half-open and non-empty),
``locked_non_contiguous``, ``locked_incomplete``, ``locked_duplicate_node``, ``locked_unknown_node``,
``locked_ambiguous_node``, ``locked_excluded_node``, ``locked_forbidden_boundary``, ``locked_stage0_mismatch``,
``locked_model_mismatch``, ``locked_return_refused``, ``locked_does_not_fit``. The first feasible shape wins, larger context first.
"""

from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.memory import Shape
from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import LockedTopology


def check_locked(instance: Instance, shapes: tuple[Shape, ...], locked: LockedTopology) -> Candidate | PlanRefused:
    """The lock as a placement at the largest shape that fits, or the first rule it breaks."""
    resolved = _resolve(instance, locked)
    if isinstance(resolved, PlanRefused):
        return resolved
    broken = _broken_rule(instance, locked, resolved)
    if broken:
        return broken
    cuts = (0, *(stage.layer_end for stage in locked.stages))
    for shape in shapes:
        memory = instance.memory(shape)
        if all(
            memory.required(stage.layer_start, stage.layer_end) <= instance.usable[node_id]
            for stage, node_id in zip(locked.stages, resolved, strict=True)
        ):
            return Candidate(shape, resolved, cuts)
    return _does_not_fit(instance, shapes[-1], locked, resolved)


def _resolve(instance: Instance, locked: LockedTopology) -> tuple[str, ...] | PlanRefused:
    """Node selectors to ids: an id, or a prefix of ≥ 4 characters that only one id has."""
    known = sorted(node.node_id for node in instance.problem.participants)
    resolved = []
    for index, stage in enumerate(locked.stages):
        matches = [stage.node_id] if stage.node_id in known else []
        if not matches and len(stage.node_id) >= 4:
            matches = [node_id for node_id in known if node_id.startswith(stage.node_id)]
        if len(matches) != 1:
            code = "locked_ambiguous_node" if matches else "locked_unknown_node"
            problem = "matches several nodes" if matches else "is not among the nodes"
            return _no(code, f"locked stage {index}: {stage.node_id} {problem}", index, node=stage.node_id, known=known)
        resolved.append(matches[0])
    return tuple(resolved)


def _broken_rule(instance: Instance, locked: LockedTopology, resolved: tuple[str, ...]) -> PlanRefused | None:
    model, request = instance.problem.model, instance.problem.request
    if locked.model is not None and locked.model != model.name:
        return _no("locked_model_mismatch", f"the lock is for model {locked.model}, not {model.name}")
    if locked.manifest_digest is not None and locked.manifest_digest != model.digest:
        return _no("locked_model_mismatch", f"the lock is for digest {locked.manifest_digest}, not {model.digest}")
    least = max(1, request.minimum_nodes)
    if len(resolved) < least:
        return _no("locked_stage_count", f"the lock has {len(resolved)} stages; at least {least} are asked for")
    broken = _broken_range(instance, locked, resolved)
    if broken:
        return broken
    if request.pin_stage0 is not None and resolved[0] != request.pin_stage0:
        return _no(
            "locked_stage0_mismatch", f"stage 0 is pinned to {request.pin_stage0}; the lock starts at {resolved[0]}", 0
        )
    lost = sorted(request.require_nodes - set(resolved))
    if lost:
        return _no("locked_required_node_missing", f"{lost[0]} is required and not in the lock")
    if not instance.network.allowed(resolved):
        return _no("locked_return_refused", f"{resolved[-1]} -> {resolved[0]} does not carry direct predictions")
    return None


def _broken_range(instance: Instance, locked: LockedTopology, resolved: tuple[str, ...]) -> PlanRefused | None:
    expected, seen, layers = 0, set[str](), instance.layer_count
    nodes = {node.node_id: node for node in instance.problem.participants}
    for index, (stage, node_id) in enumerate(zip(locked.stages, resolved, strict=True)):
        start, end = stage.layer_start, stage.layer_end
        if end <= start:
            return _no(
                "locked_invalid_range", f"locked stage {index} has the empty or reversed range {start}..{end}", index
            )
        if start != expected:
            return _no(
                "locked_non_contiguous", f"locked stage {index} must start at layer {expected}, not {start}", index
            )
        if end > layers:
            return _no("locked_incomplete", f"locked stage {index} ends at layer {end}; the model has {layers}", index)
        if node_id in seen:
            return _no(
                "locked_duplicate_node", f"locked stage {index}: {node_id} already holds a stage", index, node=node_id
            )
        if node_id in instance.excluded:
            return _no(
                "locked_excluded_node", f"locked stage {index}: {node_id} is out ({instance.excluded[node_id]})", index
            )
        if end - start > instance.span_limit(nodes[node_id]):
            return _no(
                "locked_max_layers",
                f"locked stage {index}: {node_id} may hold {nodes[node_id].max_layers} layers",
                index,
            )
        if end in instance.forbidden:
            reason = next(cut.reason for cut in instance.problem.model.forbidden_boundaries if cut.layer == end)
            return _no("locked_forbidden_boundary", f"no cut may fall before layer {end}: {reason}", index, layer=end)
        seen.add(node_id)
        expected = end
    if expected != layers:
        return _no("locked_incomplete", f"the lock ends at layer {expected}; the model has {layers} layers")
    return None


def _does_not_fit(instance: Instance, shape: Shape, locked: LockedTopology, resolved: tuple[str, ...]) -> PlanRefused:
    memory = instance.memory(shape)
    short = {
        node_id: memory.required(stage.layer_start, stage.layer_end) - instance.usable[node_id]
        for stage, node_id in zip(locked.stages, resolved, strict=True)
    }
    short = {node_id: missing for node_id, missing in short.items() if missing > 0}
    worst = max(short, key=lambda node_id: (short[node_id], node_id))
    return _no(
        "locked_does_not_fit",
        f"the lock does not fit at context {shape.context_length} with {shape.lanes} lanes: "
        f"{worst} lacks {short[worst]} bytes",
        context_length=shape.context_length,
        missing_bytes=short,
    )


def _no(code: str, message: str, stage: int | None = None, **details: object) -> PlanRefused:
    return PlanRefused(code, message, details if stage is None else {"stage_index": stage, **details})
