"""Decode timings and the start budget: pure, so the clock is a number."""

from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.interface import DecodeTiming
from stage_agent.runtimes.timing import DecodeMeter

US = 1_000


def test_nothing_is_said_during_the_warm_up_and_it_leaves_no_trace() -> None:
    meter = DecodeMeter(layer_count=1)
    for _ in range(8):
        meter.record(1_000_000 * US, 0)
        assert meter.timing(0) is None
    meter.record(10 * US, 5)
    assert meter.timing(7) == DecodeTiming(us_per_layer=10, samples=1, age_us=2)


def test_the_first_256_samples_are_an_arithmetic_mean_and_then_one_eighth_counts() -> None:
    meter = DecodeMeter(layer_count=4)
    for _ in range(8):
        meter.record(0, 0)
    for index in range(256):
        meter.record((400 if index % 2 else 800) * US, index)
    assert meter.timing(255) == DecodeTiming(150, 256, 0)
    meter.record(1_400 * US, 256)
    timing = meter.timing(256)
    assert timing is not None
    assert timing.us_per_layer == (600 + (1_400 - 600) // 8) // 4 == 175
    for index in range(60):
        meter.record(1_400 * US, 257 + index)
    assert meter.timing(400) == DecodeTiming(350, 317, 84)


def test_a_layer_of_less_than_a_microsecond_is_rounded_up_not_to_zero() -> None:
    meter = DecodeMeter(layer_count=100)
    for _ in range(20):
        meter.record(5_000, 0)
    assert meter.timing(0) == DecodeTiming(1, 12, 0)


def test_the_budget_refuses_after_its_failures_and_says_for_how_long() -> None:
    budget = StartBudget(limit=2, window_us=1_000)
    for now_us in (0, 100, 200):
        assert not budget.exhausted(now_us)
        budget.record_failure(now_us)
    assert budget.exhausted(200)
    assert budget.retry_after_us(300) == 700
    assert budget.retry_after_us(1_000) == 0
    assert not budget.exhausted(1_000)


def test_a_budget_of_zero_allows_one_start_per_window() -> None:
    budget = StartBudget(limit=0, window_us=1_000)
    assert not budget.exhausted(0)
    budget.record_failure(0)
    assert budget.exhausted(999)
    assert not budget.exhausted(1_000)
