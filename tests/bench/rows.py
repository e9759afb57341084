"""Rows of results: what was measured, when, and on what machine. Appended and never rewritten."""

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def append(file: str, name: str, **figures: Any) -> None:
    """One row in ``results/<file>.jsonl``, and on the screen; fractions to a thousandth."""
    row = {
        "name": name,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        **{key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{file}.jsonl").open("a", encoding="utf-8") as results:
        results.write(json.dumps(row) + "\n")
    print(f"\n{row}")


def percentile(values: Sequence[float], share: float) -> float:
    """Of an unsorted, non-empty sequence; the next one up."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
