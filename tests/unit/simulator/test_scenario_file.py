import pytest

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import Calibration, PlanningProblem
from coordinator.simulator.hardware import Device, Hardware
from coordinator.simulator.scenario import Scenario, ScenarioError, parse_scenario
from coordinator.simulator.scenario_events import ColdStart, LinkChange, NodeDown, NodeUp, Straggler
from tests.unit.simulator.scenarios import PAIR, SINGLE, no_model, read


def problem_of(scenario: Scenario) -> PlanningProblem:
    assert isinstance(scenario.problem, PlanningProblem)
    return scenario.problem


def test_units_are_converted_once_with_times_up_and_rates_down() -> None:
    text = PAIR.replace("= 400000", "= 953").replace("rtt_ms = 2.5", "rtt_ms = 0.0001")
    problem = problem_of(read(text))
    assert problem.participants[0].memory_bandwidth_bytes_per_s == 953 * 1_048_576
    assert problem.edges[0].rtt_us == 1
    assert problem.edges[0].large_frame_bytes_per_s == 30 * 1_048_576
    assert problem.edges[1].rtt_us == 4_000


def test_compute_is_read_in_gflops() -> None:
    text = PAIR.replace("[nodes.beta]", "sustained_compute_gflop_per_s = 34000.5\n[nodes.beta]")
    assert problem_of(read(text)).participants[0].compute_flops_per_s == 34_000_500_000_000


def test_a_nodes_own_latency_is_its_smallest_link_and_absent_without_links() -> None:
    assert [node.coordinator_rtt_us for node in problem_of(read(PAIR)).participants] == [2_500, 2_500]
    assert problem_of(read(SINGLE)).participants[0].coordinator_rtt_us is None


def test_the_total_cache_is_shared_out_rounded_up_and_a_list_is_taken_as_it_is() -> None:
    assert {layer.kv_bytes_per_token for layer in problem_of(read(PAIR)).model.layers} == {34}
    listed = SINGLE.replace("kv_bytes_per_token = 1000", "kv_bytes_per_token = [1, 2, 3, 4]")
    assert [layer.kv_bytes_per_token for layer in problem_of(read(listed)).model.layers] == [1, 2, 3, 4]


def test_a_mixture_of_experts_streams_its_active_fraction() -> None:
    text = PAIR.replace("layer_count = 30", "layer_count = 30\nactive_weight_fraction = 0.34")
    assert problem_of(read(text)).model.layers[0].streamed_bytes == 340_000_000


def test_the_frame_defaults_to_the_activation_width_in_f16() -> None:
    text = PAIR.replace("activation_frame_bytes = 8192", "activation_width = 4096")
    assert problem_of(read(text)).model.activation_frame_bytes == 8_192


def test_profile_values_are_used_and_single_values_override_them() -> None:
    profiles = {"skippy": Calibration(), "star": Calibration("star", per_hop_us=7, topology="star")}
    chosen = problem_of(read(PAIR + '[calibration]\nprofile = "star"\n', profiles)).calibration
    assert (chosen.name, chosen.per_hop_us, chosen.topology) == ("star", 7, "star")
    text = PAIR + '[calibration]\nprofile = "star"\nper_hop_overhead_ms = 2.0001\nrtt_multiplier = 1.5\n'
    changed = problem_of(read(text, profiles)).calibration
    assert (changed.name, changed.per_hop_us, changed.rtt_multiplier_milli) == ("star+custom", 2_001, 1_500)


def test_overheads_may_stand_under_model() -> None:
    text = PAIR.replace("layer_count = 30", "layer_count = 30\nper_stage_overhead_ms = 2\nper_hop_overhead_ms = 1")
    calibration = problem_of(read(text)).calibration
    assert (calibration.per_stage_us, calibration.per_hop_us) == (2_000, 1_000)


def test_a_model_named_by_path_is_opened_by_the_caller() -> None:
    package = ModelPackage("tiny", "0" * 64, (Layer(10, 10, 1),) * 3, 0, 0, 512, 8)
    text = (
        SINGLE[: SINGLE.index("[model]")] + '[model]\npath = "tiny.gguf"\nkv_cache = "unified"\ncache_type = "q8_0"\n'
    )
    opened: list[tuple[str, str]] = []

    def open_model(path: str, cache_type: str) -> ModelPackage:
        opened.append((path, cache_type))
        return package

    scenario = parse_scenario("mesh.toml", text, profiles={}, open_model=open_model)
    assert opened == [("tiny.gguf", "q8_0")]
    assert problem_of(scenario).model is package
    assert problem_of(scenario).request.kv_cache == "unified"


def test_a_device_prior_stands_in_for_a_missing_bandwidth_and_is_marked() -> None:
    card = Device("RTX 3090", "rtx", 936_000_000_000, 850, 30, shared_memory=False)
    text = SINGLE.replace("sustained_mem_bandwidth_mib_per_s = 400000", 'device = "NVIDIA GeForce RTX 3090 24GB"')
    scenario = parse_scenario("m", text, profiles={}, open_model=no_model, hardware=Hardware((card,)))
    node = problem_of(scenario).participants[0]
    assert node.bandwidth_source == "spec"
    # 4 GB at 85 % of 936 GB/s and 4 layers of 30 µs
    assert 4_000_000_000 * 1_000_000 // node.memory_bandwidth_bytes_per_s == pytest.approx(5_148, abs=1)  # type: ignore[operator]


def test_a_solo_run_gives_the_speed_it_had_and_corrects_the_priors_of_other_devices() -> None:
    big = Device("M4 Max", "apple", 546_000_000_000, 850, 119, shared_memory=True)
    small = Device("M4", "apple", 120_000_000_000, 850, 123, shared_memory=True)
    text = (
        PAIR.replace("sustained_mem_bandwidth_mib_per_s = 400000", 'device = "M4 Max"\nsolo_tok_s = 20')
        .replace("sustained_mem_bandwidth_mib_per_s = 200000", 'device = "M4"')
        .replace("layer_count = 30", "layer_count = 30\nactive_weight_fraction = 0.1")
    )  # 3 GB a token; 50 ms less the 1.3 ms that the profile adds for a stage
    scenario = parse_scenario("m", text, profiles={}, open_model=no_model, hardware=Hardware((big, small)))
    alpha, beta = problem_of(scenario).participants
    assert (alpha.bandwidth_source, beta.bandwidth_source) == ("measured", "spec")
    assert alpha.memory_bandwidth_bytes_per_s == 3_000_000_000 * 1_000_000 // 48_700
    assert beta.memory_bandwidth_bytes_per_s == alpha.memory_bandwidth_bytes_per_s * 120 // 546


def test_events_are_read_in_time_order() -> None:
    text = (
        PAIR
        + """
[[events]]
at_s = 9
kind = "node_up"
target = "beta"
[[events]]
at_s = 1.5
kind = "link"
target = "alpha -> beta"
rtt_ms = 60
[[events]]
at_s = 2
kind = "node_down"
target = "beta"
[[events]]
at_s = 3
kind = "straggler"
target = "alpha"
factor = 2.5
[[events]]
at_s = 4
kind = "cold_start"
target = "alpha"
load_s = 7
"""
    )
    assert read(text).events == (
        LinkChange(1_500_000, "alpha", "beta", 60_000, None),
        NodeDown(2_000_000, "beta"),
        Straggler(3_000_000, "alpha", 2_500),
        ColdStart(4_000_000, "alpha", 7_000_000),
        NodeUp(9_000_000, "beta"),
    )


@pytest.mark.parametrize(
    ("gone", "code"),
    [
        ("layer_count = 4", "missing_layers"),
        ("weight_bytes_per_layer = 1000000000", "missing_weights"),
        ("kv_bytes_per_token = 1000", "missing_kv"),
        ("native_context_length = 4096", "missing_native_context"),
    ],
)
def test_a_withheld_memory_fact_is_the_planners_refusal_not_an_error(gone: str, code: str) -> None:
    refused = read(SINGLE.replace(gone, "")).problem
    assert isinstance(refused, PlanRefused)
    assert refused.code == code


def test_a_scenario_without_nodes_is_refused() -> None:
    refused = read(SINGLE[SINGLE.index("[model]") :]).problem
    assert isinstance(refused, PlanRefused)
    assert refused.code == "missing_nodes"


def test_zero_lanes_and_too_long_contexts_pass_through_for_the_planner_to_refuse() -> None:
    request = problem_of(read(SINGLE + "[workload]\nparallel_lanes = 0\ncontext_length = 9999999\n")).request
    assert (request.parallel_lanes, request.context_length) == (0, 9_999_999)


LOCKED = """[locked]
stages = [
    { node = "alpha", layer_start = 0, layer_end = 20 },
    { node = "beta", layer_start = 20, layer_end = 30 },
]
"""


@pytest.mark.parametrize(
    ("before", "after", "line", "key", "words"),
    [
        ("rtt_ms = 4", "rtt_mss = 4", 14, 'links."beta -> alpha".rtt_mss', 'did you mean "rtt_ms"'),
        ("rtt_ms = 4", "rtt_ms = nan", 14, 'links."beta -> alpha".rtt_ms', "finite"),
        ("rtt_ms = 4", "rtt_ms = inf", 14, 'links."beta -> alpha".rtt_ms', "finite"),
        ("rtt_ms = 4", "rtt_ms = -1", 14, 'links."beta -> alpha".rtt_ms', "allowed is 0"),
        ("rtt_ms = 4", 'rtt_ms = "4"', 14, 'links."beta -> alpha".rtt_ms', "needs a number"),
        ("rtt_ms = 4", "large_frame_mib_per_s = 0", 14, 'links."beta -> alpha".large_frame_mib_per_s', "leave it out"),
        ('[links."beta -> alpha"]', '[links."beta->alpha"]', 13, 'links."beta->alpha"', "exactly"),
        ('[links."beta -> alpha"]', '[links."beta  ->  alpha"]', 13, 'links."beta  ->  alpha"', "exactly"),
        ('[links."beta -> alpha"]', '[links."beta -> gamma"]', 13, 'links."beta -> gamma"', "not a node"),
        ('[links."beta -> alpha"]', '[links."beta -> beta"]', 13, 'links."beta -> beta"', "two different"),
        ('[links."beta -> alpha"]', '["beta -> alpha"]', 13, '"beta -> alpha"', "belongs under"),
        ("[nodes.beta]", '[nodes."two words"]', 5, 'nodes."two words"', "one word"),
        ("vram_bytes = 20000000000\n", "vram_bytes = 1e400\n", 2, "nodes.alpha.vram_bytes", "allowed is 0"),
        ("vram_bytes = 20000000000\n", "vram_bytes = 9007199254740993\n", 2, "nodes.alpha.vram_bytes", "allowed is 0"),
        ("vram_bytes = 20000000000\n", "vram_bytes = 1.5\n", 2, "nodes.alpha.vram_bytes", "whole"),
        ("vram_bytes = 20000000000\n", "vram_bytes = true\n", 2, "nodes.alpha.vram_bytes", "needs a number"),
        ("= 400000", "= 400000\nsolo_tok_s = 20", 5, "nodes.alpha.solo_tok_s", "cannot be combined"),
        ("[nodes.beta]", "solo_tok_s = 0\n[nodes.beta]", 5, "nodes.alpha.solo_tok_s", "allowed is 0.000001"),
        ("= 400000", "= 0", 4, "nodes.alpha.sustained_mem_bandwidth_mib_per_s", "leave it out"),
        ("layer_count = 30", "layer_count = 30\nlayer_weight_bytes = [1]", 18, "model.layer_weight_bytes", "combined"),
        (
            "layer_count = 30",
            "layer_count = 30\nactive_weight_fraction = 1.01",
            18,
            "model.active_weight_fraction",
            "0 to 1",
        ),
        ("layer_count = 30", 'layer_count = 30\npath = "x.gguf"', 17, "model.layer_count", "combined with path"),
        (
            "layer_count = 30",
            "layer_count = 30\nforbidden_boundaries = [30]",
            18,
            "model.forbidden_boundaries",
            "1 … 29",
        ),
        ("layer_end = 20", "layer_end = 19", 25, "locked.stages[1].layer_start", "on no node"),
        ("layer_start = 20", "layer_start = 19", 25, "locked.stages[1].layer_start", "overlaps"),
        ("layer_end = 30", "layer_end = 29", 25, "locked.stages[1].layer_end", "30 layers"),
        (
            "layer_start = 20, layer_end = 30",
            "layer_start = 20, layer_end = 20",
            25,
            "locked.stages[1].layer_end",
            "half-open",
        ),
        ('node = "beta"', 'node = "gamma"', 25, "locked.stages[1].node", "not a node"),
        ('node = "beta"', 'node = "alpha"', 25, "locked.stages[1].node", "already"),
        ("[model]", "[workload]\nobjective = 'fast'\n[model]", 17, "workload.objective", "interactive"),
        ("[model]", "[workload]\nstage0_node = 'x'\n[model]", 17, "workload.stage0_node", "not a node"),
        ("[model]", "[workload]\narrivals = 'poisson'\n[model]", 16, "workload.rate_per_s", "required"),
        ("[model]", "[calibration]\nprofile = 'nope'\n[model]", 17, "calibration.profile", "skippy"),
        (
            "[model]",
            "[[events]]\nat_s = 1\nkind = 'node_down'\ntarget = 'x'\n[model]",
            19,
            "events[0].target",
            "not a node",
        ),
        ("[model]", "[[events]]\nat_s = 1\nkind = 'quake'\ntarget = 'x'\n[model]", 18, "events[0].kind", "cold_start"),
        ("[model]", "[expect]\nunused = ['x']\n[model]", 17, "expect.unused", "not a node"),
        ("[model]", "[modell]\na = 1\n[model]", 16, "modell", 'did you mean "model"'),
        (
            "rtt_ms = 4",
            "quality = 4",
            14,
            'links."beta -> alpha".quality',
            "known here: direct_prediction_return_supported",
        ),
        ("[model]", "[[calibration]]\n[model]", 16, "calibration", "needs a table, got a list"),
        ("layer_count = 30", "layer_count = 513", 17, "model.layer_count", "allowed is 0 to 512"),
        ("layer_count = 30", "layer_count = 30\nactivation_width = 0", 18, "model.activation_width", "allowed is 1"),
        (
            "layer_count = 30",
            "layer_count = 30\nactive_weight_fraction = 0",
            18,
            "model.active_weight_fraction",
            "is 0",
        ),
        (
            "layer_count = 30",
            "layer_count = 30\nrecurrent_bytes_per_sequence = 0.5",
            18,
            "model.recurrent_bytes_per_sequence",
            "whole",
        ),
        (
            "[nodes.beta]",
            "observed_decode_us_per_layer = 0\n[nodes.beta]",
            5,
            "nodes.alpha.observed_decode_us_per_layer",
            "1",
        ),
        ("[nodes.beta]", '[nodes."\\u001b[31m"]', 5, r'nodes."\x1b[31m"', "one word"),
        ("[model]", '[model]\nname = "a\\u001b[2J"', 17, "model.name", r"\x1b"),
        ("[model]", "[workload]\nparallel_lanes = 4097\n[model]", 17, "workload.parallel_lanes", "0 to 4096"),
        ("[model]", "[workload]\nstage0_node = ''\n[model]", 17, "workload.stage0_node", "not a node"),
        (
            "[model]",
            '[model]\ncache_type = "q8_0"',
            17,
            "model.cache_type",
            "needs path; without a file kv_bytes_per_token",
        ),
        ("[model]", '[model]\npath = "m.gguf"\ncache_type = "q9"', 18, "model.cache_type", "q8_0"),
    ],
)
def test_a_mistake_names_file_line_and_key(before: str, after: str, line: int, key: str, words: str) -> None:
    text = PAIR + LOCKED
    assert before in text
    with pytest.raises(ScenarioError) as caught:
        read(text.replace(before, after, 1))
    error = caught.value
    assert (error.source, error.line, error.key) == ("mesh.toml", line, key)
    assert words in str(error)
    assert error.exit_code == 2


def test_a_list_names_the_entry_that_is_wrong() -> None:
    listed = SINGLE.replace("kv_bytes_per_token = 1000", "kv_bytes_per_token = [1, 2, 2.5, 4]")
    with pytest.raises(ScenarioError, match=r"model\.kv_bytes_per_token\[2\]: needs a whole number, got 2\.5"):
        read(listed)


def test_a_missing_cache_is_refused_without_advice_that_would_be_refused_again() -> None:
    refused = read(SINGLE.replace("kv_bytes_per_token = 1000", "")).problem
    assert isinstance(refused, PlanRefused)
    assert "recurrent_bytes_per_sequence" in refused.message


def test_an_error_shows_no_terminal_codes() -> None:
    with pytest.raises(ScenarioError) as caught:
        read('"\\u001b[31mred" = 1\n')
    assert str(caught.value).isprintable()


def test_broken_toml_names_the_line() -> None:
    with pytest.raises(ScenarioError, match=r"mesh.toml:2: not valid TOML"):
        read("[nodes]\nalpha = = 3\n")


def test_overheads_in_two_places_are_refused() -> None:
    text = PAIR.replace("layer_count = 30", "layer_count = 30\nper_hop_overhead_ms = 1")
    with pytest.raises(ScenarioError, match="say it once"):
        read(text + "[calibration]\nper_hop_overhead_ms = 2\n")


def test_nested_brackets_and_huge_numbers_end_in_the_typed_error() -> None:
    with pytest.raises(ScenarioError):
        read("a = " + "[" * 50_000)
    with pytest.raises(ScenarioError):
        read("a = " + "9" * 50_000)
    with pytest.raises(ScenarioError, match="larger than"):
        read("#" * 5_000_000)
