"""What the API shows of a snapshot."""

import pytest

from protocol.rows import StageFact
from stage_agent.api.app import build_app
from stage_agent.api.operations import READS, WRITES
from stage_agent.api.snapshot import MemberView, SlotView, StageView
from tests.unit.api.pictures import (
    ALPHA,
    BETA,
    MEMBERS,
    PLAN,
    SERVING,
    SLOT,
    Remembering,
    ShownMesh,
    ask,
    picture,
    shown,
)


def problem(answer, status, code):
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["type"] == f"urn:stagemesh:problem:{code}"
    assert document["title"]
    return document["detail"]


def test_health_says_only_that_the_process_answers():
    assert ask(shown(joined=False), "GET", "/healthz").json() == {"status": "alive"}


def test_a_joined_node_that_serves_what_it_was_assigned_is_ready():
    answer = ask(shown(), "GET", "/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


def test_a_joined_node_without_an_assignment_is_ready():
    assert ask(shown(slots=(), stages=()), "GET", "/readyz").status_code == 200
    elsewhere = SlotView("other", "active", plan={**PLAN, "stages": PLAN["stages"][1:]})
    assert ask(shown(slots=(elsewhere,), stages=()), "GET", "/readyz").status_code == 200


def fact(**changes):
    return (StageView(ALPHA, "alpha", StageFact(**{**SERVING.model_dump(), **changes})),)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"joined": False, "status_text": "waiting for alpha"}, "waiting for alpha"),
        ({"joined": False}, "not joined"),
        ({"draining": True}, "draining"),
        ({"stages": ()}, "assigned but not begun"),
        ({"stages": fact(state="loading")}, "is loading, assigned to serve"),
        ({"stages": fact(layer_end=26)}, "other layers"),
        ({"stages": fact(state="failed", detail="no memory")}, "failed: no memory"),
    ],
)
def test_a_node_that_is_not_as_assigned_says_why_with_503(changes, reason):
    assert reason in problem(ask(shown(**changes), "GET", "/readyz"), 503, "not_ready")


def test_the_readiness_of_others_does_not_count():
    others = (StageView(BETA, "beta", StageFact(slot="default", state="failed")), *fact())
    assert ask(shown(stages=others), "GET", "/readyz").status_code == 200


def test_status_tells_node_coordinator_and_slots():
    document = ask(shown(), "GET", "/api/v1/status").json()
    assert document["node"]["uptime_us"] == 60_000_000
    assert document["coordinator"] == {"node_id": ALPHA, "name": "alpha", "is_self": True, "term": 4, "election": ""}
    assert document["members"] == {"alive": 1, "suspect": 1, "dead": 1}
    (slot,) = document["slots"]
    assert (slot["plan_id"], slot["epoch"], slot["routable"]) == (PLAN["plan_id"], "4/alphaaaa/00000000", True)
    assert (slot["modeled_tpot_us"], slot["measured_tpot_us"]) == (50_000, 100_000)
    assert slot["head"] == "alpha"  # where a client's /v1/* leads
    (slot,) = ask(shown(stages=()), "GET", "/api/v1/status").json()["slots"]
    assert slot["head"] is None


def test_the_plan_is_the_very_document_of_the_command_line():
    assert ask(shown(), "GET", "/api/v1/plan").json() == PLAN
    (slot,) = ask(shown(), "GET", "/api/v1/plans").json()["plans"]
    assert slot["plan"] == PLAN


def test_no_plan_is_a_problem_that_says_why():
    empty = shown(slots=())
    assert "stagemesh serve" in problem(ask(empty, "GET", "/api/v1/plan"), 404, "no_plan")
    waiting = shown(slots=(SlotView("default", "planning", reason="membership settles"),))
    assert "membership settles" in problem(ask(waiting, "GET", "/api/v1/plan"), 404, "no_plan")
    refusal = {"code": "no_valid_topology", "message": "needs 9 GiB more", "details": {"missing_bytes": 9}}
    refused = shown(slots=(SlotView("default", "refused", refusal=refusal),))
    answer = ask(refused, "GET", "/api/v1/plan")
    assert problem(answer, 409, "no_valid_topology") == "needs 9 GiB more"
    assert answer.json()["details"] == {"missing_bytes": 9}


def test_one_of_several_slots_has_to_be_named_unless_one_is_the_default():
    two = shown(slots=(SlotView("a", "active", plan=PLAN), SlotView("b", "active", plan=PLAN)))
    assert "one of: a, b" in problem(ask(two, "GET", "/api/v1/plan"), 400, "slot_required")
    assert ask(two, "GET", "/api/v1/plan?slot=b").status_code == 200
    assert "'c'" in problem(ask(two, "GET", "/api/v1/plan?slot=c"), 404, "unknown_slot")
    assert ask(shown(slots=(SlotView("a", "idle"), SLOT)), "GET", "/api/v1/plan").json() == PLAN


def test_nodes_links_stages_and_models_are_listed():
    app = shown()
    nodes = ask(app, "GET", "/api/v1/nodes").json()["nodes"]
    assert [(node["name"], node["state"], node["plannable"]) for node in nodes] == [
        ("alpha", "alive", True),
        ("beta", "suspect", False),
        ("gone", "dead", False),
    ]
    link = ask(app, "GET", "/api/v1/links").json()["links"][0]
    assert (link["source_name"], link["target_name"], link["rtt_us"], link["settled"]) == ("alpha", "beta", 2_000, True)
    assert (link["jitter_us"], link["loaded_rtt_us"]) == (300, 1_900)
    assert (link["path_changes"], link["path_changed_age_us"]) == (2, 7_000_000)
    (stage,) = ask(app, "GET", "/api/v1/stages").json()["stages"]
    assert (stage["name"], stage["state"], stage["active"]["term"]) == ("alpha", "serving", 4)
    assert ask(app, "GET", "/api/v1/models").json() == {
        "models": [{"slot": "default", "model": "/models/demo.gguf", "state": "active", "routable": True}]
    }


def test_scrape_targets_are_the_nodes_that_live_and_told_a_reachable_address():
    members = (*MEMBERS, MemberView("x" * 32, "loopback-only", "alive"))
    targets = ask(shown(members=members), "GET", "/api/v1/targets").json()
    assert [target["targets"] for target in targets] == [["10.0.0.1:7947"], ["10.0.0.2:7947"]]
    assert targets[0]["labels"] == {
        "__metrics_path__": "/metrics",
        "mesh": "home-0123",
        "agent": "alpha",
        "agent_id": ALPHA,
    }


def test_events_are_told_oldest_first_with_age_and_can_be_followed_and_limited():
    view = ShownMesh()
    for number in range(5):
        view.happens("tick", f"number {number}", n=number)
    view.now = picture(now_us=view.now.now_us + 2_000_000)
    app = build_app(view, Remembering())
    events = ask(app, "GET", "/api/v1/events").json()["events"]
    assert [event["seq"] for event in events] == [1, 2, 3, 4, 5]
    assert events[0] == {
        "seq": 1,
        "at": "2026-01-01T00:00:00Z",
        "age_us": 2_000_000,
        "kind": "tick",
        "text": "number 0",
        "fields": {"n": 0},
    }
    assert [e["seq"] for e in ask(app, "GET", "/api/v1/events?after=3").json()["events"]] == [4, 5]
    assert [e["seq"] for e in ask(app, "GET", "/api/v1/events?limit=2").json()["events"]] == [4, 5]
    assert ask(app, "GET", "/api/v1/events?limit=0").json()["events"] == []


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "after=1.5", "limit=1025", "after=99999999999999999", "after=²"]
)
def test_a_wrong_number_in_a_query_is_named(query):
    name = query.partition("=")[0]
    assert name in problem(ask(shown(), "GET", f"/api/v1/events?{query}"), 400, "invalid_parameter")


def test_what_does_not_exist_is_a_problem_document_too():
    assert "/openapi.json" in problem(ask(shown(), "GET", "/nope"), 404, "not_found")
    answer = ask(shown(), "DELETE", "/api/v1/status")
    problem(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]


def test_the_description_lists_every_operation_and_its_body():
    document = ask(shown(), "GET", "/openapi.json").json()
    listed = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert listed == {(operation.path, operation.method) for operation in (*READS, *WRITES)}
    for operation in WRITES:
        if operation.command is not None:
            body = document["paths"][operation.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            name = body["$ref"].rpartition("/")[2]
            assert document["components"]["schemas"][name]["additionalProperties"] is False


def test_the_console_is_one_page_that_may_run_only_its_own_script():
    answer = ask(shown(), "GET", "/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy
    for outside in ("http://", "https://", "src=", "innerHTML", "@import"):
        assert outside not in answer.text
