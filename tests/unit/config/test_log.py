"""One line per event: JSON for machines, readable for people, never a secret, never a terminal escape."""

import io
import json
import logging

import pytest
import structlog

from config.log import MAX_VALUE_CHARACTERS, set_up_logging, wants_json
from config.settings import LogSettings


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def logging_as_before():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(settings, speak, *, stream=None, environment=None):
    stream = stream or io.StringIO()
    set_up_logging(settings, stream, environment or {})
    speak(structlog.get_logger())
    return stream.getvalue().splitlines()


JSON = LogSettings(format="json")
CONSOLE = LogSettings(format="console")


def test_an_event_is_one_json_line_with_name_level_and_fields():
    (line,) = lines(JSON, lambda log: log.info("peer_admitted", peer="alpha", rtt_us=12))
    document = json.loads(line)
    assert document.pop("timestamp").endswith("Z")
    assert document == {"event": "peer_admitted", "level": "info", "peer": "alpha", "rtt_us": 12}


def test_json_is_chosen_for_the_journal_and_for_pipes_and_colour_for_terminals():
    auto = LogSettings()
    assert wants_json(auto, io.StringIO(), {})
    assert wants_json(auto, Terminal(), {"JOURNAL_STREAM": "8:1"})
    assert not wants_json(auto, Terminal(), {})
    assert not wants_json(CONSOLE, io.StringIO(), {})


def test_no_color_is_respected_on_a_terminal():
    def speak(log):
        log.warning("plan_refused", slot="default")

    assert any("\x1b[" in line for line in lines(LogSettings(), speak, stream=Terminal()))
    plain = lines(LogSettings(), speak, stream=Terminal(), environment={"NO_COLOR": "1"})
    assert plain
    assert not any("\x1b" in line for line in plain)


@pytest.mark.parametrize("settings", [JSON, CONSOLE])
def test_secrets_are_redacted_by_key_and_inside_text(settings):
    token = "sm1_" + "A" * 40

    def speak(log):
        log.info(
            "join_tried",
            token="hunter2hunter2",
            api_token="hunter2",
            nested={"secret": "hunter2", "list": [f"x {token}"]},
            header="Authorization: Bearer hunter2hunter2",
            text=f"joined with {token}",
        )
        logging.getLogger("library").error("failed with %s", token)

    text = "\n".join(lines(settings, speak))
    assert "hunter2" not in text
    assert "AAAA" not in text
    assert text.count("[redacted]") >= 6


def test_a_peers_name_cannot_drive_the_terminal():
    text = "\n".join(lines(CONSOLE, lambda log: log.info("peer_seen", name="a\x1b[2J\x07b")))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[2J" in text


def test_libraries_speak_in_the_same_lines_from_warning_on():
    def speak(_log):
        logging.getLogger("uvicorn.error").info("started")
        logging.getLogger("uvicorn.error").warning("port %d", 5)

    (line,) = lines(JSON, speak)
    document = json.loads(line)
    assert (document["event"], document["logger"], document["level"]) == ("port 5", "uvicorn.error", "warning")


def test_the_level_filters_and_can_be_changed_while_running():
    stream = io.StringIO()
    log = structlog.get_logger()
    set_up_logging(LogSettings(format="json", level="warning"), stream, {})
    log.info("hidden")
    set_up_logging(LogSettings(format="json", level="debug"), stream, {})
    log.debug("shown")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["shown"]


def test_a_traceback_stays_inside_its_json_line_and_shows_no_local_values():
    def speak(log):
        password = "hunter2"  # the value must not be shown with the frame
        try:
            int("broken")
        except ValueError:
            log.exception("stage_failed", length=len(password))

    (line,) = lines(JSON, speak)
    assert "ValueError: invalid literal" in json.loads(line)["exception"]
    shown = "\n".join(lines(CONSOLE, speak))
    assert "ValueError: invalid literal" in shown
    assert "hunter2" not in shown


def test_a_value_of_any_type_and_length_is_one_bounded_line():
    (line,) = lines(JSON, lambda log: log.info("frame", raw=b"\x00\xff", text="x" * 100_000, path=io))
    assert len(line) < 2 * MAX_VALUE_CHARACTERS
    assert "(100000 characters)" in line
