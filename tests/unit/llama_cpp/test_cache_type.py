"""One setting decides how much cache the plan counts and in which type the engine keeps it."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from config.cache_types import CacheType
from config.load import load
from config.settings import AssignmentSettings, ModelSettings, RuntimeSettings
from coordinator.assignment.assignments import assignments_of
from coordinator.assignment.running import adopt
from coordinator.model.exchange import package_from_document, package_to_document
from coordinator.planner.document import plan_document, plan_from_document
from coordinator.planner.plan import Plan
from protocol.ballots import Promise, StageAssignment
from protocol.errors import ConfigurationError
from protocol.fencing import epoch_to_wire
from protocol.ids import Slot
from stage_agent.library import ModelLibrary
from stage_agent.runtimes.llama_cpp.command import head_command
from stage_agent.runtimes.llama_cpp.devices import DeviceLayers
from tests.fixtures_model import gguf_bytes, metadata, tensors
from tests.unit.coordination.builders import DIGEST, SLOT, ballot, member, serving, view
from tests.unit.planner.builders import GB, node, placed, problem
from tests.unit.stage.builders import agent, assignment
from tests.unit.stage.builders import serve as serve_stage

CONTEXT, LANES = 64, 2


def planned(tmp_path: Path, cache_type: CacheType) -> Plan:
    """A plan of one node as a coordinator makes it that got the model from another one, which has the setting."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata(), tensors(4)))
    library = ModelLibrary(cache_type=ModelSettings(cache_type=cache_type).cache_type)
    package = package_from_document(package_to_document(library.open(str(tmp_path / "m.gguf")).package))
    return placed(problem([node("a", GB)], package=package, context_length=CONTEXT, parallel_lanes=LANES))


def assigned(plan: Plan) -> StageAssignment:
    at = ballot(3)
    promise = Promise(ballot=epoch_to_wire(at), slot="s", instance="1" * 32)
    told = assignments_of(
        plan,
        slot=Slot("s"),
        source="/m",
        ballot=at,
        promises={"a": promise},
        running=None,
        settings=AssignmentSettings(),
    )
    (only,) = told.values()
    return only


def command(work: StageAssignment, **settings: object) -> list[str]:
    return head_command(
        RuntimeSettings(kind="llama_cpp", **settings), work, model=Path("m.gguf"), port=1, key_file=Path("k"),
        endpoints=["127.0.0.1:2"], devices=[DeviceLayers("RPC0", 4)], cpu_layers=0, output_on_head="",
    )  # fmt: skip


def last(arguments: list[str], flag: str) -> str:
    """What holds: llama-server takes the last of a flag that is there twice."""
    position = len(arguments) - 1 - arguments[::-1].index(flag)
    return arguments[position + 1]


def cache_bytes(plan: Plan) -> int:
    (stage,) = plan.stages
    return stage.required_bytes - stage.parameter_bytes


def test_counted_memory_and_the_engine_s_cache_move_together(tmp_path) -> None:
    plans = {kind: planned(tmp_path, kind) for kind in ("f32", "f16", "q8_0")}
    for kind, plan in plans.items():
        arguments = command(assigned(plan))
        assert (last(arguments, "-ctk"), last(arguments, "-ctv")) == (kind, kind)
    # 4, 2 and 34/32 bytes a value, plus the planner's reserve, which is rounded up per layer.
    half = cache_bytes(plans["f16"])
    assert cache_bytes(plans["f32"]) == pytest.approx(2 * half, abs=8)
    assert cache_bytes(plans["q8_0"]) == pytest.approx(half * 34 / 64, abs=8)
    assert len({plan.plan_hash for plan in plans.values()}) == 3


def test_a_new_coordinator_learns_the_cache_type_of_what_runs_from_the_rows() -> None:
    at = ballot(3)
    rows = view(member("a", stages=(serving(at, 0, 8, cache_type="q8_0"),)))
    found = adopt(rows, SLOT, model_digest=DIGEST, layer_count=8, now_us=0)
    assert found is not None
    assert found.cache_type == "q8_0"
    made = agent()
    serve_stage(made, at, assignment(cache_type="q8_0"))
    assert made.facts(0)[0].cache_type == "q8_0"


@pytest.mark.parametrize(("kind", "needs"), [("q4_0", True), ("q8_0", True), ("f16", False), ("f32", False)])
def test_a_quantised_cache_turns_flash_attention_on_even_against_the_operator_s_arguments(kind, needs) -> None:
    arguments = command(assignment(cache_type=kind), llama_arguments=("-fa", "off"))
    assert last(arguments, "-fa") == ("on" if needs else "off")
    assert ("-fa" in command(assignment(cache_type=kind))) == needs


@pytest.mark.parametrize("flag", ["-ctk", "-ctv", "--cache-type-k", "--cache-type-v=q8_0"])
def test_the_engine_s_own_flag_is_refused_in_one_line_that_names_the_setting(flag, tmp_path) -> None:
    file = tmp_path / "stagemesh.toml"
    file.write_text(f'[runtime]\nkind = "llama_cpp"\nllama_arguments = ["-fa", "on", "{flag}", "q8_0"]\n')
    with pytest.raises(ConfigurationError, match=r"set model\.cache_type instead") as caught:
        load(file, environment={})
    assert "\n" not in str(caught.value)
    assert "llama_arguments" in str(caught.value)


def test_a_type_that_no_engine_keeps_a_cache_in_is_refused() -> None:
    with pytest.raises(ValidationError, match="cache_type"):
        ModelSettings(cache_type="q2_k")


def test_a_plan_file_keeps_the_cache_type_and_one_without_it_means_f16(tmp_path) -> None:
    quantised, plain = planned(tmp_path, "q8_0"), planned(tmp_path, "f16")
    assert plan_from_document(plan_document(quantised)) == quantised
    assert "cache_type" not in plan_document(plain)
    assert plan_from_document(plan_document(plain)).cache_type == "f16"
