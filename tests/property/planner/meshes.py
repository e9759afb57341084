"""Seeded, realistic meshes for measurements: devices and links as people own them, models of 62–94 layers."""

from random import Random

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.problem import Calibration, Edge, Participant, PlanningProblem, PlanRequest

GB = 10**9
DEVICES = [  # (memory GB, memory bandwidth GB/s), from laptops to workstations
    (8, 100), (16, 68), (16, 120), (16, 200), (24, 273), (24, 936), (24, 1008), (32, 400), (36, 150), (48, 273),
    (64, 400), (64, 546), (96, 800), (128, 256), (12, 360), (8, 288), (32, 1790), (128, 819),
]  # fmt: skip
LINKS = [(300, 1_000), (1_000, 110), (2_000, 110), (3_000, 40), (6_000, 25), (12_000, 12), (25_000, 8)]
"""(RTT µs, MB/s): cable, wired, Wi-Fi, metro, WAN."""


def mesh(
    seed: int,
    nodes: int,
    *,
    layers: int | None = None,
    stages: float = 3.0,
    calibration: Calibration | None = None,
    request: PlanRequest | None = None,
    degree: int | None = None,
) -> PlanningProblem:
    """A mesh whose model needs about ``stages`` typical nodes. ``degree`` limits the links per node (large fleets)."""
    rng = Random(seed)
    count = layers or rng.choice([62, 64, 80, 94])
    picked = [rng.choice(DEVICES) for _ in range(nodes)]
    site = [rng.randrange(3) for _ in range(nodes)]
    participants = tuple(
        Participant(
            node_id=f"node-{index:04d}",
            detected_memory_bytes=memory * GB,
            memory_bandwidth_bytes_per_s=int(bandwidth * GB * rng.uniform(0.7, 0.95)),
            coordinator_rtt_us=rng.choice(LINKS)[0] if index else 0,
        )
        for index, (memory, bandwidth) in enumerate(picked)
    )
    edges = []
    for a in range(nodes):
        peers = [b for b in range(nodes) if b != a]
        if degree is not None:
            peers = sorted(rng.sample(peers, degree))
        for b in peers:
            near = site[a] == site[b]
            rtt, rate = rng.choice(LINKS[:4] if near else LINKS[3:])
            edges.append(
                Edge(
                    f"node-{a:04d}",
                    f"node-{b:04d}",
                    int(rtt * rng.uniform(0.8, 1.3)),
                    large_frame_bytes_per_s=rate * 10**6,
                )
            )
    usable = sorted((memory * GB * 9 // 10 for memory, _ in picked), reverse=True)
    middle = usable[: max(1, nodes // 2)]
    room = int(sum(middle) / len(middle) * stages * rng.uniform(0.75, 1.0))
    room = min(room, sum(usable) * 8 // 10)
    weight = room // count
    moe = rng.random() < 0.4
    package = []
    for _ in range(count):
        size = int(weight * rng.uniform(0.8, 1.1))
        package.append(Layer(size, size * 3 // 10 if moe else size, rng.choice([1024, 2048, 4096])))
    model = ModelPackage(
        name=f"mesh-{seed}",
        digest=f"{seed:064x}",
        layers=tuple(package),
        shared_first_bytes=weight // 2,
        shared_last_bytes=weight // 2,
        native_context_length=rng.choice([32_768, 131_072, 262_144]),
        activation_frame_bytes=rng.choice([8_192, 16_384]),
    )
    return PlanningProblem(
        model,
        participants,
        tuple(edges),
        calibration or Calibration(),
        request or PlanRequest(context_length=16_384, parallel_lanes=1),
    )
