"""Which worker gets what: everything live is one unit of work and comes first."""

from pathlib import Path

import pytest

from tests.lanes import LIVE, LONG, Lanes, rank

ROOT = Path(__file__).parents[2]
PURE = ("tests/property/wire/test_codec.py::test_a", "tests/unit/planner/test_cost.py::test_b[x::y]")


@pytest.mark.parametrize("place", LIVE + LONG)
def test_what_is_named_exists(place: str) -> None:
    assert (ROOT / place).exists()


def test_all_that_is_live_is_one_unit_and_the_rest_are_files() -> None:
    lanes = Lanes.__new__(Lanes)
    assert {lanes._split_scope(f"{place}test_x.py::test_a[{place}]") for place in LIVE} == {"live"}
    assert [lanes._split_scope(each) for each in PURE] == [each.split("::", 1)[0] for each in PURE]


def test_the_live_unit_is_first_and_what_is_long_comes_before_what_is_short() -> None:
    items = [*reversed(PURE), f"{LIVE[-1]}test_x.py::test_c"]
    assert sorted(items, key=rank) == [items[2], items[1], items[0]]
