"""The command line of a run: printed with a failing seed, and understood when it is typed again.

python -m tests.simulation.ballot_chaos SEED [--short] [--storms N] [--clones] [--full-disks] [--bug NAME] [--keep]
python -m tests.simulation.ballot_chaos FILE

Every parameter that the scenario was made from is in the command: the same seed with one storm more is another scenario.
"""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.ballot_bugs import BUGS
from tests.simulation.ballot_mesh import Variant
from tests.simulation.ballot_scenario import STORMS, Scenario, make_scenario, read_scenario

PROGRAM = "python -m tests.simulation.ballot_chaos"


@dataclass(frozen=True, slots=True)
class Replay:
    """What a command line asks for."""

    scenario: Scenario
    variant: Variant
    keep: bool
    """Print the scenario instead of running it."""


def command(scenario: Scenario, variant: Variant | None = None) -> str:
    """What to type to see this run again. A variant of a test's own making is not on the command line, and it says so."""
    words = [scenario.origin or str(scenario.seed)]
    if not scenario.origin:
        words += ["--short"] * scenario.short + ["--storms", str(scenario.storms)]
        words += ["--clones"] * scenario.clones + ["--full-disks"] * scenario.full_disks
    made = variant or Variant()
    bug = next((name for name, (broken, _) in BUGS.items() if broken == made), None)
    own = made.plain() != Variant() and bug is None
    words += [] if bug is None else ["--bug", bug]
    return f"{PROGRAM} {shlex.join(words)}" + ("  # and the test's own variant" if own else "")


def read_command(words: list[str]) -> Replay:
    """Inverse of ``command``. Exits with a usage message on anything else."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("what", metavar="SEED or FILE", help="a seed, or the file of a kept scenario")
    parser.add_argument("--short", action="store_true", help="waits of seconds instead of minutes")
    parser.add_argument("--storms", type=int, default=STORMS)
    parser.add_argument("--clones", action="store_true", help="one node's identity is cloned")
    parser.add_argument("--full-disks", action="store_true")
    parser.add_argument("--bug", choices=sorted(BUGS), help="with this mistake planted")
    parser.add_argument("--keep", action="store_true", help="print the scenario, to be kept as a file")
    given = parser.parse_args(words)
    variant = Variant() if given.bug is None else BUGS[given.bug][0]
    if not given.what.isdigit():
        return Replay(read_scenario(Path(given.what)), variant, given.keep)
    scenario = make_scenario(
        int(given.what),
        short=given.short,
        storms=given.storms,
        clones=given.clones or variant.clones,
        full_disks=given.full_disks or variant.full_disks,
    )
    return Replay(scenario, variant, given.keep)
