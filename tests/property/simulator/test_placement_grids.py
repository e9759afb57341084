"""Each signal moves the plan on its own, and no signal leaves the memory-only plan exactly as it was."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import Calibration, Edge, Participant, PlanningProblem, PlanRequest

GB = 10**9


def problem(
    bandwidths: dict[str, int],
    rtts: dict[tuple[str, str], int],
    *,
    rates: dict[tuple[str, str], int] | None = None,
    frame: int = 8_192,
    compute: dict[str, int] | None = None,
    layers: int = 40,
    memory: int = 30 * GB,
    calibration: Calibration | None = None,
    objective: str = "interactive",
) -> PlanningProblem:
    nodes = tuple(
        Participant(name, memory, runtime_headroom_bytes=0, memory_bandwidth_bytes_per_s=rate,
                    compute_flops_per_s=(compute or {}).get(name))
        for name, rate in bandwidths.items()
    )  # fmt: skip
    edges = tuple(Edge(*ends, rtt, large_frame_bytes_per_s=(rates or {}).get(ends)) for ends, rtt in rtts.items())
    model = ModelPackage("m", "0" * 64, (Layer(GB, GB, 64),) * layers, 0, 0, 4_096, frame)
    request = PlanRequest(parallel_lanes=1, objective=objective, concurrency=4 if objective == "throughput" else 1)  # type: ignore[arg-type]
    return PlanningProblem(model, nodes, edges, calibration or Calibration(per_hop_us=500, per_stage_us=300), request)


def placed(asked: PlanningProblem) -> Plan:
    answer = plan(asked)
    assert isinstance(answer, Plan), answer
    return answer


def layers_of(answer: Plan) -> dict[str, int]:
    return {stage.node_id: stage.layer_end - stage.layer_start for stage in answer.stages}


def everywhere(names: str, rtt: int) -> dict[tuple[str, str], int]:
    return {(a, b): rtt for a in names for b in names if a != b}


@pytest.mark.parametrize("rtt", [500, 2_000, 8_000])
@pytest.mark.parametrize("spread", [100, 300, 600])
def test_a_ten_times_slower_link_moves_the_order_or_the_nodes(rtt: int, spread: int) -> None:
    bandwidths = {"a": 500 * GB, "b": (500 - spread // 3) * GB, "c": (500 - spread // 2) * GB}
    plain = placed(problem(bandwidths, everywhere("abc", rtt)))
    first, second = (stage.node_id for stage in plain.stages[:2])
    slow = everywhere("abc", rtt) | {(first, second): rtt * 40, (second, first): rtt * 40}
    moved = placed(problem(bandwidths, slow))
    used = {(hop.source, hop.target) for hop in moved.hops}
    assert (first, second) not in used or layers_of(moved) != layers_of(plain)
    assert [s.node_id for s in moved.stages] != [s.node_id for s in plain.stages] or layers_of(moved) != layers_of(
        plain
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(50, 900), st.integers(0, 10_000), st.sampled_from(("interactive", "throughput")))
def test_a_node_of_half_the_speed_gets_fewer_layers(speed: int, rtt: int, objective: str) -> None:
    layers = layers_of(
        placed(
            problem(
                {"fast": speed * GB, "slow": speed * GB // 2}, everywhere(("fast", "slow"), rtt), objective=objective
            )
        )  # type: ignore[arg-type]
    )
    assert layers["fast"] > layers["slow"]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(8, 60), min_size=2, max_size=5), st.integers(20, 60))
def test_without_signals_the_plan_is_the_memory_only_plan_exactly(memories: list[int], layers: int) -> None:
    model = ModelPackage("m", "0" * 64, (Layer(GB, GB, 64),) * layers, 0, 0, 4_096, 8_192)
    nodes = tuple(Participant(f"n{index}", size * GB) for index, size in enumerate(memories))
    bare = PlanningProblem(model, nodes)
    noisy = replace(
        bare,
        participants=tuple(
            replace(node, memory_bandwidth_bytes_per_s=(index + 1) * 10**11) for index, node in enumerate(nodes)
        ),
        edges=tuple(
            Edge(a.node_id, b.node_id, 1_000 * (i + 1)) for i, a in enumerate(nodes) for b in nodes if a is not b
        ),
        request=replace(bare.request, performance_aware=False),
    )
    ours, theirs = plan(bare), plan(noisy)
    assert type(ours) is type(theirs)
    if isinstance(ours, Plan):
        assert isinstance(theirs, Plan)
        assert (ours.stages, ours.plan_hash, ours.context_length) == (
            theirs.stages,
            theirs.plan_hash,
            theirs.context_length,
        )
        assert ours.placement == theirs.placement == "capacity_only"


def test_bandwidth_alone_moves_the_boundary() -> None:
    links = everywhere("ab", 1_000)
    even = layers_of(placed(problem({"a": 400 * GB, "b": 400 * GB}, links, objective="throughput")))
    uneven = layers_of(placed(problem({"a": 400 * GB, "b": 200 * GB}, links, objective="throughput")))
    assert uneven["a"] > even["a"]


def test_round_trips_alone_choose_the_nodes() -> None:
    bandwidths = dict.fromkeys("abc", 400 * GB)
    near = {**everywhere("abc", 30_000), ("a", "c"): 200, ("c", "a"): 200}
    assert set(layers_of(placed(problem(bandwidths, near)))) == {"a", "c"}
    near = {**everywhere("abc", 30_000), ("b", "c"): 200, ("c", "b"): 200}
    assert set(layers_of(placed(problem(bandwidths, near)))) == {"b", "c"}


def test_activation_size_alone_turns_the_chain_around() -> None:
    links, rates = everywhere("ab", 1_000), {("a", "b"): GB, ("b", "a"): 10**6}
    chain = Calibration(per_hop_us=500, per_stage_us=300, return_bytes=64)
    bandwidths = {"a": 400 * GB, "b": 401 * GB}
    orders = {
        frame: [
            s.node_id for s in placed(problem(bandwidths, links, rates=rates, frame=frame, calibration=chain)).stages
        ]
        for frame in (1, 1_000_000)
    }
    assert orders[1_000_000] == ["a", "b"]
    tiny = placed(problem(bandwidths, links, rates=rates, frame=1, calibration=chain)).modeled.decode_tpot_us
    large = placed(problem(bandwidths, links, rates=rates, frame=1_000_000, calibration=chain)).modeled.decode_tpot_us
    assert tiny is not None
    assert large is not None
    assert large - tiny == pytest.approx(1_000, abs=100)  # the frame over the wide direction, never over the narrow one


def test_compute_alone_moves_layers_away() -> None:
    links = everywhere("ab", 1_000)
    same = {"a": 400 * GB, "b": 400 * GB}
    plain = layers_of(placed(problem(same, links, objective="throughput")))
    weak = layers_of(placed(problem(same, links, compute={"a": 10**14, "b": 2 * 10**11}, objective="throughput")))
    assert weak["b"] < plain["b"]
