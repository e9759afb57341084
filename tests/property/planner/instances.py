"""Small random problems that reach into every corner of the cost model, for comparison with the oracle."""

from random import Random

from coordinator.model.package import ForbiddenBoundary, Layer, ModelPackage
from coordinator.planner.problem import Calibration, Edge, Participant, PlanningProblem, PlanRequest

MIB = 2**20


def small_problem(rng: Random, *, most_nodes: int = 6, most_layers: int = 12) -> PlanningProblem:
    """A random problem; about four in five are feasible."""
    count, layers = rng.randint(1, most_nodes), rng.randint(1, most_layers)
    if count >= 5:
        layers = min(layers, 9 if count == 5 else 8)
    native = rng.choice([2_048, 65_536, 131_072, 262_144])
    model = _model(rng, layers, native)
    names = [f"n{index}" for index in range(count)]
    rng.shuffle(names)
    weight = sum(layer.weight_bytes for layer in model.layers)
    objective = rng.choice(["interactive", "interactive", "throughput"])
    request = PlanRequest(
        objective=objective,
        target_decode_tpot_us=rng.choice([5_000, 33_000, 60_000, 200_000]),
        concurrency=rng.choice([1, 2, 3, 4, 8]),
        minimum_nodes=rng.choice([1, 1, 1, 1, 2, 3]),
        context_length=rng.choice([None, None, native, 1_024]),
        parallel_lanes=rng.choice([None, None, 1, 2, 4]),
        kv_cache=rng.choice(["per_lane", "per_lane", "unified"]),
        direct_prediction_return=rng.choice(["allow_fallback", "require"]),
        prefer=rng.choice(["speed", "speed", "context"]),
        objective_tolerance_milli=rng.choice([0, 20, 20, 100]),
        pin_stage0=rng.choice([None, None, None, rng.choice(names)]),
        require_nodes=frozenset(rng.sample(names, 1)) if rng.random() < 0.15 else frozenset(),
        exclude_nodes=frozenset(rng.sample(names, 1)) if count > 1 and rng.random() < 0.1 else frozenset(),
    )
    return PlanningProblem(
        model,
        tuple(_participant(rng, name, weight, layers) for name in names),
        _edges(rng, names),
        _calibration(rng),
        request,
    )


def _model(rng: Random, layers: int, native: int) -> ModelPackage:
    equal = rng.random() < 0.4
    size = rng.randint(50, 400) * MIB
    moe = rng.random() < 0.3
    rows = []
    for _ in range(layers):
        weight = size if equal else int(size * rng.uniform(0.3, 2.0))
        rows.append(
            Layer(
                weight_bytes=weight,
                streamed_bytes=weight // 3 if moe else weight,
                kv_bytes_per_token=rng.choice([256, 1_024, 2_048]) if not equal else 1_024,
                kv_window_tokens=rng.choice([None, None, 1_024]),
                recurrent_bytes_per_sequence=rng.choice([0, 0, 5 * MIB]),
            )
        )
    cuts = [cut for cut in range(1, layers) if rng.random() < 0.15]
    return ModelPackage(
        "small",
        "a" * 64,
        tuple(rows),
        rng.choice([0, size // 2]),
        rng.choice([0, size]),
        native,
        rng.choice([4_096, 8_192, 100_000]),
        forbidden_boundaries=tuple(ForbiddenBoundary(cut, "shared_kv") for cut in cuts),
        required_sideband_bytes=rng.choice([0, 0, 64]),
    )


def _participant(rng: Random, name: str, weight: int, layers: int) -> Participant:
    memory = int(weight * rng.choice([0.2, 0.4, 0.5, 0.7, 1.0, 1.6, 3.0]))
    return Participant(
        name,
        memory,
        operator_cap_bytes=rng.choice([None, None, int(memory * 0.8)]),
        runtime_headroom_bytes=rng.choice([None, 0, 10 * MIB]),
        memory_bandwidth_bytes_per_s=rng.choice([20, 60, 100, 100, 400, 900]) * 10**9,
        compute_flops_per_s=rng.choice([None, 50 * 10**9, 10**13]),
        observed_decode_us_per_layer=rng.choice([None, None, 900, 9_000]),
        observed_decode_samples=rng.choice([4, 20]),
        observed_decode_age_us=rng.choice([0, 130_000_000]),
        coordinator_rtt_us=rng.choice([None, 1_000, 1_000, 7_000]),
        max_layers=rng.choice([None, None, None, max(1, layers // 2)]),
    )


def _edges(rng: Random, names: list[str]) -> tuple[Edge, ...]:
    uniform = rng.random() < 0.2
    density = rng.choice([1.0, 0.8, 0.4])
    return tuple(
        Edge(
            a,
            b,
            2_000 if uniform else rng.choice([None, 200, 2_000, 2_501, 9_000, 30_001]),
            large_frame_bytes_per_s=None if uniform else rng.choice([None, 10**6, 10**8]),
            direct_prediction_return_supported=rng.random() < 0.8,
        )
        for a in names
        for b in names
        if a != b and rng.random() < density
    )


def _calibration(rng: Random) -> Calibration:
    return Calibration(
        per_layer_us=rng.choice([0, 30]),
        per_stage_us=rng.choice([0, 300, 1_300]),
        per_hop_us=rng.choice([0, 100, 2_000, 13_000]),
        rtt_multiplier_milli=rng.choice([1_000, 1_000, 1_850]),
        return_bytes=rng.choice([None, 0, 500_000]),
        bandwidth_efficiency_milli=rng.choice([1_000, 730]),
        kv_touch_us=rng.choice([0, 50]),
        topology=rng.choice(["chain", "chain", "star"]),
    )
