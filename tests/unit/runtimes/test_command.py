"""The engine's command line, rendered."""

from pathlib import Path

from stage_agent.runtimes.command import engine_environment, placeholder_values, render
from tests.unit.runtimes.stages import EPOCH, assignments

VALUES = placeholder_values(
    assignments([(0, 2), (2, 5)])[1], EPOCH, Path("/models/x y.gguf"), {"previous": "a:1", "driver": "a:1"}, 21_060
)


def test_every_placeholder_is_replaced_wherever_it_stands_in_an_argument() -> None:
    command = ("engine", "--layers={layer_start}-{layer_end}/{layer_count}", "{model}", "[{next}]", "{port}")
    assert render(command, VALUES) == ["engine", "--layers=2-5/3", "/models/x y.gguf", "[]", "21060"]


def test_a_value_is_never_taken_for_a_placeholder_and_never_becomes_two_arguments() -> None:
    values = {**VALUES, "model": "/models/{port} --evil"}
    assert render(("{model}",), values) == ["/models/{port} --evil"]


def test_doubled_braces_and_foreign_braces_are_passed_on() -> None:
    assert render(("{{port}}", '{"a": {"b": 1}}', "{}", "{UPPER}"), VALUES) == [
        *("{port}", '{"a": {"b": 1}}', "{}", "{UPPER}"),
    ]


def test_the_environment_is_the_agents_without_its_own_secrets_and_with_the_additions_on_top() -> None:
    inherited = {
        "PATH": "/bin",
        "HOME": "/root",
        "STAGEMESH_API__TOKEN_FILE": "x",
        "WATCHDOG_USEC": "1",
        "LISTEN_FDS": "1",
    }
    assert engine_environment(inherited, {"HOME": "/engine"}) == {"PATH": "/bin", "HOME": "/engine"}
