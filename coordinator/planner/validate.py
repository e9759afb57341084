"""Is the question well-formed? Values a person or file got wrong raise ``InvalidProblem`` naming the field.

Two kinds of "no" are kept apart. Absurd values (negative, zero where a rate is meant, not a whole number, above 2⁵³,
two nodes of one id, a link to nobody) are faults of the input and raise. Missing required memory facts (layers, weights,
KV, context, nodes) are answers the planner owes its caller and come back as ``PlanRefused``.
"""

from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import Calibration, Edge, Participant, PlanningProblem, PlanRequest
from protocol.errors import StagemeshError

MAX_EXACT = 2**53
"""Largest integer accepted anywhere: the last one that JSON, TOML and doubles all carry exactly."""
MAX_LAYERS = 512
MAX_PARTICIPANTS = 4_096
MAX_LANES = 4_096


class InvalidProblem(StagemeshError):  # noqa: N818 - it names the situation, like the rest of the error tree
    """The planning input is wrong; nothing was planned. ``field`` is the path of the offending value."""

    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def check_problem(problem: PlanningProblem) -> None:
    """Raise ``InvalidProblem`` for the first bad value, in the order of the dataclass fields."""
    _check_model(problem)
    known: set[str] = set()
    if len(problem.participants) > MAX_PARTICIPANTS:
        raise InvalidProblem("participants", f"{len(problem.participants)} nodes; at most {MAX_PARTICIPANTS}")
    for participant in problem.participants:
        where = f"participants[{participant.node_id}]"
        if not participant.node_id:
            raise InvalidProblem("participants", "a node without an id")
        if participant.node_id in known:
            raise InvalidProblem(where, "this id appears twice; ids are unique")
        known.add(participant.node_id)
        _check_participant(where, participant)
    pairs: set[tuple[str, str]] = set()
    for edge in problem.edges:
        _check_edge(edge, known, pairs)
    _check_calibration(problem.calibration)
    _check_request(problem.request)


def missing_facts(problem: PlanningProblem) -> PlanRefused | None:
    """The refusal for the first missing *required* fact, or ``None``. Performance facts are never required."""
    model = problem.model
    if not model.layers:
        return PlanRefused("missing_layers", "the model states no layers; give layer_count or a readable package")
    if sum(layer.weight_bytes for layer in model.layers) == 0:
        return PlanRefused("missing_weights", "the model states no weight bytes; give layer weights")
    if all(layer.kv_bytes_per_token == 0 and layer.recurrent_bytes_per_sequence == 0 for layer in model.layers):
        return PlanRefused("missing_kv", "the model states neither KV bytes per token nor recurrent state")
    if model.native_context_length == 0:
        return PlanRefused("missing_native_context", "the model states no native context length")
    if not problem.participants:
        return PlanRefused("missing_nodes", "there are no nodes to place the model on")
    return None


def whole(field: str, value: object, *, least: int = 0, most: int = MAX_EXACT) -> None:
    """``value`` is an int in ``[least, most]``, else ``InvalidProblem(field)``. NaN, floats and booleans are not ints."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidProblem(field, f"must be a whole number, not {value!r}")
    if value < least:
        raise InvalidProblem(field, f"must be at least {least}, not {value}")
    if value > most:
        raise InvalidProblem(field, f"must be at most {most}, not {value}")


def _optional(field: str, value: object, *, least: int = 0, most: int = MAX_EXACT) -> None:
    if value is not None:
        whole(field, value, least=least, most=most)


def _check_model(problem: PlanningProblem) -> None:
    model = problem.model
    if len(model.layers) > MAX_LAYERS:
        raise InvalidProblem("model.layers", f"{len(model.layers)} layers; at most {MAX_LAYERS}")
    for index, layer in enumerate(model.layers):
        where = f"model.layers[{index}]"
        whole(f"{where}.weight_bytes", layer.weight_bytes)
        whole(f"{where}.streamed_bytes", layer.streamed_bytes)
        whole(f"{where}.kv_bytes_per_token", layer.kv_bytes_per_token)
        _optional(f"{where}.kv_window_tokens", layer.kv_window_tokens)
        whole(f"{where}.recurrent_bytes_per_sequence", layer.recurrent_bytes_per_sequence)
    for name in ("shared_first_bytes", "shared_last_bytes", "native_context_length", "activation_frame_bytes"):
        whole(f"model.{name}", getattr(model, name))
    whole("model.required_sideband_bytes", model.required_sideband_bytes)
    _optional("model.activation_width", model.activation_width, least=1)
    for boundary in model.forbidden_boundaries:
        whole("model.forbidden_boundaries", boundary.layer, least=1, most=max(1, len(model.layers) - 1))


def _check_participant(where: str, node: Participant) -> None:
    whole(f"{where}.detected_memory_bytes", node.detected_memory_bytes)
    for name in ("operator_cap_bytes", "runtime_headroom_bytes", "cached_bytes", "missing_bytes", "coordinator_rtt_us"):
        _optional(f"{where}.{name}", getattr(node, name))
    for name in (
        "memory_bandwidth_bytes_per_s",
        "calibrated_bytes_per_s",
        "compute_flops_per_s",
        "observed_decode_us_per_layer",
        "max_layers",
    ):
        _optional(f"{where}.{name}", getattr(node, name), least=1)
    whole(f"{where}.observed_decode_samples", node.observed_decode_samples)
    whole(f"{where}.observed_decode_age_us", node.observed_decode_age_us)


def _check_edge(edge: Edge, known: set[str], pairs: set[tuple[str, str]]) -> None:
    where = f"edges[{edge.source} -> {edge.target}]"
    for end in (edge.source, edge.target):
        if end not in known:
            raise InvalidProblem(where, f"unknown node {end!r}; links join two nodes of the problem")
    if edge.source == edge.target:
        raise InvalidProblem(where, "a link joins two different nodes")
    if (edge.source, edge.target) in pairs:
        raise InvalidProblem(where, "this directed link appears twice")
    pairs.add((edge.source, edge.target))
    for name in ("rtt_us", "rtt_samples", "rtt_first_age_us", "rtt_last_age_us"):
        _optional(f"{where}.{name}", getattr(edge, name))
    _optional(f"{where}.large_frame_bytes_per_s", edge.large_frame_bytes_per_s, least=1)


def _check_calibration(calibration: Calibration) -> None:
    for name in ("per_layer_us", "per_stage_us", "per_hop_us", "kv_touch_us", "rtt_multiplier_milli"):
        whole(f"calibration.{name}", getattr(calibration, name), most=2**40)
    whole("calibration.bandwidth_efficiency_milli", calibration.bandwidth_efficiency_milli, least=1, most=100_000)
    _optional("calibration.return_bytes", calibration.return_bytes)


def _check_request(request: PlanRequest) -> None:
    whole("request.target_decode_tpot_us", request.target_decode_tpot_us, least=1)
    whole("request.concurrency", request.concurrency, least=1, most=65_536)
    whole("request.prompt_tokens", request.prompt_tokens)
    whole("request.output_tokens", request.output_tokens)
    whole("request.prefill_chunk_tokens", request.prefill_chunk_tokens, least=1)
    whole("request.minimum_nodes", request.minimum_nodes, most=MAX_PARTICIPANTS)
    whole("request.objective_tolerance_milli", request.objective_tolerance_milli, most=10_000)
    whole("request.search_budget_ms", request.search_budget_ms, least=1, most=600_000)
    _optional("request.context_length", request.context_length)
    _optional("request.parallel_lanes", request.parallel_lanes, most=MAX_LANES)
