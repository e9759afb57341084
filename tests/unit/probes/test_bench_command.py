"""``stagemesh bench`` as a person and a program see it."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stage_agent.cli.bench import register


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setenv("STAGEMESH_NODE__CACHE_DIR", str(tmp_path))
    application = typer.Typer()
    register(application)
    return application


def test_json_is_one_document_with_figures_and_their_conditions(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--json", "--seconds", "0.5"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["devices"][0]["kind"] == "cpu"
    assert document["devices"][0]["memory_bandwidth_bytes_per_s"] > 0
    assert document["conditions"]["buffer_bytes"] > 0
    assert {"memory_source", "detected_memory_bytes", "notes"} <= document.keys()


def test_people_get_a_table_with_units(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--seconds", "0.5"])
    assert result.exit_code == 0, result.output
    assert "GB/s" in result.stdout
    assert "GFLOP/s" in result.stdout
    assert "measured" in result.stdout
