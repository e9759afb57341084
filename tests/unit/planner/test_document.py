import copy
import json

import pytest

from coordinator.planner.document import PlanDocumentError, plan_document, plan_from_document, refusal_document
from tests.unit.planner.builders import GB, both, model, node, placed, problem, refused


def sample() -> dict:
    nodes = [node("mac-a", 9 * GB, cached_bytes=GB, missing_bytes=4 * GB), node("mac-c", 5 * GB)]
    return plan_document(placed(problem(nodes, both("mac-a", "mac-c", 2_000))))


def test_the_document_has_the_keys_of_the_interface_and_no_others() -> None:
    document = sample()
    assert list(document) == [
        "plan_id", "schema_version", "model", "participant_set_hash", "context_length", "parallel_lanes", "objective",
        "calibration", "placement", "stages", "hops", "boundaries", "modeled", "target", "search", "diagnostics",
    ]  # fmt: skip
    assert list(document["stages"][0]) == [
        "stage_index", "node_id", "layer_start", "layer_end", "roles", "parameter_bytes", "required_bytes",
        "usable_bytes", "stage_us", "reason_codes",
    ]  # fmt: skip
    assert list(document["hops"][0]) == ["source", "target", "kind", "rtt_us", "transfer_us", "hop_us", "basis"]
    assert list(document["boundaries"][0]) == ["layer", "decision", "wire_bytes_per_token", "reason_codes"]
    assert list(document["modeled"]) == [
        "decode_tpot_us", "network_us_per_token", "pipelined_period_us", "ttft_us", "tokens_per_s",
    ]  # fmt: skip
    assert document["target"] == {"decode_tpot_ms": 33, "met": False}
    assert list(document["search"]) == ["proven_optimal", "gap", "expanded", "elapsed_ms"]
    assert document["schema_version"] == 1


def test_a_plan_survives_the_round_trip_through_json() -> None:
    for question in (
        problem([node("a", 6 * GB), node("b", 6 * GB)], both("a", "b")),
        problem([node("a", bandwidth=None)], target_decode_tpot_us=33_333),
    ):
        found = placed(question)
        assert plan_from_document(json.loads(json.dumps(plan_document(found)))) == found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("stages", 0, "layer_start"), 1),
        (("stages", 0, "node_id"), "mac-c"),
        (("stages", 0, "layer_end"), "5"),
        (("stages", 0, "roles"), ["captain"]),
        (("stages", 1, "stage_index"), 5),
        (("model", "layer_count"), 11),
        (("hops", 0, "basis"), "guessed"),
        (("search", "gap"), float("nan")),
        (("plan_id",), "0123456789abcdef"),
        (("surprise",), 1),
        (("stages",), []),
        (("target", "decode_tpot_ms"), 0),
        (("target", "decode_tpot_ms"), 1e300),
        (("model", "layer_count"), 2**53),
        (("stages", 1, "layer_end"), 2**53),
        (("stages", 0, "required_bytes"), 2**54),
        (("stages", 0, "stage_us"), -1),
        (("stages", 0, "stage_us"), 10**400),
        (("hops", 0, "rtt_us"), 2**60),
        (("hops", 0, "hop_us"), -5),
        (("modeled", "decode_tpot_us"), 2**60),
        (("modeled", "ttft_us"), -1),
        (("modeled", "tokens_per_s"), float("inf")),
        (("modeled", "tokens_per_s"), -1.0),
        (("search", "gap"), -0.5),
        (("context_length",), 2**40),
        (("parallel_lanes",), 2**40),
        (("parallel_lanes",), True),
        (("boundaries", 0, "layer"), 2**53),
    ],
)
def test_a_changed_document_is_refused(path: tuple, value: object) -> None:
    document = copy.deepcopy(sample())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(PlanDocumentError, match="not a plan document"):
        plan_from_document(document)


def test_roles_follow_the_position() -> None:
    nodes = [node(name, 9 * GB // 2) for name in "abc"]
    edges = [*both("a", "b"), *both("b", "c"), *both("a", "c")]
    roles = [stage["roles"] for stage in plan_document(placed(problem(nodes, edges)))["stages"]]
    assert roles == [["driver", "embedding"], ["intermediate"], ["readout"]]
    assert placed(problem([node("a")])).stages[0].roles == ("driver", "embedding", "readout")


def test_diagnostics_use_the_given_words() -> None:
    lines = [str(line) for line in plan_from_document(sample()).diagnostics]
    first = sample()["stages"][0]["node_id"]
    second = sample()["stages"][1]["node_id"]
    assert f"[info] pipeline edge {first} -> {second} after stage-0 has measured rtt 2 ms" in lines
    assert (
        f"[info] artifact cold-start plan: cached={GB} bytes, missing={4 * GB} bytes, peer-transfer-eligible=0 bytes, "
        f"remote-download-fallback={4 * GB} bytes" in lines
    )


def test_cached_and_missing_bytes_are_capped_to_the_stage_and_split_by_where_they_come_from() -> None:
    nodes = [
        node("a", 11 * GB // 2, cached_bytes=99 * GB, missing_bytes=GB, artifact_transfer=True),
        node("b", 11 * GB // 2, missing_bytes=99 * GB),
    ]
    found = placed(problem(nodes, both("a", "b")))
    line = next(line for line in found.diagnostics if line.code == "artifact_cold_start")
    assert line.message == (
        f"artifact cold-start plan: cached={5 * GB} bytes, missing={6 * GB} bytes, peer-transfer-eligible={GB} bytes, "
        f"remote-download-fallback={5 * GB} bytes"
    )


def test_fractions_of_a_millisecond_are_written_without_rounding() -> None:
    found = placed(problem([node("a", 6 * GB), node("b", 6 * GB)], both("a", "b", 350)))
    assert any(line.message.endswith("has measured rtt 0.35 ms") for line in found.diagnostics)


def test_a_refusal_carries_code_message_and_details() -> None:
    document = refusal_document(refused(problem([node("a")], target_decode_tpot_us=1, policy="must_meet_target")))
    assert set(document) == {"error"}
    assert set(document["error"]) == {"code", "message", "details"}
    assert document["error"]["details"]["best_effort"]["stages"][0]["node_id"] == "a"
    json.dumps(document)


def test_model_assumptions_are_repeated_in_the_plan() -> None:
    from dataclasses import replace

    package = replace(model(), diagnostics=("layer_weights_uniform_fallback",))
    found = placed(problem([node("a")], package=package))
    assert found.diagnostics[0].code == "layer_weights_uniform_fallback"
    assert found.diagnostics[0].severity == "warning"
