"""``stagemesh calibrate live``: what the running mesh measured under its plan, kept with earlier plans, and fitted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from coordinator.calibrated import profile_name
from coordinator.planner.document import plan_from_document
from coordinator.simulator.live_runs import (
    DETERMINED,
    MAX_RUNS,
    MIN_TOKENS,
    Estimate,
    LiveFit,
    LiveRun,
    fit_live,
    parse_live_runs,
)
from coordinator.simulator.profiles import Profile, parse_profile, profile_text
from protocol.errors import ConfigurationError, StagemeshError
from stage_agent.cli.client import get_json, post_json
from stage_agent.cli.live_run import live_run
from stage_agent.cli.output import console, print_json
from stage_agent.cli.plan_view import columns, milliseconds
from stage_agent.cli.scenario_files import full_profiles, read_text

LIVE = "live"
CALIBRATION_PATH = "/api/v1/calibration"


def calibrate_live(
    source: str,
    *,
    node: str | None,
    keep: Path | None,
    profile: str | None,
    out: Path | None,
    as_json: bool,
    apply: bool = False,
    reset: bool = False,
) -> None:
    """``source`` is ``live``, or a file of kept runs. ``keep`` is added to, ``out`` is the fitted profile.

    ``apply``: the mesh plans by it from now on, whoever coordinates. ``reset``: by benchmarks and profiles again, no more.
    """
    if reset:
        post_json(node, CALIBRATION_PATH, {"reset": True})
        return
    runs = _from_daemon(node, profile) if source == LIVE else parse_live_runs(source, read_text(Path(source)))
    if keep is not None:
        runs = _kept(keep, runs)
    used = [run for run in runs if run.tokens >= MIN_TOKENS]
    if not used:
        raise ConfigurationError(f"no plan has {MIN_TOKENS} measured tokens yet: send it some requests, then ask again")
    base = profile_called(profile or used[-1].profile)
    fit = fit_live([run for run in used if run.profile == used[-1].profile], base.calibration)
    print_json(_document(base, fit)) if as_json else _show(base, fit)
    if apply:
        _apply(base, fit, node)
    if out is not None:
        _write(out, profile_text(base, fit.values, f"fitted to {len(fit.errors)} live plans", _origin(fit)))


def holds_live_runs(path: Path) -> bool:
    """Whether ``path`` was written by ``--keep``; anything else is for the other reader to judge."""
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "live_runs" in document


def profile_called(name: str) -> Profile:
    """A shipped profile by name, or one from a file. Raises ``ConfigurationError``."""
    name = profile_name(name)
    if name.endswith(".toml"):
        return parse_profile(Path(name).stem, read_text(Path(name)))
    known = full_profiles()
    if name not in known:
        raise ConfigurationError(f"profile {name}: not among {', '.join(sorted(known))}; give its file with --profile")
    return known[name]


def _from_daemon(node: str | None, profile: str | None) -> tuple[LiveRun, ...]:
    """One run for every slot whose plan is modelled and whose stage 0 has measured tokens."""
    members = {each["node_id"]: each for each in get_json(node, "/api/v1/nodes")["nodes"]}
    names = {node_id: each["name"] for node_id, each in members.items()}
    tokens = {
        stage["slot"]: stage["tpot_tokens"]
        for stage in get_json(node, "/api/v1/stages")["stages"]
        if stage["stage_index"] == 0 and stage["state"] == "serving"
    }
    runs = []
    for slot in get_json(node, "/api/v1/plans")["plans"]:
        if not slot["plan"] or not slot["measured_tpot_us"]:
            continue
        plan = plan_from_document(slot["plan"])
        if plan.modeled.decode_tpot_us is None:
            continue
        calibration = profile_called(profile or plan.calibration).calibration
        engine = members.get(plan.stages[0].node_id, {}).get("engine", "")
        measured_us, count = slot["measured_tpot_us"], tokens.get(slot["slot"], 0)
        runs.append(live_run(plan, calibration, names, measured_us=measured_us, tokens=count, engine=engine))
    if not runs:
        raise StagemeshError(
            "nothing to read yet: no plan has both a modelled time per token (its links had settled when it was made) and a "
            "measured one; send it some requests, and ask again a second later"
        )
    return tuple(runs)


def _apply(base: Profile, fit: LiveFit, node: str | None) -> None:
    """Say what the runs determine; what they do not stays as it was."""
    speeds, members = [], get_json(node, "/api/v1/nodes")["nodes"]
    for name, each in fit.slowness.items():
        found = [member for member in members if name in {member["name"], member["node_id"]}]
        rate = found[0]["memory_bandwidth_bytes_per_s"] if len(found) == 1 else None
        if rate and each.determined >= DETERMINED:
            speeds.append({"node": found[0]["node_id"], "bytes_per_s": max(1, round(rate / each.after))})
    body: dict[str, Any] = {"speeds": speeds}
    if fit.values:
        costs = fit.rtt_multiplier.after, fit.per_hop_us.after
        milli, hop_us = round(1_000 * costs[0]), round(costs[1])
        body["hops"] = {"profile": base.name, "rtt_multiplier_milli": milli, "per_hop_us": hop_us}
    if not speeds and "hops" not in body:
        raise StagemeshError(
            "the runs determine nothing yet: try plans with other cuts (`stagemesh lock`), with --keep"
        )
    post_json(node, CALIBRATION_PATH, body)


def _kept(path: Path, new: Sequence[LiveRun]) -> tuple[LiveRun, ...]:
    """What ``path`` holds and ``new``, written back; a run of the same plan replaces its earlier, shorter self."""
    earlier = parse_live_runs(str(path), read_text(path)) if path.exists() else ()
    by_id = {run.id: run for run in earlier}
    for run in new:
        if run.id not in by_id or by_id[run.id].tokens <= run.tokens:
            by_id[run.id] = run
    runs = tuple(by_id.values())[-MAX_RUNS:]
    _write(path, json.dumps({"live_runs": [run.model_dump(mode="json") for run in runs]}, indent=1) + "\n")
    return runs


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StagemeshError(f"{path}: {error.strerror or error}") from error


def _origin(fit: LiveFit) -> str:
    return "stagemesh calibrate live: " + ", ".join(run.id for run, _, _ in fit.errors)


def _document(base: Profile, fit: LiveFit) -> dict[str, Any]:
    return {
        "profile": base.name,
        "values": fit.values,
        "estimates": {name: _told(each) for name, each in _estimates(fit)},
        "slowness": {name: _told(each) for name, each in fit.slowness.items()},
        "runs": [
            {
                "id": run.id,
                "tokens": run.tokens,
                "measured_us": run.measured_us,
                "predicted_us": run.predicted_us,
                "error": round(planned, 4),
                "error_after": round(fitted, 4),
            }
            for run, planned, fitted in fit.errors
        ],
    }


def _estimates(fit: LiveFit) -> tuple[tuple[str, Estimate], ...]:
    return ("rtt_multiplier", fit.rtt_multiplier), ("per_hop_us", fit.per_hop_us), ("hop_us", fit.hop_us)


def _told(each: Estimate) -> dict[str, float]:
    return {"before": round(each.before, 4), "after": round(each.after, 4), "determined": round(each.determined, 3)}


def _show(base: Profile, fit: LiveFit) -> None:
    screen = console()
    screen.print(Text.assemble(("\nprofile ", "dim"), (base.name, "bold")))
    table = columns("what", ">before", ">after", ">determined", "")
    for name, each in (*_estimates(fit), *((f"slowness of {name}", each) for name, each in fit.slowness.items())):
        sure = each.determined >= DETERMINED
        word = "" if sure else "the runs do not tell: try plans with other cuts (`stagemesh lock`)"
        table.add_row(name, f"{each.before:.2f}", f"{each.after:.2f}", f"{each.determined:.0%}", word)
    screen.print(table)
    table = columns("plan", ">tokens", ">measured", ">predicted", ">error", ">after the fit")
    for run, planned, fitted in fit.errors:
        table.add_row(
            run.id,
            str(run.tokens),
            milliseconds(run.measured_us),
            milliseconds(run.predicted_us),
            f"{planned:+.1%}",
            f"{fitted:+.1%}",
        )
    screen.print(table)
    screen.print("  slowness: a node's work takes so many times as long as its measured bandwidth says", style="dim")
