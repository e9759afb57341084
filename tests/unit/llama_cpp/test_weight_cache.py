import os
from pathlib import Path

from stage_agent.runtimes.llama_cpp.weight_cache import cache_directory, make_room


def files(directory: Path, *sizes: int) -> list[Path]:
    """Files used one after the other, the first the longest ago."""
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for index, size in enumerate(sizes):
        path = directory / f"{index:016x}"
        path.write_bytes(bytes(size))
        os.utime(path, (1_000 + index, 1_000))
        made.append(path)
    return made


def test_the_longest_unused_go_first_and_no_more_than_needed(tmp_path) -> None:
    old, middle, new = files(tmp_path, 40, 30, 20)
    assert make_room(tmp_path, budget_bytes=100, coming_bytes=50)
    assert [path.exists() for path in (old, middle, new)] == [False, True, True]


def test_what_fits_beside_everything_deletes_nothing(tmp_path) -> None:
    made = files(tmp_path, 40, 30)
    assert make_room(tmp_path, budget_bytes=100, coming_bytes=30)
    assert all(path.exists() for path in made)


def test_a_stage_over_the_budget_is_not_cached_and_costs_the_others_nothing(tmp_path) -> None:
    (kept,) = files(tmp_path, 40)
    assert not make_room(tmp_path, budget_bytes=100, coming_bytes=101)
    assert kept.exists()


def test_a_cache_that_was_never_made_has_room(tmp_path) -> None:
    assert make_room(tmp_path / "none", budget_bytes=100, coming_bytes=100)


def test_the_cache_is_where_the_engine_s_environment_says() -> None:
    assert cache_directory({"LLAMA_CACHE": "/c", "HOME": "/h"}) == Path("/c/rpc")
    assert cache_directory({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/llama.cpp/rpc")
    assert cache_directory({"HOME": "/h"}) == Path("/h/.cache/llama.cpp/rpc")
