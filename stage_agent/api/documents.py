"""A snapshot as the JSON documents of the API. Pure; names carry their unit, unknown figures are ``null``."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from stage_agent.api.readiness import not_ready_reasons
from stage_agent.api.snapshot import Event, NodeSnapshot, SlotView
from stage_agent.router.heads import find_head

METRICS_PATH = "/metrics"


def status_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """The node at a glance."""
    reasons = not_ready_reasons(snapshot)
    return {
        "node": {
            "node_id": snapshot.node_id,
            "name": snapshot.name,
            "version": snapshot.version,
            "mesh_id": snapshot.mesh_id,
            "listen": snapshot.listen_address,
            "uptime_us": snapshot.now_us - snapshot.started_us,
        },
        "joined": snapshot.joined,
        "draining": snapshot.draining,
        "ready": not reasons,
        "not_ready_reasons": list(reasons),
        "status": snapshot.status_text,
        "coordinator": {
            "node_id": snapshot.coordinator_id,
            "name": names_of(snapshot).get(snapshot.coordinator_id, ""),
            "is_self": snapshot.is_coordinator,
            "term": snapshot.term,
            "election": snapshot.election,
        },
        "members": dict(Counter(member.state for member in snapshot.members)),
        "slots": [{**_slot_summary(slot), "head": _head_name(snapshot, slot)} for slot in snapshot.slots],
        **orders_document(snapshot),
    }


def nodes_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """Every known node."""
    return {"nodes": [asdict(member) for member in snapshot.members]}


def links_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """Every known directed link, with names for people."""
    names = names_of(snapshot)
    return {
        "links": [
            {
                **asdict(link),
                "source_name": names.get(link.source, link.source),
                "target_name": names.get(link.target, link.target),
            }
            for link in snapshot.links
        ]
    }


def stages_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """Every agent's own word about its stages."""
    return {
        "stages": [
            {"node_id": stage.node_id, "name": stage.name, **stage.fact.model_dump(mode="json")}
            for stage in snapshot.stages
        ]
    }


def plans_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """Every slot with its plan (the document of ``plan --json``), epoch and state."""
    return {
        "plans": [
            {**_slot_summary(slot), "plan": dict(slot.plan) if slot.plan is not None else None}
            for slot in snapshot.slots
        ]
    }


def orders_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """What operators ordered and did not take back, whichever node they said it on."""
    return {"orders": [asdict(order) for order in snapshot.orders if not order.removed]}


def models_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """What the mesh was asked to serve."""
    return {
        "models": [
            {"slot": slot.slot, "model": slot.model, "state": slot.state, "routable": slot.routable}
            for slot in snapshot.slots
        ]
    }


def event_document(event: Event, now_us: int) -> dict[str, Any]:
    """One event with its age at ``now_us``."""
    return {
        "seq": event.seq,
        "at": event.at,
        "age_us": max(0, now_us - event.at_us),
        "kind": event.kind,
        "text": event.text,
        "fields": dict(event.fields),
    }


def events_document(events: Iterable[Event], now_us: int) -> dict[str, Any]:
    """Events, oldest first."""
    return {"events": [event_document(event, now_us) for event in events]}


def targets_document(snapshot: NodeSnapshot) -> list[dict[str, Any]]:
    """Prometheus HTTP service discovery: one group per node that is not gone and told an address of its API.

    The scraped node is the label ``agent``: ``node`` is a label of plan metrics and would be renamed when scraped.
    """
    return [
        {
            "targets": [member.api_address],
            "labels": {
                "__metrics_path__": METRICS_PATH,
                "mesh": snapshot.mesh_id,
                "agent": member.name,
                "agent_id": member.node_id,
            },
        }
        for member in snapshot.members
        if member.api_address and member.state in ("alive", "suspect")
    ]


def names_of(snapshot: NodeSnapshot) -> dict[str, str]:
    """Node id → the name that people see; a name that two nodes share gets the first characters of the id."""
    return distinct_names((member.node_id, member.name) for member in snapshot.members)


def distinct_names(members: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Node id → name, from both; names that are not unique get the first characters of their ids."""
    pairs = list(members)
    shared = Counter(name for _, name in pairs)
    return {node_id: name if shared[name] == 1 else f"{name}-{node_id[:8]}" for node_id, name in pairs}


def _head_name(snapshot: NodeSnapshot, slot: SlotView) -> str | None:
    """Where ``/v1/*`` of every node leads for ``slot`` now; ``None`` while it answers 503."""
    head = find_head(snapshot, slot.slot)
    return None if head is None else names_of(snapshot).get(head.node_id, head.node_id)


def _slot_summary(slot: SlotView) -> dict[str, Any]:
    plan = slot.plan or {}
    return {
        "slot": slot.slot,
        "model": slot.model,
        "state": slot.state,
        "routable": slot.routable,
        "epoch": slot.epoch,
        "term": slot.term,
        "generation": slot.generation,
        "plan_id": plan.get("plan_id"),
        "participant_set_hash": slot.participant_set_hash,
        "reason": slot.reason,
        "warning": slot.warning,
        "refusal": dict(slot.refusal) if slot.refusal is not None else None,
        "left_out": [asdict(node) for node in slot.left_out],
        "active_age_us": slot.active_age_us,
        "modeled_tpot_us": plan.get("modeled", {}).get("decode_tpot_us"),
        "measured_tpot_us": slot.measured_tpot_us,
    }
