"""The bandwidth limit on a virtual clock."""

import random

import pytest

from stage_agent.artifacts.token_bucket import BURST_US, TokenBucket


def test_without_a_rate_nothing_ever_waits():
    bucket = TokenBucket(None)
    assert [bucket.take(10**12, now) for now in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("rate", [65_536, 1_000_000, 7_777_777, 10**9])
@pytest.mark.parametrize("size", [1, 1_000, 524_288])
def test_a_busy_sender_gets_the_rate_and_at_most_one_burst_more(rate, size):
    bucket, now_us, sent = TokenBucket(rate), 5_000_000, 0
    begun_us = now_us
    for _ in range(2_000):
        now_us += bucket.take(size, now_us)
        sent += size
    allowed = rate * (now_us - begun_us + BURST_US) // 1_000_000 + 1
    assert sent <= allowed
    assert sent >= allowed - rate * BURST_US // 1_000_000 - 2_000 * (rate // 1_000_000 + 1) - 1


def test_several_transfers_share_one_limit():
    bucket, die = TokenBucket(1_000_000), random.Random(1)
    now_us = [0, 0, 0]
    sent = 0
    while min(now_us) < 10_000_000:
        who = now_us.index(min(now_us))
        size = die.randrange(1, 100_000)
        now_us[who] += bucket.take(size, now_us[who])
        sent += size
    assert sent <= 1_000_000 * 10 + 100_000 + 3 * 100_000


def test_a_pause_earns_one_burst_and_not_the_whole_pause():
    bucket = TokenBucket(1_000_000)
    bucket.take(100_000, 0)
    assert bucket.take(100_000, 3_600_000_000) == 0
    assert bucket.take(100_000, 3_600_000_000) == 100_000


def test_a_clock_that_stands_still_or_steps_back_gives_nothing():
    bucket = TokenBucket(1_000_000)
    bucket.take(100_000, 1_000_000)
    assert bucket.take(1, 1_000_000) == 1
    assert bucket.take(1, 500_000) == 2
    assert bucket.take(1, 1_000_000) == 3
