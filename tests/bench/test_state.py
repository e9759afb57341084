"""What a durable write costs, and the alternative it was chosen over."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stage_agent.state.boot_file import write_durably
from stage_agent.state.store import StateStore

RESULTS = Path(__file__).parent / "results" / "state.jsonl"
WRITES = 400
DOCUMENT = {"promised": [41, "n" * 32, "ab" * 16], "assignment": {"filler": "x" * 1_500}}


def milliseconds(write: Callable[[int], None]) -> dict[str, float]:
    times = []
    for number in range(WRITES):
        started = time.perf_counter()
        write(number)
        times.append((time.perf_counter() - started) * 1e3)
    times.sort()
    return {"p50_ms": round(statistics.median(times), 3), "p99_ms": round(times[int(WRITES * 0.99)], 3)}


@pytest.mark.bench
def test_a_durable_slot_write_costs_less_than_a_synced_and_renamed_file(tmp_path: Path) -> None:
    with StateStore.open(tmp_path / "store") as store:
        store.boot()
        database = milliseconds(lambda number: store.persist_slot("default", {**DOCUMENT, "number": number}))
    files = tmp_path / "files"
    files.mkdir()
    text = json.dumps(DOCUMENT).encode()
    renamed = milliseconds(lambda _: write_durably(files / "slot.json", text))
    started = time.perf_counter()
    StateStore.open(tmp_path / "store").close()
    record = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 a date for readers
        "case": f"{WRITES} durable writes of {len(text)} bytes",
        "sqlite_wal_full": database,
        "file_fsync_rename": renamed,
        "open_ms": round((time.perf_counter() - started) * 1e3, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))
    assert database["p50_ms"] < renamed["p50_ms"]
    assert database["p50_ms"] < 5
