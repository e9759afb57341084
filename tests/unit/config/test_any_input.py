"""Whatever a file or the environment holds: settings, or one printable line."""

import json
import tempfile
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from config.load import load
from config.settings import Settings
from protocol.errors import ConfigurationError

KEYS = [(section, key) for section, field in Settings.model_fields.items() for key in field.annotation.model_fields]
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=80),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=20), st.dictionaries(st.sampled_from("abc"), SCALARS))


def outcome(raw: bytes, environment: dict[str, str]) -> Settings | str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stagemesh.toml"
        path.write_bytes(raw)
        try:
            return load(path, environment=environment).settings
        except ConfigurationError as error:
            return str(error)


def judged(raw: bytes, environment: dict[str, str]) -> None:
    answer = outcome(raw, environment)
    if isinstance(answer, str):
        assert answer.isprintable()
        assert len(answer) < 1_000
    else:
        assert Settings.model_validate(answer.model_dump()) == answer


@given(st.binary(max_size=300))
@example(b"\x00")
@example(b"[[api]]\nport = 1\n")
@example(b"api = 2026-01-01\n")
@example(b"[api]\nport = 2026-01-01T00:00:00Z\n")
@example(b"[api.port.x]\n")
@example(b'"" = 1\n')
@example(b'[""]\n"" = 1\n')
def test_any_bytes_are_settings_or_one_line(raw):
    judged(raw, {})


@given(st.sampled_from(KEYS), VALUES)
def test_any_value_of_any_knob_is_settings_or_one_line(name, value):
    section, key = name
    shown = (
        "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}" if isinstance(value, dict) else toml(value)
    )
    judged(f"[{section}]\n{key} = {shown}\n".encode(), {})


@given(st.sampled_from(KEYS), st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=80))
@example(("listen", "advertise"), "[" * 5_000)
def test_any_text_of_a_variable_is_settings_or_one_line(name, text):
    section, key = name
    judged(b"", {f"STAGEMESH_{section}__{key}".upper(): text})


def toml(value) -> str:
    """JSON of scalars and lists is TOML, but for the float syntax of large exponents."""
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in value)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
