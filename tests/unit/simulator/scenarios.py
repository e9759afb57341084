"""Small scenario texts and how tests read them."""

from collections.abc import Mapping
from pathlib import Path

from coordinator.model.package import ModelPackage
from coordinator.planner.problem import Calibration
from coordinator.simulator.scenario import Scenario, parse_scenario
from protocol.errors import ModelError

CORPUS = Path(__file__).parents[2] / "scenarios" / "corpus"

PAIR = """\
[nodes.alpha]
vram_bytes = 20000000000
runtime_headroom_bytes = 0
sustained_mem_bandwidth_mib_per_s = 400000
[nodes.beta]
vram_bytes = 20000000000
runtime_headroom_bytes = 0
sustained_mem_bandwidth_mib_per_s = 200000

[links."alpha -> beta"]
rtt_ms = 2.5
large_frame_mib_per_s = 30
[links."beta -> alpha"]
rtt_ms = 4

[model]
layer_count = 30
weight_bytes_per_layer = 1000000000
kv_bytes_per_token = 1000
native_context_length = 4096
activation_frame_bytes = 8192
"""

SINGLE = """\
[nodes.alpha]
vram_bytes = 80000000000
sustained_mem_bandwidth_mib_per_s = 400000
[model]
layer_count = 4
weight_bytes_per_layer = 1000000000
kv_bytes_per_token = 1000
native_context_length = 4096
"""


def no_model(path: str, _cache_type: str) -> ModelPackage:
    """Opens nothing."""
    raise ModelError(f"{path}: no such file")


def read(text: str, profiles: Mapping[str, Calibration] | None = None) -> Scenario:
    """Parse ``text`` as the file ``mesh.toml``."""
    return parse_scenario("mesh.toml", text, profiles=profiles or {"skippy": Calibration()}, open_model=no_model)
