"""Where logits are made: on the head when a token then costs less, never on a guess."""

import pytest

from config.settings import RuntimeSettings, Settings
from coordinator.planner.memory import parameter_bytes
from coordinator.planner.problem import Calibration
from coordinator.planner.readout import ReadoutSpeeds, as_placed, head_reads_out_cheaper
from protocol.ballots import StageShare
from stage_agent.model_source import open_model
from stage_agent.node import own_calibration
from stage_agent.runtimes.llama_cpp.output_layer import output_on_head
from tests.unit.llama_cpp.stages import gguf_file

GB, GBIT = 10**9, 125_000_000
OUTPUT_BYTES, LOGIT_BYTES = 860_000_000, 513_000
"""Of a 70B model: 8 192 × 128 256 at six bits and a half."""


@pytest.mark.parametrize(
    ("head", "last", "link", "cheaper", "why"),
    [
        (40 * GB, 40 * GB, GBIT, True, "equal machines: the logits' four milliseconds decide"),
        (40 * GB, 1_000 * GB, GBIT, False, "21 ms on the head's main memory, 5 on a card and a gigabit"),
        (40 * GB, 1_000 * GB, GBIT // 100, True, "the same card behind ten megabits"),
        (40 * GB, 40 * GB, None, False, "equal, and nothing is known of the link: memory decides"),
        (None, 40 * GB, GBIT, False, "a guess is not enough"),
        (40 * GB, None, GBIT, False, "a guess is not enough"),
    ],
)
def test_the_cheaper_place_by_memory_and_link(head, last, link, cheaper, why) -> None:
    assert head_reads_out_cheaper(OUTPUT_BYTES, LOGIT_BYTES, ReadoutSpeeds(head, last, link)) is cheaper, why


SLOW_LINK = ReadoutSpeeds(40 * GB, 40 * GB, GBIT)
UNKNOWN = ReadoutSpeeds(None, None, None)
FAST_LAST = ReadoutSpeeds(10**6, 10**12, 10**12)


@pytest.mark.parametrize(
    ("tied", "speeds", "setting", "place"),
    [
        (True, UNKNOWN, "auto", "tied"),
        (True, FAST_LAST, "last", "tied"),
        (False, SLOW_LINK, "auto", "untied"),
        (False, FAST_LAST, "auto", ""),
        (False, UNKNOWN, "auto", ""),
        (False, UNKNOWN, "head", "untied"),
        (False, SLOW_LINK, "last", ""),
    ],
)
def test_a_tied_layer_is_on_the_head_anyway_and_its_own_matrix_moves_when_that_is_cheaper(
    tied, speeds, setting, place, tmp_path
) -> None:
    last = StageShare(node_id="beta", layer_start=0, layer_end=1, parameter_bytes=4_096)
    assert output_on_head(gguf_file(tmp_path / "m.gguf", tied=tied), last, speeds, setting=setting) == place


@pytest.mark.parametrize("setting", ["auto", "head", "last"])
@pytest.mark.parametrize("tied_output", ["head", "last"])
def test_a_tied_layer_is_where_the_plan_has_charged_it_whatever_the_head_is_set_to(
    tied_output, setting, tmp_path
) -> None:
    path = gguf_file(tmp_path / "m.gguf", tied=True)
    star = Calibration(name="llama-cpp-rpc", topology="star", tied_output=tied_output)
    placed = as_placed(open_model(path), star)
    last = StageShare(node_id="beta", layer_start=0, layer_end=1, parameter_bytes=parameter_bytes(placed, 0, 1))
    found = output_on_head(path, last, UNKNOWN, setting=setting)
    assert found == {"head": "tied", "last": ""}[tied_output]


def test_the_coordinators_own_setting_decides_what_its_plans_charge() -> None:
    for kind, setting, expected in (
        ("llama_cpp", "auto", "head"), ("llama_cpp", "last", "last"), ("mapped", "last", "head"),
    ):  # fmt: skip
        runtime = RuntimeSettings(kind=kind, llama_output_layer=setting)
        assert own_calibration(Settings(runtime=runtime)).tied_output == expected


@pytest.mark.parametrize(
    ("engine", "named", "profile", "round_trips_milli"),
    [
        ("llama.cpp 571d0d5 rpc 4.0.3", "", "llama-cpp-rpc", 1_536),
        ("llama.cpp abc rpc 7.0.0", "", "llama-cpp-rpc-7", 1_080),
        ("llama.cpp abc rpc 11.2.0", "", "llama-cpp-rpc-7", 1_080),
        ("llama.cpp abc rpc unknown", "", "llama-cpp-rpc", 1_536),
        ("llama.cpp abc rpc 7.0.0", "llama-cpp-rpc", "llama-cpp-rpc", 1_536),
    ],
)
def test_the_engine_s_own_protocol_says_how_many_round_trips_a_stage_costs_unless_a_profile_is_named(
    engine, named, profile, round_trips_milli
) -> None:
    settings = Settings(runtime=RuntimeSettings(kind="llama_cpp"), planner={"calibration": named})
    found = own_calibration(settings, engine)
    assert (found.name, found.rtt_multiplier_milli, found.topology) == (profile, round_trips_milli, "star")
