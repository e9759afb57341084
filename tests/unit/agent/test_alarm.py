"""A deadline that moves."""

import asyncio

import pytest

from stage_agent.alarm import Alarm
from stage_agent.clock import monotonic_us

HOUR_US = 3_600_000_000


def test_a_deadline_that_is_moved_forward_rings_then() -> None:
    async def rings() -> None:
        alarm, due_us = Alarm(), monotonic_us() + HOUR_US
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            tasks.create_task(alarm.wait(due_us))
            await asyncio.sleep(0)
            alarm.move(monotonic_us())

    asyncio.run(rings())


def test_a_deadline_that_is_called_off_wakes_nobody() -> None:
    async def is_quiet() -> bool:
        alarm, due_us = Alarm(), monotonic_us() + 20_000
        async with asyncio.TaskGroup() as tasks:
            waiter = tasks.create_task(alarm.wait(due_us))
            await asyncio.sleep(0)
            alarm.move(monotonic_us() + HOUR_US)
            await asyncio.sleep(0.06)
            quiet = not waiter.done()
            waiter.cancel()
        return quiet

    assert asyncio.run(is_quiet())


def test_a_deadline_is_over_when_the_alarm_rings_on_the_loop_of_the_daemon() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def earliness_us() -> list[int]:
        alarm, early = Alarm(), []
        for step in range(40):
            due_us = monotonic_us() + 2_000 + 137 * step
            await alarm.wait(due_us)
            early.append(due_us - monotonic_us())
        return early

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert max(runner.run(earliness_us())) <= 0
