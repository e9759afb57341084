"""Who may talk to the API: token holders, or this machine and no web page."""

import pytest

from config.settings import ApiSettings
from stage_agent.api.app import build_app
from stage_agent.api.operations import READS, WRITES
from tests.unit.api.pictures import Remembering, ShownMesh, ask
from tests.unit.api.test_reads import problem

TOKEN = "0123456789abcdef0123456789abcdef"
JSON = {"content-type": "application/json"}


def guarded():
    return build_app(ShownMesh(), Remembering(), token=TOKEN, settings=ApiSettings(host="0.0.0.0"))


@pytest.mark.parametrize("operation", [*READS, *WRITES], ids=lambda operation: operation.name)
def test_with_a_token_only_the_probes_answer_without_it(operation):
    path = operation.path.replace("{slot}", "a")
    answer = ask(guarded(), operation.method, path, headers=JSON)
    if operation.path in ("/healthz", "/readyz"):
        assert answer.status_code == 200
    else:
        problem(answer, 401, "token_required")
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "given", ["", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é"]
)
def test_a_wrong_token_is_no_token(given):
    answer = ask(guarded(), "GET", "/metrics", headers={"authorization": given.encode()})
    problem(answer, 401, "token_required")
    assert TOKEN not in answer.text


def test_the_right_token_opens_everything_under_any_host_name():
    headers = {"authorization": f"Bearer {TOKEN}", "host": "gpu-box.lan:7947"}
    assert ask(guarded(), "GET", "/metrics", headers=headers).status_code == 200
    assert ask(guarded(), "POST", "/api/v1/drain", headers={**headers, **JSON}, content="{}").status_code == 202


@pytest.mark.parametrize("host", ["127.0.0.1:7947", "localhost:7947", "LOCALHOST", "[::1]:7947", "192.168.1.5"])
def test_without_a_token_the_machine_itself_may_ask(host):
    app = build_app(ShownMesh(), Remembering())
    assert ask(app, "GET", "/api/v1/status", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7947", "localhost.evil.example", "", "[::1", "127.0.0.1.nip.io"]
)
def test_without_a_token_a_name_that_may_have_been_rebound_is_refused(host):
    app = build_app(ShownMesh(), Remembering())
    problem(ask(app, "GET", "/api/v1/status", headers={"host": host}), 421, "wrong_host")


def test_a_page_of_another_site_cannot_command():
    sink = Remembering()
    app = build_app(ShownMesh(), sink)
    answer = ask(app, "POST", "/api/v1/leave", headers={**JSON, "origin": "https://evil.example"}, content="{}")
    problem(answer, 403, "foreign_origin")
    problem(ask(app, "POST", "/api/v1/leave", content="{}"), 415, "json_required")
    plain = {"content-type": "text/plain"}
    problem(ask(app, "POST", "/api/v1/leave", headers=plain, content="{}"), 415, "json_required")
    problem(ask(app, "DELETE", "/api/v1/models/a", headers={"origin": "null"}), 403, "foreign_origin")
    assert sink.asked == []


def test_the_nodes_own_page_can_command():
    app = build_app(ShownMesh(), Remembering())
    headers = {**JSON, "origin": "http://127.0.0.1:7947"}
    assert ask(app, "POST", "/api/v1/drain", headers=headers, content="{}").status_code == 202
