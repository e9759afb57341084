"""Real coordinators, agents, fences and codec under chaos: safety after every event, convergence after healing.

A failing seed prints the command that replays it. When its cause is fixed, keep its *scenario* (``… --keep`` prints it)
in ``kept/`` with its cause in ``why``: a list of faults outlives changes of the generator, a seed does not.
"""

import json
import shlex
import statistics
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.simulation.ballot_bugs import BUGS
from tests.simulation.ballot_chaos import HEAL_US, Outcome, SeedFailedError, main, run_scenario, run_seed
from tests.simulation.ballot_mesh import SECOND, BallotMesh, Variant
from tests.simulation.ballot_replay import command, read_command
from tests.simulation.ballot_scenario import make_scenario, read_scenario

KEPT = sorted((Path(__file__).parent / "kept").glob("*.json"))
RESULTS = Path(__file__).parents[1] / "bench" / "results" / "coordination.jsonl"
WENT_WRONG = (
    "message lost",
    "message delayed",
    "message reordered",
    "message duplicated",
    "message cut one way",
    "message cut both ways",
    "crash",
    "restart",
    "crash, write kept",
    "crash, write lost",
    "slow load",
    "failed load",
    "engine died",
    "woke up",
    "a paused coordinator came back",
    "fault: stall",
    "fault: drain",
    "fault: exclude",
)
"""Counted where it took effect, not where it was planned."""
WAITS = pytest.mark.parametrize("short", [False, True], ids=["default waits", "short waits"])


def assert_that_it_proves_something(outcomes: list[Outcome]) -> Counter[str]:
    """Every kind of fault took effect and requests flowed, while it stormed too."""
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    missing = [kind for kind in WENT_WRONG if counts[kind] < len(outcomes) // 10]
    assert not missing, f"hardly ever happened: {missing}"
    for outcome in outcomes:
        faults = sum(count for kind, count in outcome.counts.items() if kind.startswith("fault: "))
        assert faults >= 15, outcome.seed
        assert outcome.requests >= 20, outcome.seed
    assert statistics.median(outcome.requests_in_storms for outcome in outcomes) >= 30
    cut = [outcome for outcome in outcomes if outcome.sides_us]
    assert len(cut) >= len(outcomes) // 8
    assert counts["a side served a model"] >= len(cut)
    return counts


@pytest.mark.timeout(400)
@WAITS
def test_no_invariant_breaks_and_every_mesh_converges_after_healing(short):
    outcomes = [run_seed(seed, short=short, storms=2) for seed in range(25)]
    assert_that_it_proves_something(outcomes)
    assert statistics.median(outcome.healed_us for outcome in outcomes) <= 15 * SECOND
    sizes = {outcome.nodes for outcome in outcomes}
    assert {2, 12} <= sizes


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_scenarios_that_failed_once_pass(path):
    scenario = read_scenario(path)
    assert scenario.why
    assert run_scenario(scenario).healed_us <= 30 * SECOND, "with every back-off counted"


def test_a_scenario_reads_as_it_was_written(tmp_path):
    scenario = make_scenario(2)
    assert scenario.standing
    path = tmp_path / "case.json"
    path.write_text(scenario.to_text())
    assert read_scenario(path) == scenario


@pytest.mark.parametrize("clones", [False, True])
def test_the_command_printed_with_a_failing_seed_finds_the_same_problem_again(clones):
    variant, _ = BUGS["an activation before all are ready"]
    with pytest.raises(SeedFailedError) as first:
        run_scenario(make_scenario(0, short=True, storms=2, clones=clones), variant)
    program, *words = shlex.split(str(first.value).splitlines()[1].removeprefix("replay: "))[2:]
    assert program == "tests.simulation.ballot_chaos"
    with pytest.raises(SeedFailedError) as again:
        main(words)
    assert str(again.value) == str(first.value)


@pytest.mark.parametrize("name", BUGS)
def test_a_replay_command_names_the_planted_mistake(name):
    variant, _ = BUGS[name]
    made = make_scenario(7, short=True, storms=2, clones=variant.clones, full_disks=variant.full_disks)
    replay = read_command(shlex.split(command(made, variant))[3:])
    assert (replay.scenario, replay.variant) == (made, variant)


@pytest.mark.parametrize("full_disks", [False, True])
@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("storms", [1, 2, 3])
def test_a_replay_command_names_everything_a_scenario_is_made_from(storms, clones, full_disks):
    made = make_scenario(14, short=True, storms=storms, clones=clones, full_disks=full_disks)
    assert made.standing
    words = shlex.split(command(made))[3:]
    assert read_command(words).scenario == made


def test_a_kept_scenario_is_replayed_from_its_file(tmp_path):
    path = tmp_path / "a case.json"
    path.write_text(make_scenario(4, clones=True).to_text())
    replay = read_command(shlex.split(command(read_scenario(path)))[3:])
    assert replay.scenario == read_scenario(path)
    assert replay.scenario.mesh().variant.clones


def test_disks_that_are_full_for_a_while_break_nothing_either():
    outcomes = [run_seed(seed, Variant(full_disks=True), short=True, storms=1) for seed in range(6)]
    assert sum(outcome.counts["write refused by a full disk"] for outcome in outcomes) >= 3


def test_a_calm_mesh_plans_once_and_serves_every_request():
    mesh = BallotMesh(3, nodes=5)
    mesh.run_until(60 * SECOND)
    assert mesh.checkers.converged() == ""
    assert mesh.counts["decided: planned"] == 1
    assert mesh.checkers.completed_requests > 100


def test_one_seed_is_one_history():
    first, second = (run_seed(7, storms=1).history for _ in range(2))
    assert first == second


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@WAITS
def test_a_thousand_seeds_keep_every_invariant_and_converge(short):
    failures, outcomes, begun_s = [], [], time.process_time()
    for seed in range(1000, 2000):
        try:
            outcomes.append(run_seed(seed, short=short))
        except AssertionError as error:
            failures.append(str(error))
    counts = assert_that_it_proves_something(outcomes)
    record(outcomes, counts, short=short, failures=len(failures), cpu_s=time.process_time() - begun_s)
    assert not failures, failures[0]
    healed = [outcome.healed_us for outcome in outcomes]
    assert sum(took_us <= HEAL_US for took_us in healed) >= 0.99 * len(healed)
    assert max(healed) <= 2 * HEAL_US, "back-off and flap damping included"


def calm_behind_a_cut(outcomes: list[Outcome], counts: Counter[str]) -> dict[str, float]:
    """How long the sides of standing cuts took to come to rest, and how they did."""
    sides = sorted(side for outcome in outcomes for side in outcome.sides_us)
    return {
        "sides": len(sides),
        "side_at_rest_p50_s": sides[len(sides) // 2][0] / SECOND,
        "side_at_rest_p95_s": sides[len(sides) * 95 // 100][0] / SECOND,
        "side_at_rest_max_s": sides[-1][0] / SECOND,
        "side_max_without_back_off_s": max(counted_us for _, counted_us in sides) / SECOND,
        "sides_that_served": counts["a side served a model"],
        "sides_that_explained": counts["a side explained why it does not serve"],
    }


def record(outcomes: list[Outcome], counts: Counter[str], *, short: bool, failures: int, cpu_s: float) -> None:
    healed_s = sorted(outcome.healed_us / SECOND for outcome in outcomes)
    row = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 a date for readers
        "case": f"chaos, {'short' if short else 'default'} waits",
        "seeds": len(outcomes),
        "failures": failures,
        "requests": sum(outcome.requests for outcome in outcomes),
        "requests_in_storms": sum(outcome.requests_in_storms for outcome in outcomes),
        "plans_activated": counts["decided: activated"],
        "converged_p50_s": statistics.median(healed_s),
        "converged_p95_s": healed_s[len(healed_s) * 95 // 100],
        "converged_max_s": healed_s[-1],
        "within_30_s": round(sum(each <= 30 for each in healed_s) / len(healed_s), 3),
        "max_without_back_off_s": max(outcome.counted_us for outcome in outcomes) / SECOND,
        **calm_behind_a_cut(outcomes, counts),
        "faults": {kind: counts[kind] for kind in WENT_WRONG},
        "cpu_s": round(cpu_s, 1),
    }
    with RESULTS.open("a", encoding="utf-8") as results:
        results.write(json.dumps(row) + "\n")
    print(row)
