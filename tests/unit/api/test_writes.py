"""Commands over HTTP: validated, bounded, and refused with the node's own words."""

import json

import httpx
import pytest

from stage_agent.api import app as app_module
from stage_agent.api.app import MAX_BODY_BYTES, build_app
from stage_agent.api.commands import (
    Drain,
    Exclude,
    ExplainPlan,
    Leave,
    LockedRange,
    LockTopology,
    Pin,
    PreviewPlan,
    Refused,
    Resume,
    ServeModel,
    SetPolicy,
    UnserveModel,
)
from tests.unit.api.pictures import Remembering, ShownMesh, ask
from tests.unit.api.test_reads import problem


@pytest.mark.parametrize(
    ("method", "path", "body", "command", "status"),
    [
        (
            "POST",
            "plan:preview",
            {"model": "m", "context_length": 4096},
            PreviewPlan(model="m", context_length=4096),
            200,
        ),
        (
            "POST",
            "models",
            {"model": "m", "slot": "a", "priority": 2},
            ServeModel(model="m", slot="a", priority=2),
            202,
        ),
        ("DELETE", "models/a", None, UnserveModel(slot="a"), 202),
        ("POST", "drain", {}, Drain(), 202),
        ("POST", "resume", {}, Resume(), 202),
        ("POST", "leave", {}, Leave(), 202),
        ("POST", "pin", {"stage0": "alpha"}, Pin(stage0="alpha"), 202),
        ("POST", "exclude", {"add": ["a", "b"]}, Exclude(add=("a", "b")), 202),
        ("POST", "policy", {"target_decode_tpot_ms": 20}, SetPolicy(target_decode_tpot_ms=20.0), 202),
        (
            "POST",
            "lock",
            {"version": 1, "stages": [{"node": "a", "layer_start": 0, "layer_end": 3}]},
            LockTopology(stages=(LockedRange(node="a", layer_start=0, layer_end=3),)),
            202,
        ),
        ("GET", "plan/explain", None, ExplainPlan(slot="default"), 200),
    ],
)
def test_a_request_becomes_the_command_it_stands_for(method, path, body, command, status):
    sink = Remembering()
    request = {} if body is None else {"json": body}
    answer = ask(build_app(ShownMesh(), sink), method, f"/api/v1/{path}", **request)
    assert (answer.status_code, answer.json()["done"]) == (status, True)
    assert sink.asked == [command]


def test_an_empty_body_is_an_empty_object():
    sink = Remembering()
    answer = ask(build_app(ShownMesh(), sink), "POST", "/api/v1/drain", headers={"content-type": "application/json"})
    assert answer.status_code == 202
    assert sink.asked == [Drain()]


def test_a_refusal_keeps_its_code_message_and_details():
    sink = Remembering(Refused("no_valid_topology", "9 GiB are missing", {"missing_bytes": 9}))
    answer = ask(build_app(ShownMesh(), sink), "POST", "/api/v1/plan:preview", json={})
    assert problem(answer, 409, "no_valid_topology") == "9 GiB are missing"
    assert answer.json()["details"] == {"missing_bytes": 9}


@pytest.mark.parametrize(
    ("path", "body", "pointer"),
    [
        ("models", {}, "/model"),
        ("models", {"model": ""}, "/model"),
        ("models", {"model": "m", "slto": "a"}, "/slto"),
        ("models", {"model": "m", "slot": "a b"}, "/slot"),
        ("models", {"model": "m", "priority": "1"}, "/priority"),
        ("drain", {"now": True}, "/now"),
        ("policy", {"target_decode_tpot_ms": -1}, "/target_decode_tpot_ms"),
        ("lock", {"stages": [{"node": "a", "layer_start": 0}]}, "/stages/0/layer_end"),
        ("lock", {"version": 2}, "/version"),
        ("pin", {"stage0": "a\nb"}, "/stage0"),
    ],
)
def test_a_body_that_is_not_the_command_is_refused_by_pointer_and_changes_nothing(path, body, pointer):
    sink = Remembering()
    answer = ask(build_app(ShownMesh(), sink), "POST", f"/api/v1/{path}", json=body)
    assert problem(answer, 422, "invalid_request").startswith(f"{pointer}: ")
    assert pointer in [error["pointer"] for error in answer.json()["details"]["errors"]]
    assert sink.asked == []


@pytest.mark.parametrize("raw", [b"{", b"[]", b"null", b"\xff\xfe", b'{"target_decode_tpot_ms": NaN}', b"[" * 10_000])
def test_a_body_that_is_no_json_object_is_refused(raw):
    sink = Remembering()
    headers = {"content-type": "application/json"}
    answer = ask(build_app(ShownMesh(), sink), "POST", "/api/v1/policy", content=raw, headers=headers)
    problem(answer, 422, "invalid_request")
    assert sink.asked == []


def test_a_body_over_the_limit_is_refused_while_it_is_read():
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    headers = {"content-type": "application/json"}
    app = build_app(ShownMesh(), Remembering())
    answer = ask(app, "POST", "/api/v1/drain", content=endless(), headers=headers)
    problem(answer, 413, "body_too_large")
    assert sent <= MAX_BODY_BYTES + 2 * 65_536


def test_a_node_that_is_too_busy_says_so(monkeypatch):
    monkeypatch.setattr(app_module, "COMMAND_DEADLINE_S", 0.01)
    answer = ask(build_app(ShownMesh(), Remembering(delay_s=30)), "POST", "/api/v1/drain", json={})
    problem(answer, 504, "node_busy")


def test_a_bug_is_an_internal_error_without_a_traceback():
    class Broken(Remembering):
        async def submit(self, command):
            raise AssertionError(f"private words about {command}")

    answer = ask(build_app(ShownMesh(), Broken()), "POST", "/api/v1/drain", json={})
    problem(answer, 500, "internal_error")
    assert "private words" not in answer.text


def test_a_slot_in_a_path_is_validated_like_in_a_body():
    sink = Remembering()
    answer = ask(build_app(ShownMesh(), sink), "DELETE", "/api/v1/models/a%20b")
    problem(answer, 422, "invalid_request")
    assert sink.asked == []


def test_bodies_may_say_their_character_set():
    headers = {"content-type": "application/json; charset=utf-8"}
    app = build_app(ShownMesh(), Remembering())
    assert isinstance(ask(app, "POST", "/api/v1/drain", content=json.dumps({}), headers=headers), httpx.Response)
    assert ask(app, "POST", "/api/v1/drain", content="{}", headers=headers).status_code == 202
