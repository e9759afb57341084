"""The table of what the API can do: routes and ``/openapi.json`` are both made from it, so they cannot disagree."""

from dataclasses import dataclass, field
from typing import Literal

from stage_agent.api import commands


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    name: str
    summary: str
    command: type[commands.Command] | None = None
    """The body of a ``POST``; ``None`` = no body."""
    query: tuple[tuple[str, str], ...] = field(default=())
    """Query parameters: name and meaning."""
    media_type: str = "application/json"
    success: int = 200


API = "/api/v1"
_SLOT = (("slot", "name of the slot; may be left out when there is only one"),)
_EVENTS = (("after", "only events with a larger seq"), ("limit", "at most so many of the newest (1 to 1024)"))

READS = (
    Operation("GET", "/healthz", "health", "200 while the process answers"),
    Operation(
        "GET", "/readyz", "readiness", "200 when joined and its stages are as assigned, else 503 with the reason"
    ),
    Operation("GET", "/metrics", "metrics", "Prometheus metrics", media_type="text/plain"),
    Operation("GET", f"{API}/status", "status", "This node at a glance"),
    Operation("GET", f"{API}/nodes", "nodes", "Every node as this one sees it"),
    Operation("GET", f"{API}/links", "links", "Every directed link and how it was measured"),
    Operation("GET", f"{API}/plan", "plan", "The active plan, the document of `stagemesh plan --json`", query=_SLOT),
    Operation("GET", f"{API}/plan/explain", "explain_plan", "Why this plan, and its best rivals", query=_SLOT),
    Operation("GET", f"{API}/plans", "plans", "Every slot with plan, epoch and state"),
    Operation("GET", f"{API}/stages", "stages", "Every agent's own word about its stages"),
    Operation("GET", f"{API}/orders", "orders", "What operators ordered: pins, exclusions, locks, policy"),
    Operation("GET", f"{API}/models", "models", "What the mesh was asked to serve"),
    Operation("GET", f"{API}/events", "events", "What happened, oldest first", query=_EVENTS),
    Operation(
        "GET",
        f"{API}/events/stream",
        "event_stream",
        "The same as server-sent events, for ever",
        query=_EVENTS[:1],
        media_type="text/event-stream",
    ),
    Operation("GET", f"{API}/targets", "targets", "Prometheus HTTP service discovery of the whole mesh"),
)

WRITES = (
    Operation("POST", f"{API}/plan:preview", "preview_plan", "Plan, but place nothing", commands.PreviewPlan),
    Operation("POST", f"{API}/models", "serve_model", "Serve a model", commands.ServeModel, success=202),
    Operation("DELETE", f"{API}/models/{{slot}}", "unserve_model", "Stop serving a slot", success=202),
    Operation(
        "POST", f"{API}/generate", "generate", "Tokens from the placed stages (verification engine)", commands.Generate
    ),
    Operation("POST", f"{API}/drain", "drain", "Take this node out of planning gently", commands.Drain, success=202),
    Operation("POST", f"{API}/resume", "resume", "Take part again", commands.Resume, success=202),
    Operation("POST", f"{API}/leave", "leave", "Leave the mesh and end the daemon", commands.Leave, success=202),
    Operation("POST", f"{API}/revoke", "revoke", "Expel a node for good", commands.Revoke, success=202),
    Operation("POST", f"{API}/rotate-key", "rotate_key", "Give this node a new key", commands.RotateKey, success=202),
    Operation("POST", f"{API}/pin", "pin", "Bind stage 0 or the coordinator to a node", commands.Pin, success=202),
    Operation("POST", f"{API}/exclude", "exclude", "Plan without some nodes", commands.Exclude, success=202),
    Operation("POST", f"{API}/policy", "set_policy", "Change planning defaults", commands.SetPolicy, success=202),
    Operation(
        "POST",
        f"{API}/calibration",
        "apply_calibration",
        "Plan by what live runs say",
        commands.ApplyCalibration,
        success=202,
    ),
    Operation("POST", f"{API}/lock", "lock", "Hold a slot on an exact split", commands.LockTopology, success=202),
)
