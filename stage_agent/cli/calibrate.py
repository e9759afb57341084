"""``stagemesh calibrate``: fit an engine profile to measured runs, or check the shipped ones against them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from coordinator.simulator.error_table import absolute_percentile, engine_errors, fitting_runs, markdown_table, unfitted
from coordinator.simulator.field_runs import FieldRun, parse_runs
from coordinator.simulator.fitting import Fit, RunError, UnderDetermined, fit_profile, run_errors
from coordinator.simulator.hardware import Hardware
from coordinator.simulator.profiles import Profile, profile_text
from protocol.errors import ConfigurationError, StagemeshError
from stage_agent.cli.calibrate_live import LIVE, calibrate_live, holds_live_runs
from stage_agent.cli.output import JsonOption, NodeOption, console, print_json
from stage_agent.cli.plan_view import columns, milliseconds
from stage_agent.cli.scenario_files import full_profiles, hardware_priors, read_text

EXIT_UNDER_DETERMINED = 1
HIGH_LEVERAGE = 0.6


def register(app: typer.Typer) -> None:
    """Add ``calibrate`` to the command line."""
    app.command("calibrate")(calibrate_command)


def calibrate_command(
    runs: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS.json|live", help="Measured runs, one object per run; `live` asks the daemon for its plan's."
        ),
    ],
    *,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", help="Only this engine. A file without runs of it is taken whole. Live: a profile's file."
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FILE", help="Live: add this plan's run to FILE, and fit all in it."),
    ] = None,
    hold: Annotated[
        list[str] | None, typer.Option("--hold", help="Keep this parameter of the profile (repeatable).")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Do not fit: how far off are the shipped profiles?")] = False,
    table: Annotated[bool, typer.Option("--table", help="Leave-one-out errors per engine, as Markdown.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the fitted profile (TOML).")] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Live: the mesh plans by it from now on, whoever coordinates.")
    ] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Live: plan by benchmarks and profiles again; nothing is fitted.")
    ] = False,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Fit engine profiles to measured runs: error per run, which runs pull hardest, and what is not determined."""
    if str(runs) == LIVE or holds_live_runs(runs):
        calibrate_live(
            str(runs), node=node, keep=keep, profile=profile, out=out, as_json=as_json, apply=apply, reset=reset
        )
        return
    if apply or reset:
        raise ConfigurationError(f"{runs}: --apply and --reset are for live runs; others fit a profile (--out FILE)")
    measured = parse_runs(str(runs), read_text(runs))
    profiles, hardware = full_profiles(), hardware_priors()
    if table:
        engines = engine_errors(measured, profiles, hardware)
        if not engines:
            raise ConfigurationError(f"{runs}: no run states every input and a decode_tok_s_split to compare with")
        typer.echo(markdown_table(engines))
        return
    chosen = _chosen(measured, profiles, profile)
    if not chosen:
        raise ConfigurationError(f"{runs}: no run with a decode_tok_s_split to compare with")
    results = [
        _checked(name, own, profiles[name], hardware, measured)
        if check
        else _fitted(name, own, profiles[name], tuple(hold or ()), hardware, measured)
        for name, own in chosen
    ]
    if as_json:
        print_json({"profiles": results})
    else:
        for result in results:
            _show(result)
    if out is not None:
        _write(out, results, profiles)
    if any("refused" in result for result in results):
        raise typer.Exit(EXIT_UNDER_DETERMINED)


def _chosen(
    runs: Sequence[FieldRun], profiles: dict[str, Profile], only: str | None
) -> list[tuple[str, tuple[FieldRun, ...]]]:
    if only is not None:
        if only not in profiles:
            raise ConfigurationError(
                f"--profile {only}: there is no such profile; there are {', '.join(sorted(profiles))}"
            )
        own = fitting_runs(runs, only) or tuple(run for run in runs if run.measured_us is not None)
        return [(only, own)] if own else []
    groups = [(name, fitting_runs(runs, name)) for name in sorted(profiles)]
    return [(name, own) for name, own in groups if any(run.measured_us is not None for run in own)]


def _checked(
    name: str, runs: tuple[FieldRun, ...], profile: Profile, hardware: Hardware, known: Sequence[FieldRun]
) -> dict[str, Any]:
    return {"profile": name, "fitted": False, **_errors(run_errors(runs, profile.calibration, hardware, known))}


def _fitted(
    name: str,
    runs: tuple[FieldRun, ...],
    profile: Profile,
    hold: tuple[str, ...],
    hardware: Hardware,
    known: Sequence[FieldRun],
) -> dict[str, Any]:
    for key in hold:
        if key not in profile.fit:
            raise ConfigurationError(f"--hold {key}: {name} fits {', '.join(profile.fit)}")
    free = tuple(key for key in profile.fit if key not in hold)
    base = profile.calibration if hold else unfitted(profile)
    fit = fit_profile(runs, base, free, hardware, known=known)
    if isinstance(fit, UnderDetermined):
        return {"profile": name, "fitted": False, "refused": fit.message, "undetermined": list(fit.parameters)}
    return {"profile": name, "fitted": True, **_values(fit), **_errors(fit.errors)}


def _values(fit: Fit) -> dict[str, Any]:
    return {"values": {key: round(value, 4) for key, value in fit.values.items()}, "at_bound": list(fit.at_bound)}


def _errors(errors: Sequence[RunError]) -> dict[str, Any]:
    return {
        "median_absolute_error": round(absolute_percentile(errors, 50), 4),
        "p90_absolute_error": round(absolute_percentile(errors, 90), 4),
        "runs": [
            {
                "id": error.run.id,
                "measured_us": round(error.run.measured_us or 0),
                "predicted_us": round(error.prediction.token_us),
                "error": round(error.relative, 4),
                "leverage": None if error.leverage is None else round(error.leverage, 3),
                "basis": error.prediction.basis,
                "flags": list(error.prediction.flags),
            }
            for error in errors
        ],
    }


def _show(result: dict[str, Any]) -> None:
    screen = console()
    screen.print(Text.assemble(("\nprofile ", "dim"), (result["profile"], "bold")))
    if "refused" in result:
        screen.print(Text(f"refused: {result['refused']}", style="yellow"))
        return
    for key, value in result.get("values", {}).items():
        bound = "  (at its bound)" if key in result["at_bound"] else ""
        screen.print(f"  {key} = {value:g}{bound}")
    table = columns("run", ">measured", ">predicted", ">error", "pull", "rests on", "flags")
    for run in result["runs"]:
        pull = run["leverage"]
        marks = "" if pull is None else "●" * round(5 * pull) + (f" {pull:.2f}" if pull >= HIGH_LEVERAGE else "")
        colour = "red" if abs(run["error"]) > 0.3 else "yellow" if abs(run["error"]) > 0.12 else "green"
        table.add_row(
            run["id"],
            milliseconds(run["measured_us"]),
            milliseconds(run["predicted_us"]),
            Text(f"{run['error']:+.1%}", style=colour),
            marks,
            run["basis"],
            ", ".join(run["flags"]),
        )
    screen.print(table)
    screen.print(
        f"  median error {result['median_absolute_error']:.1%}, 90th percentile {result['p90_absolute_error']:.1%}"
    )


def _write(path: Path, results: list[dict[str, Any]], profiles: dict[str, Profile]) -> None:
    fitted = [result for result in results if result["fitted"]]
    if len(fitted) != 1:
        raise ConfigurationError(
            f"--out {path}: needs exactly one fitted profile, not {len(fitted)}; choose with --profile"
        )
    result = fitted[0]
    ids = ", ".join(run["id"] for run in result["runs"])
    text = profile_text(
        profiles[result["profile"]], result["values"], f"least squares over {len(result['runs'])} runs", ids
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StagemeshError(f"--out {path}: {error.strerror or error}") from error
