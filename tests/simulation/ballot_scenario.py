"""What happens to one mesh: its machines and its faults, made from a seed or read from a file of a case that is kept."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.ballot_faults import Fault, Kind
from tests.simulation.ballot_mesh import SECOND, BallotMesh, Variant, short_waits

STORMS = 3
STORM_US = 30 * SECOND
LULL_US = 15 * SECOND
PAUSE_US = 60 * SECOND
_ELSEWHERE = {"faults", "origin"}
ALWAYS: tuple[Kind, ...] = (
    "crash",
    "crash",
    "crash while writing",
    "crash while writing",
    "weather",
    "cut one way",
    "cut in two",
    "stall",
    "sleep",
    "engine dies",
    "drain",
    "exclude",
)
"""Every scenario of two storms has each of these at least once, and a coordinator that pauses early enough to come back."""
OFTEN: tuple[Kind, ...] = (
    "crash",
    "crash",
    "crash while writing",
    "weather",
    "cut one way",
    "cut in two",
    "stall",
    "sleep",
    "engine dies",
    "drain",
    "exclude",
    "mend",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """``seed`` decides the machines, unless they are stated, and what the network does to each message."""

    seed: int
    faults: tuple[Fault, ...]
    short: bool = False
    nodes: int | None = None
    slots: int = 1
    storms: int = STORMS
    clones: bool = False
    full_disks: bool = False
    standing: tuple[int, ...] = ()
    """A cut in two that stays after the storms, as in ``two_sides``; empty when everything heals at once."""
    why: str = ""
    origin: str = field(default="", compare=False)
    """The file it was read from; empty when it was made from its seed."""

    def mesh(self, variant: Variant | None = None) -> BallotMesh:
        """Before anything happened."""
        given = variant or Variant()
        made = replace(given, clones=given.clones or self.clones, full_disks=given.full_disks or self.full_disks)
        return BallotMesh(self.seed, short_waits(made) if self.short else made, self.nodes, slots=self.slots)

    @property
    def length_us(self) -> int:
        """From the first plan to the end of the last fault's beginning."""
        return max((fault.at_us for fault in self.faults), default=0) + SECOND

    def to_text(self) -> str:
        """JSON with one fault a line."""
        document = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _ELSEWHERE}
        faults = [json.dumps({key: value for key, value in asdict(each).items() if value}) for each in self.faults]
        head = json.dumps(document, indent=1, ensure_ascii=False).removesuffix("\n}")
        return head + ',\n "faults": [\n  ' + ",\n  ".join(faults) + "\n ]\n}\n"


def read_scenario(path: Path) -> Scenario:
    """A case as it was written by ``to_text``."""
    document: dict[str, Any] = json.loads(path.read_text())
    faults = tuple(
        Fault(**{"at_us": 0, **each, "numbers": tuple(each.get("numbers", ()))}) for each in document.pop("faults")
    )
    document["standing"] = tuple(document.get("standing", ()))
    return Scenario(**document, faults=faults, origin=str(path))


def make_scenario(
    seed: int, *, short: bool = False, storms: int = STORMS, clones: bool = False, full_disks: bool = False
) -> Scenario:
    """Storms with lulls between them. The same seed gives the same faults whatever the waits."""
    random = Random(f"faults {seed}")
    kinds: list[Kind] = list(ALWAYS)
    if full_disks:
        kinds += ["full disk"] * 5
    if clones:
        kinds += ["clone"]
    moments = [
        storm * (STORM_US + LULL_US) + at_us for storm in range(storms) for at_us in _moments(random)
    ]  # fmt: skip
    kinds += random.choices(OFTEN, k=max(0, len(moments) - len(kinds)))
    random.shuffle(kinds)
    if clones:  # early: the two need time to quarrel
        kinds.remove("clone")
        kinds.insert(0, "clone")
    faults = [_weather(random, 0)]
    faults += [_fault(random, kind, at_us) for kind, at_us in zip(kinds, moments, strict=False)]
    faults += [
        Fault(storm * (STORM_US + LULL_US) + STORM_US, "lull") for storm in range(storms)
    ]  # fmt: skip
    if storms > 1:
        last_us = storms * (STORM_US + LULL_US) - PAUSE_US - SECOND
        faults.append(Fault(random.randrange(last_us), "pause the coordinator", PAUSE_US, (random.randrange(100),)))
    faults.sort(key=lambda fault: fault.at_us)
    return Scenario(
        seed,
        tuple(faults),
        short=short,
        slots=1 if seed % 5 else 2,
        storms=storms,
        clones=clones,
        full_disks=full_disks,
        standing=_standing(seed),
    )


def _standing(seed: int) -> tuple[int, ...]:
    """In every fourth scenario or so, from dice of its own: the faults stay as they are."""
    random = Random(f"standing {seed}")
    return tuple(random.randrange(100) for _ in range(12)) if random.randrange(4) == 0 else ()


def _moments(random: Random) -> list[int]:
    """Half a second to five seconds apart, within one storm."""
    moments, at_us = [], random.randrange(SECOND // 2, 5 * SECOND)
    while at_us < STORM_US:
        moments.append(at_us)
        at_us += random.randrange(SECOND // 2, 5 * SECOND)
    return moments


def _fault(random: Random, kind: Kind, at_us: int) -> Fault:
    numbers, for_us = (random.randrange(100), random.randrange(100)), 0
    match kind:
        case "weather":
            return _weather(random, at_us)
        case "crash" | "crash while writing" | "full disk":
            for_us = random.randrange(SECOND // 2, 20 * SECOND)
        case "cut one way":
            numbers = tuple(random.randrange(100) for _ in range(2 * random.randint(1, 3)))
            for_us = random.randrange(2 * SECOND, 25 * SECOND)
        case "cut in two":
            numbers = tuple(random.randrange(100) for _ in range(12))
            for_us = random.randrange(2 * SECOND, 25 * SECOND)
        case "stall" | "sleep":
            for_us = random.randrange(SECOND, 20 * SECOND)
        case "drain" | "exclude":
            for_us = random.randrange(3 * SECOND, 20 * SECOND)
    return Fault(at_us, kind, for_us, numbers)


def _weather(random: Random, at_us: int) -> Fault:
    weather = {
        "loss_milli": random.choice((0, 10, 100, 300)),
        "duplicate_milli": random.choice((0, 50, 200)),
        "delay_us": random.choice((500, 5_000, 80_000)),
        "jitter_us": random.choice((0, 5_000, 300_000)),
        "crash_milli": random.choice((0, 0, 2, 10)),
        "load_us": random.choice((SECOND, 4 * SECOND, 30 * SECOND)),
        "load_failure_milli": random.choice((0, 100, 500)),
        "runtime_death_milli": random.choice((0, 0, 100)),
    }
    return Fault(at_us, "weather", weather=weather)
