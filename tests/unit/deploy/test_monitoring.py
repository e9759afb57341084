"""Prometheus, alerts and dashboard: well formed, and about metrics that a node really has."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.api.pictures import LINKS, SLOT, ask, shown
from tests.unit.deploy.places import DEPLOY

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
REQUIRED_ALERTS = {
    "mesh split": "StagemeshMeshSplit",
    "no coordinator": "StagemeshNoCoordinator",
    "plan misses target": "StagemeshPlanMissesTarget",
    "measured far below predicted": "StagemeshSlowerThanPredicted",
    "link fell back to a slower path": "StagemeshLinkDegraded",
    "stage not ready": "StagemeshStageNotReady",
    "agent down": "StagemeshAgentDown",
}


def document(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def rules():
    return [rule for group in document("alerts.yml")["groups"] for rule in group["rules"]]


def dashboard():
    return json.loads((DEPLOY / "grafana" / "stagemesh.json").read_text())


def exported():
    """Sample name → label names that a node in full swing exports."""
    text = ask(shown(slots=(SLOT,), links=LINKS), "GET", "/metrics").text
    return {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    }


def metric_names(expression):
    return set(re.findall(r"\b(?:stagemesh|process)_[a-z0-9_]+", expression))


def expressions():
    found = [rule["expr"] for rule in rules()]
    found += [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    found += [annotation["expr"] for annotation in dashboard()["annotations"]["list"]]
    return found


def test_every_query_is_about_a_metric_that_exists():
    known = set(exported())
    for expression in expressions():
        names = metric_names(expression)
        assert names or "up{" in expression, expression
        assert names <= known, expression


def test_every_grouping_label_exists_on_its_metric_or_comes_from_discovery():
    known = exported()
    discovered = {"mesh", "agent", "agent_id", "job", "instance", "le"}
    for expression in expressions():
        own = set().union(*(known[name] for name in metric_names(expression)), discovered)
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in labels.split(",")} <= own, expression


def test_no_metric_has_a_label_that_discovery_would_overwrite():
    targets = ask(shown(), "GET", "/api/v1/targets").json()
    discovered = {label for target in targets for label in target["labels"]} - {"__metrics_path__"}
    for name, labels in exported().items():
        assert not discovered & labels, name


@pytest.mark.parametrize("trouble", REQUIRED_ALERTS)
def test_every_trouble_has_an_alert_with_a_next_step(trouble):
    (rule,) = [rule for rule in rules() if rule["alert"] == REQUIRED_ALERTS[trouble]]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["action"]
    assert re.fullmatch(r"\d+m", rule["for"])


def test_prometheus_discovers_the_mesh_from_one_node_with_the_token():
    (job,) = document("prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "stagemesh"
    assert all(discovery["url"].endswith("/api/v1/targets") for discovery in job["http_sd_configs"])
    for part in (job, *job["http_sd_configs"]):
        assert part["authorization"] == {"type": "Bearer", "credentials_file": "/run/secrets/api-token"}
    assert document("prometheus.yml")["rule_files"] == ["alerts.yml"]


def test_the_dashboard_has_unique_panels_that_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 15
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells, panel["title"]
        cells |= covered


@needs_promtool
def test_promtool_accepts_rules_and_configuration():
    for arguments in (("check", "rules", "alerts.yml"), ("check", "config", "--syntax-only", "prometheus.yml")):
        answer = subprocess.run(
            ["promtool", *arguments], cwd=DEPLOY, check=False, capture_output=True, text=True, timeout=60
        )
        assert answer.returncode == 0, answer.stderr


@needs_promtool
def test_the_alerts_fire_when_they_should_and_only_then():
    answer = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"],
        cwd=DEPLOY,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
