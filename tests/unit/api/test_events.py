"""The ring of events, the histogram, and the stream of server-sent events."""

import asyncio
import json

import pytest

from stage_agent.api.events import DurationHistogram, EventLog
from stage_agent.api.problems import Problem
from stage_agent.api.stream import MAX_READERS, EventStreams
from tests.unit.api.pictures import ShownMesh


def filled(count, capacity=4):
    log = EventLog(capacity)
    for number in range(count):
        log.append(now_us=number, at="t", kind="tick", text=str(number))
    return log


def test_the_ring_forgets_the_oldest_and_goes_on_counting():
    log = filled(6)
    assert [event.seq for event in log.after()] == [3, 4, 5, 6]
    assert [event.seq for event in log.after(5)] == [6]
    assert log.after(6) == ()


def test_a_very_long_text_is_cut():
    assert len(EventLog().append(now_us=0, at="t", kind="k", text="x" * 10_000).text) == 512


def test_the_histogram_is_cumulative_and_ends_in_infinity():
    histogram = DurationHistogram((0.01, 0.1))
    for us in (10_000, 50_000, 5_000_000):
        histogram.observe(us)
    view = histogram.view()
    assert view.buckets == ((0.01, 1), (0.1, 2), (float("inf"), 3))
    assert view.total_seconds == pytest.approx(5.06)


def read(view, *, after=0, count, change=lambda: None):
    """The first ``count`` events of a stream; ``change`` happens once the stream is open."""

    async def collect():
        seen = []
        stream = EventStreams(view).open(after)
        assert (await anext(stream)).startswith(":")
        change()
        async with asyncio.timeout(5):
            async for piece in stream:
                head, _, data = piece.partition("\ndata: ")
                document = json.loads(data)
                assert head == f"id: {document['seq']}"
                seen.append(document["kind"])
                if len(seen) == count:
                    break
        await stream.aclose()
        return seen

    return asyncio.run(collect())


def test_a_stream_tells_what_was_and_then_what_happens():
    view = ShownMesh()
    view.happens("before")
    assert read(view, count=2, change=lambda: view.happens("after")) == ["before", "after"]


def test_a_stream_goes_on_where_the_reader_was():
    view = ShownMesh()
    for kind in "abc":
        view.happens(kind)
    assert read(view, after=2, count=1) == ["c"]


def test_a_reader_from_before_a_restart_gets_everything():
    view = ShownMesh()
    view.happens("fresh")
    assert read(view, after=900, count=1) == ["fresh"]


def test_readers_are_bounded_and_an_ended_one_makes_room():
    async def crowd():
        streams = EventStreams(ShownMesh())
        opened = [streams.open(0) for _ in range(MAX_READERS)]
        for stream in opened:
            await anext(stream)
        with pytest.raises(Problem) as caught:
            streams.open(0)
        assert caught.value.status == 503
        await opened[0].aclose()
        await anext(streams.open(0))

    asyncio.run(crowd())


def test_closing_ends_all_streams():
    async def ends():
        streams = EventStreams(ShownMesh())
        stream = streams.open(0)
        await anext(stream)
        streams.close()
        async with asyncio.timeout(5):
            assert [piece async for piece in stream] == []

    asyncio.run(ends())
