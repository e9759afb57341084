"""Model files between nodes over real transports."""

import asyncio
import hashlib
import os

import pytest

from protocol.errors import ModelError
from protocol.quic.interface import TransferObserved
from stage_agent.artifacts.errors import ArtifactError
from stage_agent.artifacts.events import ArtifactDiscarded, ArtifactFetched, MixedPartsWrong, PeerMisbehaved
from stage_agent.model_source import open_model, tensor_extents
from tests.fixtures_model import TensorSpec, gguf_bytes, metadata, tensors, write_layer_package
from tests.integration.artifact_mesh import (
    asked_for,
    assign,
    assignment_of,
    flip,
    flip_then_hang_up,
    hang_up,
    holders,
    row_of,
    tamper,
)
from tests.integration.transport_mesh import eventually, run

MIB = 1_048_576


def packaged(tmp_path, layers=4):
    directory = tmp_path / "operator"
    manifest = write_layer_package(directory, layers)
    return directory, manifest, open_model(directory).digest


def plain(tmp_path, mib=8):
    """A GGUF file of about ``mib`` MiB with bytes that are all different from place to place."""
    rows = mib * MIB // 256 // 4 + 1
    specs = tensors(2)
    specs.append(TensorSpec("blk.1.ffn_up.weight", (64, 4 * rows)))
    content = bytearray(gguf_bytes(metadata(layers=2), specs))
    half = len(content) // 2
    content[half:] = os.urandom(len(content) - half)
    path = tmp_path / "operator" / "tiny.gguf"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path, bytes(content), open_model(path).digest


def test_a_node_fetches_only_the_files_of_its_own_layers_and_can_read_them(tmp_path):
    directory, manifest, digest = packaged(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 1, 3)
            assign(beta, stage, alpha)
            path = await beta.ensure(stage)
            assert open_model(path).digest == digest
            assert [extent.name for extent in tensor_extents(path, 1, 3, False, False)] == [
                "blk.1.attn_q.weight", "blk.1.attn_norm.weight", "blk.2.attn_q.weight", "blk.2.attn_norm.weight",
            ]  # fmt: skip
            entries = [manifest["shared"]["metadata"], *manifest["layers"][1:3]]
            assert sorted(event.sha256 for event in beta.seen(ArtifactFetched)) == sorted(
                entry["sha256"].lower() for entry in entries
            )
            wanted = sum(entry["artifact_bytes"] for entry in entries)
            assert beta.progress[-1] == (wanted, wanted)
            assert beta.progress == sorted(beta.progress)
            (fact,) = beta.artifacts.facts([open_model(directory)])
            assert fact.missing_bytes == open_model(directory).weight_bytes - fact.cached_bytes
            assert fact.cached_bytes == sum(entry["tensor_bytes"] for entry in entries)
            assert fact.artifact_transfer

    run(main())


@pytest.mark.parametrize(("start", "end"), [(0, 2), (2, 4), (0, 4)])
def test_every_place_in_the_pipeline_can_be_fetched(tmp_path, start, end):
    directory, _, digest = packaged(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, start, end)
            assign(beta, stage, alpha)
            path = await beta.ensure(stage)
            names = [extent.name for extent in tensor_extents(path, start, end, start == 0, end == 4)]
            assert names == [extent.name for extent in tensor_extents(directory, start, end, start == 0, end == 4)]

    run(main())


def test_a_second_load_takes_what_is_there_and_a_grown_range_fetches_the_rest(tmp_path):
    directory, _, digest = packaged(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 1, 3)
            assign(beta, stage, alpha)
            first = await beta.ensure(stage)
            fetched = len(beta.seen(ArtifactFetched))
            alpha.rows.clear()  # nothing would be given any more
            assert await beta.ensure(stage) == first
            assert len(beta.seen(ArtifactFetched)) == fetched
            wider = assignment_of(digest, 0, 3)
            assign(beta, wider, alpha)
            assert await beta.ensure(wider) == first
            assert len(beta.seen(ArtifactFetched)) == fetched + 2

    run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_plain_file_is_fetched_whole_and_both_ends_measure_the_link_on_it(tmp_path, loop):
    path, content, digest = plain(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 1)
            assign(beta, stage, alpha)
            got = await beta.ensure(stage)
            assert got.name == "tiny.gguf"
            assert got.read_bytes() == content
            name = hashlib.sha256(content).hexdigest()
            assert (beta.root / name[:2] / name).stat().st_mode & 0o777 == 0o444
            received = await beta.node.until(TransferObserved, lambda event: event.direction == "receive")
            sent = await alpha.node.until(TransferObserved, lambda event: event.direction == "send")
            assert received.peer == alpha.id
            assert sent.peer == beta.id
            assert min(received.size, sent.size) >= 524_288, "large enough to count as bandwidth"
            (fact,) = beta.artifacts.facts([open_model(path)])
            assert (fact.missing_bytes, fact.cached_bytes) == (0, open_model(path).weight_bytes)

    run(main(), loop=loop)


@pytest.mark.parametrize(
    ("mode", "whose", "given"),
    [
        ("off", "its own", False),
        ("trusted", "its own", True),
        ("trusted", "another model's", False),
        ("trusted", "none", False),
        ("open", "none", True),
    ],
)
def test_who_gets_files(tmp_path, mode, whose, given):
    directory, _, digest = packaged(tmp_path)

    async def main():
        settings = {"alpha": {"mode": mode}}
        async with holders(tmp_path, {"alpha": directory, "beta": None}, settings=settings) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            if whose != "none":
                assign(beta, stage if whose == "its own" else assignment_of("12" * 32, 0, 2), alpha)
            if given:
                await beta.ensure(stage)
            else:
                with pytest.raises(ArtifactError, match="mode_off" if mode == "off" else "not_allowed"):
                    await beta.ensure(stage)
                assert alpha.artifacts.server.sent_bytes == 0

    run(main())


def test_a_stage_does_not_get_another_stages_layers(tmp_path):
    directory, _, digest = packaged(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            assign(beta, assignment_of(digest, 0, 1), alpha)
            with pytest.raises(ArtifactError, match="not_allowed"):
                await beta.ensure(assignment_of(digest, 0, 2))

    run(main())


def test_a_node_with_transfers_off_says_what_to_do_and_touches_no_disk(tmp_path):
    directory, _, digest = packaged(tmp_path)

    async def main():
        settings = {"beta": {"mode": "off"}}
        async with holders(tmp_path, {"alpha": directory, "beta": None}, settings=settings) as (_, beta):
            with pytest.raises(ModelError, match="copy the file"):
                await beta.ensure(assignment_of(digest, 0, 2))
            assert not beta.root.exists()
            assert not beta.artifacts.facts([open_model(directory)])[0].artifact_transfer

    run(main())


def test_a_broken_stream_is_resumed_where_it_stopped(tmp_path):
    path, content, digest = plain(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            offsets = tamper(alpha, 5 * MIB, hang_up, times=1)
            got = await beta.ensure(stage)
            assert got.read_bytes() == content
            assert offsets[0] == 0
            assert 5 * MIB - 200 < offsets[1] < 5 * MIB, "all but the answer's own bytes were kept"
            assert beta.seen(ArtifactFetched)[0].fetched_bytes == len(content), "no byte came twice"

    run(main())


def test_when_a_peer_is_gone_the_rest_comes_from_another(tmp_path):
    path, content, digest = plain(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": path, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 0, 2)
            assign(gamma, stage, alpha, beta)
            offsets = {}
            for one in (alpha, beta):
                offsets[one.id] = tamper(one, 3 * MIB, hang_up, times=1)
            got = await gamma.ensure(stage)
            assert got.read_bytes() == content
            (fetched,) = gamma.seen(ArtifactFetched)
            assert fetched.fetched_bytes == len(content)
            assert sorted(fetched.peers) == sorted([alpha.id, beta.id])
            assert not gamma.seen(PeerMisbehaved)

    run(main())


def test_a_load_that_was_cancelled_is_resumed_by_the_next_process(tmp_path):
    path, content, digest = plain(tmp_path)

    async def main():
        settings = {"alpha": {"bandwidth_limit_bytes_per_s": 4 * MIB}}
        stage = assignment_of(digest, 0, 2)
        async with holders(tmp_path, {"alpha": path, "beta": None}, settings=settings) as (alpha, beta):
            assign(beta, stage, alpha)
            loading = asyncio.ensure_future(beta.ensure(stage))
            await eventually(lambda: bool(beta.progress) and beta.progress[-1][0] > 2 * MIB)
            loading.cancel()
            await asyncio.wait({loading})
            assert not beta.seen(ArtifactFetched)
        async with holders(tmp_path, {"alpha": path, "beta": None}) as (alpha, beta):
            assign(beta, stage, alpha)
            assert (await beta.ensure(stage)).read_bytes() == content
            assert beta.seen(ArtifactFetched)[0].fetched_bytes < len(content) - 2 * MIB

    run(main())


def test_a_wrong_byte_costs_the_whole_file_is_reported_and_another_peer_is_asked(tmp_path):
    path, content, digest = plain(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": path, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 0, 2)
            assign(gamma, stage, alpha, beta)
            first, second = asked_for(hashlib.sha256(content).hexdigest(), alpha, beta)
            tamper(first, 2 * MIB, flip)
            got = await gamma.ensure(stage)
            assert got.read_bytes() == content
            (blamed,) = gamma.seen(PeerMisbehaved)
            assert (blamed.peer, blamed.fault) == (first.id, "wrong_bytes")
            assert gamma.seen(ArtifactFetched)[0].peers == (second.id,)

    run(main())


def test_a_wrong_byte_among_parts_of_two_peers_blames_nobody_and_begins_anew_from_one(tmp_path):
    path, content, digest = plain(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": path, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 0, 2)
            assign(gamma, stage, alpha, beta)
            first, second = asked_for(hashlib.sha256(content).hexdigest(), alpha, beta)

            acts = iter([flip_then_hang_up, hang_up])

            def first_wrong_then_broken(data, index):
                return next(acts)(data, index)

            tamper(first, 3 * MIB, first_wrong_then_broken, times=2)
            got = await gamma.ensure(stage)
            assert got.read_bytes() == content
            assert gamma.seen(MixedPartsWrong)[0].peers == (first.id, second.id)
            assert not gamma.seen(PeerMisbehaved)
            assert gamma.seen(ArtifactFetched)[0].peers == (second.id,), "parts are not mixed again"

    run(main())


def test_several_holders_share_the_load(tmp_path):
    directory, _, digest = packaged(tmp_path, layers=24)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": directory, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 0, 24)
            assign(gamma, stage, alpha, beta)
            await gamma.ensure(stage)
            shares = [holder.artifacts.server.sent_bytes for holder in (alpha, beta)]
            assert min(shares) > sum(shares) // 10

    run(main())


def test_only_liars_left_means_a_refusal_and_nothing_installed(tmp_path):
    path, _, digest = plain(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            tamper(alpha, 2 * MIB, flip)
            with pytest.raises(ArtifactError, match="sent wrong bytes") as caught:
                await beta.ensure(stage)
            assert caught.value.reason == "gave_up"
            assert list(beta.root.glob("??/*")) == []
            (fact,) = beta.artifacts.facts([open_model(path)])
            assert fact.cached_bytes == 0

    run(main())


def test_a_holder_looks_again_at_a_file_that_arrived_wrong_and_drops_a_damaged_blob(tmp_path):
    path, content, digest = plain(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": None, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            await beta.ensure(stage)
            name = hashlib.sha256(content).hexdigest()
            blob = beta.root / name[:2] / name
            status = blob.stat()
            blob.chmod(0o644)
            with blob.open("r+b") as file:
                file.seek(6 * MIB)
                file.write(b"rot")
            os.utime(blob, ns=(status.st_atime_ns, status.st_mtime_ns))
            blob.chmod(0o444)
            assign(gamma, stage, beta)
            gamma.rows.clear()
            gamma.rows[beta.id] = row_of(beta.node, holds=(digest,))
            with pytest.raises(ArtifactError, match="sent wrong bytes"):
                await gamma.ensure(stage)
            await eventually(lambda: bool(beta.seen(ArtifactDiscarded)))
            assert not blob.exists()
            assert beta.seen(ArtifactDiscarded)[0].reason == "damaged"

    run(main())
