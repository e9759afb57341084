"""What counts as news of a member, and what is only a refreshed row."""

import pytest

from protocol.membership.news import is_news
from protocol.orders import OperatorOrder
from protocol.rows import DeviceFact, LinkFact, NodeRow, ServedModel

KEY = b"k" * 32


def row(**changes: object) -> NodeRow:
    base = NodeRow(
        node_id="a" * 32,
        public_key=KEY,
        boot_counter=1,
        seq=7,
        instance="f" * 32,
        name="n",
        version="1",
        devices=(DeviceFact(name="cpu", kind="cpu", memory_bytes=8, source="measured", measured_age_us=5),),
        links=(LinkFact(target="b" * 32, min_rtt_us=900, samples=9, first_age_us=9_000_000, last_age_us=400),),
        orders=(OperatorOrder(kind="policy", subject="objective", value="throughput", author="a" * 32, age_us=3),),
    )
    return base.model_copy(update=changes)


REFRESHED = row(
    seq=8,
    devices=(DeviceFact(name="cpu", kind="cpu", memory_bytes=8, source="measured", measured_age_us=60_000_005),),
    links=(LinkFact(target="b" * 32, min_rtt_us=880, samples=19, first_age_us=69_000_000, last_age_us=9),),
    orders=(OperatorOrder(kind="policy", subject="objective", value="throughput", author="a" * 32, age_us=60_000_003),),
)


def test_a_row_that_only_refreshes_is_no_news() -> None:
    assert not is_news(row(), REFRESHED)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "draining"},
        {"boot_counter": 2},
        {"instance": "e" * 32},
        {"max_term": 4},
        {"degraded": ("loop_lag",)},
        {"detected_memory_bytes": 9},
        {"orders": ()},
        {"serves": (ServedModel(slot="default", source="/m", digest="d" * 64, version=1),)},
        {"devices": ()},
        {"links": ()},
        {"links": (LinkFact(target="b" * 32, min_rtt_us=900, samples=1),)},
        {"links": (LinkFact(target="b" * 32, min_rtt_us=900, samples=9, degraded=True),)},
        {"links": (LinkFact(target="b" * 32, min_rtt_us=900, samples=9, send_bytes_per_s=10**6),)},
        {"links": (LinkFact(target="c" * 32, min_rtt_us=900, samples=9),)},
    ],
)
def test_anything_that_a_reader_would_act_on_is_news(changes: dict[str, object]) -> None:
    assert is_news(row(), REFRESHED.model_copy(update=changes))
