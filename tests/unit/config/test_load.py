"""File < environment < flags, and every mistake as one line that says where and what to do."""

import os
from pathlib import Path

import pytest

from config.load import calibration_text, load, load_settings, origin
from config.settings import LARGEST_NUMBER, Settings
from protocol.errors import ConfigurationError, StagemeshError


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "stagemesh.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(written(tmp_path, text), environment={})
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(tmp_path / "stagemesh.toml") in sentence
    return sentence


def test_no_source_at_all_gives_the_defaults(tmp_path):
    assert load_settings(None, environment={"HOME": str(tmp_path)}) == Settings()


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(tmp_path):
    path = written(tmp_path, "[api]\nport = 1\nhost = '127.0.0.2'\n[listen]\nport = 1\n[log]\nlevel = 'debug'\n")
    environment = {"STAGEMESH_API__PORT": "2", "STAGEMESH_LISTEN__PORT": "2"}
    loaded = load(path, {"api.port": 3, "listen.host": None}, environment)
    settings = loaded.settings
    assert (settings.api.port, settings.listen.port, settings.log.level, settings.api.host) == (
        3,
        2,
        "debug",
        "127.0.0.2",
    )
    assert loaded.origins == {
        "api.port": "--port",
        "listen.port": "STAGEMESH_LISTEN__PORT",
        "log.level": f"{path}:7",
        "api.host": f"{path}:3",
    }


def test_the_origin_of_every_knob_is_known_and_defaults_are_called_so(tmp_path):
    known = origin(load(written(tmp_path, "node.name = 'a'\n"), environment={}))
    assert known.pop("node.name") == f"{tmp_path / 'stagemesh.toml'}:1"
    assert set(known.values()) == {"default"}
    assert len(known) > 80


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[api]\n\nprot = 1\n", (":3", "api.prot", "'port'")),
        ("[nod]\nname = 'x'\n", (":2", "unknown section 'nod'", "'node'")),
        ("[node]\nport = 1\n", (":2", "node.port", "listen.port")),
        ("[nothing]\n", (":1", "unknown section 'nothing'")),
        ("[api]\nport = 65536\n", (":2", "api.port is 65536", "at most 65535")),
        ("[api]\nport = -1\n", ("api.port is -1", "at least 0")),
        ("[api]\nport = '80'\n", ("api.port is '80'", "a whole number")),
        ("[api]\nport = 80.0\n", ("api.port is 80.0", "a whole number")),
        ("[api]\nport = true\n", ("api.port is True", "a whole number")),
        ("[planner]\ntarget_decode_tpot_ms = inf\n", ("target_decode_tpot_ms is inf", "finite number")),
        ("[planner]\ntarget_decode_tpot_ms = 0\n", ("target_decode_tpot_ms is 0", "more than 0")),
        ("[planner]\nperformance_aware = 1\n", ("performance_aware is 1", "true or false")),
        ("[log]\nlevel = 'loud'\n", ("log.level is 'loud'", "debug, info, warning, error")),
        ("[node]\nname = 5\n", ("node.name is 5", "text in quotes")),
        ("[listen]\nadvertise = 'a:1'\n", ("listen.advertise is 'a:1'", "a list of texts")),
        (f"[node]\nname = '{'x' * 65}'\n", ("node.name", "at most 64 characters")),
        (f"[quic]\nkeepalive_us = {2**60}\n", ("quic.keepalive_us", f"at most {LARGEST_NUMBER}")),
        ("node = 5\n", (":1", "node must be a table", "[node]")),
        ("[api]\nport = 1\nport = 2\n", ("not valid TOML", "line 3")),
        ("[api\n", ("not valid TOML", "line 1")),
        (f"x = {'[' * 20_000}\n", ("nested too deeply",)),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", ("not text in UTF-8",)),
        (b"a = 1\n" * 200_000, ("larger than",)),
        ("[api]\nport = 99999\n[log]\nlevel = 'x'\n", ("api.port", "(and 1 more)")),
        ("[api]\n'po\\u001brt' = 1\n", ("api.po",)),
    ],
)
def test_a_broken_file_is_one_line_with_place_key_and_rule(tmp_path, text, expected):
    sentence = refusal(tmp_path, text)
    for part in expected:
        assert part in sentence


def test_a_mistake_never_carries_control_characters_to_the_terminal(tmp_path):
    sentence = refusal(tmp_path, '[api]\n"po\\u001b[31mrt" = 1\n')
    assert sentence.isprintable()


def test_an_empty_file_and_one_with_a_byte_order_mark_are_fine(tmp_path):
    assert load(written(tmp_path, ""), environment={}).settings == Settings()
    assert load(written(tmp_path, b"\xef\xbb\xbf[api]\nport = 5\n"), environment={}).settings.api.port == 5


def test_a_named_file_must_exist_and_be_a_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no such file.*--config"):
        load(tmp_path / "absent.toml", environment={})
    with pytest.raises(ConfigurationError, match="is a directory"):
        load(tmp_path, environment={})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        load(tmp_path / "pipe", environment={})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(Path("nul\0byte"), environment={})


def test_the_users_file_is_found_when_none_is_named(tmp_path):
    folder = tmp_path / "stagemesh"
    folder.mkdir()
    (folder / "stagemesh.toml").write_text("[node]\nname = 'mine'\n")
    loaded = load(environment={"XDG_CONFIG_HOME": str(tmp_path)})
    assert loaded.settings.node.name == "mine"
    assert loaded.file == folder / "stagemesh.toml"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("STAGEMESH_LISTEN__ADVERTISE", "a:1, b:2", ("a:1", "b:2")),
        ("STAGEMESH_LISTEN__ADVERTISE", '["a:1"]', ("a:1",)),
        ("STAGEMESH_LISTEN__ADVERTISE", "a:1", ("a:1",)),
        ("STAGEMESH_NODE__NAME", "17", "17"),
        ("STAGEMESH_LOG__LEVEL", "debug", "debug"),
        ("STAGEMESH_NODE__MEMORY_CAP_BYTES", "1_000", 1000),
        ("STAGEMESH_NODE__CAN_COORDINATE", "false", False),
        ("STAGEMESH_PLANNER__TARGET_DECODE_TPOT_MS", "20", 20.0),
    ],
)
def test_text_of_the_environment_is_read_as_the_knob_wants_it(variable, text, value):
    section, key = variable.removeprefix("STAGEMESH_").lower().split("__")
    settings = load_settings(environment={variable: text})
    assert getattr(getattr(settings, section), key) == value


def test_an_empty_variable_and_a_foreign_one_are_not_ours():
    environment = {"STAGEMESH_API__PORT": "", "STAGEMESH_PORT": "tcp://10.0.0.1:80", "OTHER__X": "1"}
    assert load_settings(environment=environment) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("STAGEMESH_API__PROT", "1", "did you mean 'port'"),
        ("STAGEMESH_APPI__PORT", "1", "did you mean 'api'"),
        ("STAGEMESH_API__PORT", "eighty", "a whole number"),
        ("STAGEMESH_API__PORT", "1\nx = 2", "a whole number"),
    ],
)
def test_a_wrong_variable_is_named(variable, text, expected):
    with pytest.raises(ConfigurationError, match=expected) as caught:
        load(environment={variable: text})
    assert str(caught.value).startswith(variable)


def test_a_wrong_flag_is_named_as_the_flag():
    with pytest.raises(ConfigurationError, match=r"^--port: api.port is 70000"):
        load(overrides={"api.port": "70000"}, environment={})


def test_configuration_errors_are_usage_errors_of_the_one_tree():
    assert issubclass(ConfigurationError, StagemeshError)
    assert ConfigurationError.exit_code == 2


def test_an_unknown_engine_profile_is_named():
    with pytest.raises(ConfigurationError, match="'nosuch' does not exist"):
        calibration_text("nosuch")
    with pytest.raises(ConfigurationError, match="does not exist"):
        calibration_text("../settings")
