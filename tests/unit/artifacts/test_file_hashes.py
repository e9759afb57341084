"""Hashes of the operator's files: computed once, in a thread, for as long as the file is unchanged."""

import asyncio
import os

import pytest

from stage_agent.artifacts.file_hashes import FileHashes
from stage_agent.artifacts.store import hash_file
from tests.unit.artifacts.stores import sha


class Hashing:
    """Counts what is hashed, and can fail."""

    def __init__(self, tmp_path, group):
        self.hashed, self.fails = [], False
        self.hashes = FileHashes(tmp_path / "hashes.json", lambda work, name: group.create_task(work, name=name), self)

    def __call__(self, path):
        self.hashed.append(path.name)
        if self.fails:
            raise InterruptedError("the node stops")
        return hash_file(path, lambda: False)

    async def settled(self, path):
        async with asyncio.timeout(5):
            while (value := self.hashes.get(path)) is None:  # noqa: ASYNC110 - as peers ask: again and again
                await asyncio.sleep(0.005)
            return value


def with_hashing(tmp_path, test):
    async def main():
        async with asyncio.TaskGroup() as group:
            await test(Hashing(tmp_path, group))

    asyncio.run(main())


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1_000)
    return path


def test_the_first_question_is_not_answered_and_starts_one_hashing(tmp_path, model):
    async def test(hashing):
        assert [hashing.hashes.get(model) for _ in range(3)] == [None] * 3
        assert await hashing.settled(model) == sha(b"weights" * 1_000)
        assert hashing.hashed == ["model.gguf"]

    with_hashing(tmp_path, test)


def test_a_hash_survives_a_restart_but_not_a_change_of_the_file(tmp_path, model):
    async def first(hashing):
        await hashing.settled(model)

    async def second(hashing):
        assert hashing.hashes.get(model) == sha(b"weights" * 1_000)
        assert hashing.hashed == []
        content = b"WEIGHTS" * 1_000
        model.write_bytes(content)
        os.utime(model, ns=(1, 1))
        assert hashing.hashes.get(model) is None
        assert await hashing.settled(model) == sha(content)

    with_hashing(tmp_path, first)
    with_hashing(tmp_path, second)


def test_a_doubted_file_is_hashed_again(tmp_path, model):
    async def test(hashing):
        await hashing.settled(model)
        hashing.hashes.forget(model)
        await hashing.settled(model)
        assert len(hashing.hashed) == 2

    with_hashing(tmp_path, test)


def test_a_failed_hashing_is_tried_again_when_asked_again(tmp_path, model):
    async def test(hashing):
        hashing.fails = True
        assert hashing.hashes.get(model) is None
        async with asyncio.timeout(5):
            while len(hashing.hashed) < 2:
                hashing.hashes.get(model)
                await asyncio.sleep(0.005)
        hashing.fails = False
        assert await hashing.settled(model)

    with_hashing(tmp_path, test)


@pytest.mark.parametrize("content", [b"", b"{}", b"[[1]]", b"[" * 100_000, b'[["/m", 1, 2, 3]]', b"\xff"])
def test_a_damaged_memory_is_no_memory(tmp_path, model, content):
    (tmp_path / "hashes.json").write_bytes(content)

    async def test(hashing):
        assert await hashing.settled(model) == sha(b"weights" * 1_000)

    with_hashing(tmp_path, test)


def test_a_file_that_is_not_there_has_no_hash_and_starts_nothing(tmp_path):
    async def test(hashing):
        assert hashing.hashes.get(tmp_path / "none") is None
        assert hashing.hashed == []

    with_hashing(tmp_path, test)
