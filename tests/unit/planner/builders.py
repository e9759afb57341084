"""Short ways to state a problem."""

from coordinator.model.package import ForbiddenBoundary, Layer, ModelPackage
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.planning import plan
from coordinator.planner.problem import Calibration, Edge, Participant, PlanningProblem, PlanRequest

GB = 10**9
MIB = 2**20
GIB = 2**30


def model(
    layers: int = 10,
    weight: int = GB,
    *,
    kv: int = 100,
    native: int = 4_096,
    frame: int = 8_192,
    first: int = 0,
    last: int = 0,
    forbidden: tuple[int, ...] = (),
    sideband: int = 0,
) -> ModelPackage:
    return ModelPackage(
        "toy",
        "0" * 64,
        tuple(Layer(weight, weight, kv) for _ in range(layers)),
        first,
        last,
        native,
        frame,
        forbidden_boundaries=tuple(ForbiddenBoundary(cut, "shared_kv_region") for cut in forbidden),
        required_sideband_bytes=sideband,
    )


def node(name: str, memory: int = 20 * GB, bandwidth: int | None = 100 * GB, **other: object) -> Participant:
    return Participant(name, memory, runtime_headroom_bytes=0, memory_bandwidth_bytes_per_s=bandwidth, **other)  # type: ignore[arg-type]


def link(a: str, b: str, rtt_us: int | None = 1_000, **other: object) -> Edge:
    return Edge(a, b, rtt_us, **other)  # type: ignore[arg-type]


def both(a: str, b: str, rtt_us: int = 1_000) -> tuple[Edge, Edge]:
    return link(a, b, rtt_us), link(b, a, rtt_us)


def problem(
    nodes: list[Participant],
    edges: list[Edge] | tuple[Edge, ...] = (),
    *,
    package: ModelPackage | None = None,
    calibration: Calibration | None = None,
    **request: object,
) -> PlanningProblem:
    return PlanningProblem(
        package or model(),
        tuple(nodes),
        tuple(edges),
        calibration or Calibration(),
        PlanRequest(**request),  # type: ignore[arg-type]
    )


def placed(question: PlanningProblem) -> Plan:
    found = plan(question)
    assert isinstance(found, Plan), found
    return found


def refused(question: PlanningProblem) -> PlanRefused:
    found = plan(question)
    assert isinstance(found, PlanRefused), found
    return found


def layout(found: Plan) -> list[tuple[str, int, int]]:
    return [(stage.node_id, stage.layer_start, stage.layer_end) for stage in found.stages]
