"""A split model whose first shard holds no tensors, as people meet it: inspect, plan, and what a node says it holds."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stage_agent.artifacts.inventory import missing_weight_bytes, model_facts
from stage_agent.cli import inspect, planning
from stage_agent.library import ModelLibrary
from tests.fixtures_model import gguf_bytes, metadata, tensors
from tests.unit.model.test_gguf_shards import split_set

WHOLE = tensors(4)
WEIGHT_BYTES = sum(spec.nbytes for spec in WHOLE)
SCENARIO = """
[nodes.alpha]
vram_bytes = {memory}
runtime_headroom_bytes = 0
[nodes.beta]
vram_bytes = {memory}
runtime_headroom_bytes = 0
[links."alpha -> beta"]
rtt_ms = 1
[links."beta -> alpha"]
rtt_ms = 1
[model]
path = "{path}"
[workload]
minimum_nodes = 2
context_length = 64
parallel_lanes = 1
"""


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"tiny-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for path, content in zip(paths, split_set([], WHOLE[:5], WHOLE[5:]), strict=True):
        path.write_bytes(content)
    return paths


def run(*arguments: str):
    app = typer.Typer()
    app.callback()(lambda: None)
    inspect.register(app)
    planning.register(app)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_inspect_shows_the_whole_model_whichever_shard_is_named(shards, tmp_path):
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(gguf_bytes(metadata(), WHOLE))
    expected = json.loads(run("inspect", str(whole), "--json").stdout)
    for shard in shards:
        document = json.loads(run("inspect", str(shard), "--json").stdout)
        assert document["weight_bytes"] == WEIGHT_BYTES > 0
        assert document["layers"] == expected["layers"]
    assert "16,640 B" in run("inspect", str(shards[0])).stdout, "bytes of a layer"


def test_a_plan_places_every_byte_of_it_and_no_stage_is_empty(shards, tmp_path):
    scenario = tmp_path / "two.toml"
    scenario.write_text(SCENARIO.format(memory=WEIGHT_BYTES * 3, path=shards[0]))
    result = run("plan", "--scenario", str(scenario), "--json")
    assert result.exit_code == 0, result.output
    stages = json.loads(result.stdout)["stages"]
    assert len(stages) == 2
    assert sum(stage["parameter_bytes"] for stage in stages) == WEIGHT_BYTES
    assert all(stage["parameter_bytes"] > 0 for stage in stages)


def test_a_node_that_has_the_shards_says_that_it_holds_all_of_it(shards):
    library = ModelLibrary(activation_value_bytes=2)
    model = library.open(str(shards[0]))
    library.hold(model)
    missing = {digest: missing_weight_bytes(path) for digest, path in library.local_paths().items()}
    (fact,) = model_facts("peers", library.packages(), missing, ())
    assert (fact.cached_bytes, fact.missing_bytes) == (WEIGHT_BYTES, 0)
