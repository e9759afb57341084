"""The command ``inspect``: one document for programs, one look for people."""

import json

import pytest
import typer
from typer.testing import CliRunner

from protocol.errors import ConfigurationError, ModelError
from stage_agent.cli import inspect
from tests.fixtures_model import TensorSpec, gguf_bytes, metadata, tensors


@pytest.fixture
def run(tmp_path):
    app = typer.Typer()
    app.callback()(lambda: None)
    inspect.register(app)

    def run_on(content, *arguments):
        path = tmp_path / "tiny.gguf"
        path.write_bytes(content)
        return CliRunner().invoke(app, ["inspect", str(path), *arguments], env={"COLUMNS": "120"})

    return run_on


PLAIN = gguf_bytes(metadata(), tensors(4, rows=[10, 10, 20, 10]))


def test_json_is_one_document_with_every_field(run):
    result = run(PLAIN, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["layers"][2] == {
        "weight_bytes": 20 * 256 + 256, "streamed_bytes": 20 * 256 + 256, "kv_bytes_per_token": 128,
        "kv_window_tokens": None, "recurrent_bytes_per_sequence": 0,
    }  # fmt: skip
    assert document["weight_bytes"] == sum(spec.nbytes for spec in tensors(4, rows=[10, 10, 20, 10]))
    assert set(document) == {
        "name", "digest", "architecture", "layer_count", "layers", "shared_first_bytes", "shared_last_bytes",
        "kv_bytes_per_token", "native_context_length", "activation_width", "activation_frame_bytes",
        "required_sideband_bytes", "active_weight_fraction", "forbidden_boundaries", "tied_embeddings", "weight_bytes",
        "diagnostics",
    }  # fmt: skip
    assert (document["layer_count"], document["active_weight_fraction"]) == (4, 1.0)


def test_the_cache_type_is_an_option(run):
    assert json.loads(run(PLAIN, "--json", "--cache-type", "f32").stdout)["kv_bytes_per_token"] == 4 * 256
    assert isinstance(run(PLAIN, "--cache-type", "q9").exception, ConfigurationError)


def test_the_table_puts_equal_layers_together(run):
    result = run(PLAIN)
    assert result.exit_code == 0
    assert "0–1, 3" in result.stdout
    assert "2,816 B" in result.stdout
    assert "5,376 B" in result.stdout
    assert "4,096 tokens" in result.stdout
    assert "window" not in result.stdout
    assert "state" not in result.stdout


def test_the_table_shows_windows_state_experts_and_forbidden_cuts_when_there_are_any(run):
    facts = metadata(
        "gemma4",
        4,
        attention__sliding_window=128,
        attention__sliding_window_pattern=[True, False, True, False],
        attention__shared_kv_layers=2,
        expert_count=4,
        expert_used_count=1,
    )
    result = run(gguf_bytes(facts, tensors(4, per_layer=[TensorSpec("ffn_up_exps.weight", (64, 8, 4))])))
    for words in ["window", "128", "full", "read per token", "of the layers read per token", "no cut before layer 1–3"]:
        assert words in result.stdout


def test_a_diagnostic_is_explained(run):
    result = run(gguf_bytes(metadata(), tensors(3)))
    assert "layer_weights_uniform_fallback: layer indices have gaps" in result.stdout


def test_a_name_cannot_paint_the_terminal(run):
    result = run(gguf_bytes({**metadata(), "general.name": "evil\x1b[31m[bold]name"}, tensors(4)))
    assert "\x1b" not in result.stdout
    assert "evil?[31m[bold]name" in result.stdout


def test_a_broken_model_is_one_line(run):
    result = run(b"no model", "--json")
    assert isinstance(result.exception, ModelError)
    assert result.stdout == ""


def test_every_diagnostic_a_reader_may_give_has_words():
    import re
    from pathlib import Path

    import coordinator.model as room

    sources = "".join(path.read_text() for path in Path(room.__file__).parent.glob("*.py"))
    codes = set(re.findall(r'"((?:\w+_)+(?:fallback|missing|unknown|assumed|ignored|streamed|absent))"', sources))
    assert len(codes) >= 9
    assert codes == set(inspect._DIAGNOSTICS)
