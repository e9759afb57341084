"""Transfers between real nodes when somebody lies, stalls, is full, is slow or wants too much."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from protocol.quic.interface import TransferObserved
from stage_agent.artifacts.errors import ArtifactError
from stage_agent.artifacts.events import ArtifactDiscarded, ArtifactFetched, OwnFileDamaged, PeerMisbehaved
from stage_agent.artifacts.wire import (
    ARTIFACT_KIND,
    Complaint,
    FileRequest,
    Granted,
    Listed,
    ListRequest,
    Noted,
    Refused,
    decode_reply,
    decode_request,
    encode,
    framed,
    read_frame,
)
from stage_agent.model_source import open_model
from tests.fixtures_model import gguf_bytes, metadata, safetensors_bytes, tensors
from tests.integration.artifact_mesh import Holder, asked_for, assign, assignment_of, holders
from tests.integration.test_artifacts import MIB, packaged, plain
from tests.integration.transport_mesh import eventually, run
from tests.unit.artifacts.stores import small_disk


def instead(holder: Holder, kind: type, answer) -> None:
    """The holder answers requests of ``kind`` with ``answer(request, writer)`` and others honestly."""

    async def on_bulk(peer, _kind, header, reader, writer) -> None:
        request = decode_request(header)
        if isinstance(request, kind):
            await answer(request, writer)
            await writer.drain()
        else:
            await holder.artifacts.on_bulk(peer, header, reader, writer)

    holder.node.transport.on_bulk = on_bulk


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def lies_about_size(request, writer):
    writer.write(framed(Granted(size_bytes=request.length + 1, length=request.length)) + bytes(1_000))


def promises_less(request, writer):
    writer.write(framed(Granted(size_bytes=request.length, length=request.length - 1)) + bytes(1_000))


def talks_nonsense(_request, writer):
    writer.write(b"\0\0\0\5hello")


def talks_of_something_else(_request, writer):
    writer.write(framed(Listed(form="files")))


def never_ends_its_frame(_request, writer):
    writer.write(b"\xff\xff\xff\xff")


def sends_less(request, writer):
    writer.write(framed(Granted(size_bytes=request.length, length=request.length)) + bytes(1_000))


@pytest.mark.parametrize(
    ("liar", "fault"),
    [
        (lies_about_size, "wrong_size"),
        (promises_less, "wrong_size"),
        (talks_nonsense, None),
        (talks_of_something_else, "malformed"),
        (never_ends_its_frame, None),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_left_and_the_next_one_is_asked(tmp_path, liar, fault):
    path, content, digest = plain(tmp_path, 2)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": path, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 0, 2)
            assign(gamma, stage, alpha, beta)
            first, second = asked_for(hashlib.sha256(content).hexdigest(), alpha, beta)

            async def answer(request, writer):
                liar(request, writer)

            instead(first, FileRequest, answer)
            assert (await gamma.ensure(stage)).read_bytes() == content
            assert gamma.seen(ArtifactFetched)[0].peers == (second.id,)
            assert [(event.peer, event.fault) for event in gamma.seen(PeerMisbehaved)] == (
                [(first.id, fault)] if fault else []
            )

    run(main())


def test_a_stalled_peer_is_left_at_the_deadline_and_what_it_gave_is_kept(tmp_path):
    path, content, digest = plain(tmp_path, 4)

    async def main():
        settings = {"gamma": {"stall_timeout_us": 400_000}}
        async with holders(tmp_path, {"alpha": path, "beta": path, "gamma": None}, settings=settings) as made:
            alpha, beta, gamma = made
            stage = assignment_of(digest, 0, 2)
            assign(gamma, stage, alpha, beta)
            first, second = asked_for(hashlib.sha256(content).hexdigest(), alpha, beta)
            over = asyncio.Event()

            async def stall(request, writer):
                writer.write(framed(Granted(size_bytes=len(content), length=request.length)) + content[:MIB])
                await writer.drain()
                await over.wait()

            instead(first, FileRequest, stall)
            assert (await gamma.ensure(stage)).read_bytes() == content
            over.set()
            (fetched,) = gamma.seen(ArtifactFetched)
            assert fetched.fetched_bytes == len(content)
            assert fetched.peers == (first.id, second.id)

    run(main())


def test_a_listing_of_other_files_than_the_model_is_found_out_and_the_next_peer_is_asked(tmp_path):
    path, content, digest = plain(tmp_path, 2)
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_bytes(metadata(layers=2), tensors(2), fill=9))

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": path, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 0, 2)
            assign(gamma, stage, alpha, beta)
            liar = min((alpha, beta), key=lambda holder: holder.id)  # who is asked for the list
            liar.models[digest] = other  # a whole, consistent file, but not that model
            got = await gamma.ensure(stage)
            assert got.read_bytes() == content
            assert [(event.peer, event.fault) for event in gamma.seen(PeerMisbehaved)] == [(liar.id, "wrong_model")]
            wrong = hashlib.sha256(other.read_bytes()).hexdigest()
            assert [event.sha256 for event in gamma.seen(ArtifactDiscarded)] == [wrong]

    run(main())


def test_a_manifest_of_another_model_is_reported_and_not_followed(tmp_path):
    directory, _, digest = packaged(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            raw = (directory / "model-package.json").read_bytes().replace(b'"layer_count": 4', b'"layer_count": 9')

            async def answer(_request, writer):
                writer.write(framed(Listed(form="layer_package", manifest_bytes=len(raw))) + raw)

            instead(alpha, ListRequest, answer)
            with pytest.raises(ArtifactError, match="missing"):
                await beta.ensure(stage)
            assert beta.seen(PeerMisbehaved)[0].fault == "wrong_manifest"
            assert not beta.seen(ArtifactFetched)

    run(main())


def test_a_full_disk_refuses_in_one_line_leaves_nothing_and_passes_when_there_is_room(tmp_path):
    path, content, digest = plain(tmp_path, 6)

    async def main(disk):
        async with holders(tmp_path, {"alpha": path, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            ballast = disk / "ballast"

            async def fill_meanwhile(request, writer):
                writer.write(framed(Granted(size_bytes=len(content), length=request.length)) + content[: 2 * MIB])
                await writer.drain()
                await eventually((disk / "artifacts" / "partial").exists)
                ballast.write_bytes(bytes(int(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize) - MIB // 2))
                writer.write(content[2 * MIB :])

            instead(alpha, FileRequest, fill_meanwhile)
            with pytest.raises(ArtifactError, match="disk is full") as caught:
                await beta.ensure(stage)
            assert caught.value.reason == "disk_full"
            assert list((disk / "artifacts" / "partial").iterdir()) == [], "the disk is not left full"
            with pytest.raises(ArtifactError, match="no room") as caught:
                await beta.ensure(stage)
            assert caught.value.reason == "store_full", "the next attempt does not even begin"
            ballast.unlink()
            alpha.node.transport.on_bulk = alpha._on_bulk
            assert (await beta.ensure(stage)).read_bytes() == content

    with small_disk(tmp_path / "disk", 8) as disk:
        (tmp_path / "cache-beta").symlink_to(disk / "artifacts")
        (disk / "artifacts").mkdir()
        run(main(disk))


def test_a_store_that_is_too_small_never_evicts_what_a_live_stage_reads(tmp_path):
    directory, manifest, digest = packaged(tmp_path)
    shared = sum(manifest["shared"][part]["artifact_bytes"] for part in ("metadata", "embeddings", "output"))
    layers = [entry["artifact_bytes"] for entry in manifest["layers"]]

    async def main():
        settings = {"beta": {"store_bytes_max": shared + layers[0] + layers[1]}}
        async with holders(tmp_path, {"alpha": directory, "beta": None}, settings=settings) as (alpha, beta):
            low, high = assignment_of(digest, 0, 2), assignment_of(digest, 3, 4)
            assign(beta, assignment_of(digest, 0, 4), alpha)
            path = await beta.ensure(low)
            with pytest.raises(ArtifactError, match="no room") as caught:
                await beta.ensure(high)
            assert caught.value.reason == "store_full"
            assert all((path / entry["path"]).exists() for entry in manifest["layers"][:2])
            beta.artifacts.release(low)
            await beta.ensure(high)
            assert beta.seen(ArtifactDiscarded)[0].reason == "evicted"
            assert (path / manifest["layers"][3]["path"]).exists()
            assert not all((path / entry["path"]).exists() for entry in manifest["layers"][:2])
            (fact,) = beta.artifacts.facts([open_model(directory)])
            assert fact.missing_bytes > 0
            beta.artifacts.release(low)  # once too often
            beta.artifacts.release(high)

    run(main())


def test_a_holder_serves_so_many_at_once_and_tells_others_to_wait(tmp_path):
    path, content, digest = plain(tmp_path, 2)

    async def main():
        settings = {"alpha": {"uploads_max": 1, "bandwidth_limit_bytes_per_s": 2 * MIB}}
        async with holders(tmp_path, {"alpha": path, "beta": None, "gamma": None}, settings=settings) as made:
            alpha, beta, gamma = made
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            assign(gamma, stage, alpha)
            most = 0

            async def watch():
                nonlocal most
                while True:
                    most = max(most, alpha.artifacts.server.uploads)
                    await asyncio.sleep(0.01)

            watching = asyncio.ensure_future(watch())
            paths = await asyncio.gather(beta.ensure(stage), gamma.ensure(stage))
            watching.cancel()
            assert [each.read_bytes() for each in paths] == [content, content]
            assert most == 1
            assert alpha.artifacts.server.uploads == 0

    run(main())


@pytest.mark.parametrize("who", ["alpha", "beta"])
def test_a_bandwidth_limit_is_kept_at_either_end_and_is_not_mistaken_for_the_link(tmp_path, who):
    path, content, digest = plain(tmp_path, 6)

    async def main():
        rate = 4 * MIB
        settings = {who: {"bandwidth_limit_bytes_per_s": rate}}
        async with holders(tmp_path, {"alpha": path, "beta": None}, settings=settings) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            await beta.ensure(stage)
            (fetched,) = beta.seen(ArtifactFetched)
            ideal_us = len(content) * 1_000_000 // rate
            assert fetched.duration_us >= ideal_us * 0.85
            assert fetched.duration_us <= ideal_us * 1.5, "with the tests' other work"
            await alpha.node.until(TransferObserved, lambda event: event.direction == "send")
            samples = [event for node in (alpha.node, beta.node) for event in node.seen(TransferObserved)]
            large = [event for event in samples if event.size >= 524_288]
            assert {event.direction for event in large} == {"send", "receive"}
            assert all(event.limited_by != "link" for event in large)

    run(main())


def test_two_loads_of_the_same_files_fetch_them_once(tmp_path):
    directory, _, digest = packaged(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stages = [assignment_of(digest, 0, 3), assignment_of(digest, 1, 4)]
            assign(beta, assignment_of(digest, 0, 4), alpha)
            paths = await asyncio.gather(*(beta.ensure(stage) for stage in stages))
            assert paths[0] == paths[1]
            hashes = [event.sha256 for event in beta.seen(ArtifactFetched)]
            assert len(hashes) == len(set(hashes)) == 7
            assert open_model(paths[0]).diagnostics == ()

    run(main())


def test_a_split_model_arrives_with_the_names_that_engines_expect(tmp_path):
    specs = tensors(2)
    directory = tmp_path / "operator"
    directory.mkdir()
    for index, part in enumerate((specs[:3], specs[3:])):
        facts = metadata(layers=2) if index == 0 else {}
        facts |= {"split.no": index, "split.count": 2, "split.tensors.count": len(specs)}
        (directory / f"m-{index + 1:05}-of-00002.gguf").write_bytes(gguf_bytes(facts, part))
    digest = open_model(directory).digest

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            path = await beta.ensure(stage)
            assert path.name == "m-00001-of-00002.gguf"
            assert open_model(path).digest == digest

    run(main())


def test_a_safetensors_checkpoint_is_fetched_with_its_configuration(tmp_path):
    directory = tmp_path / "operator"
    directory.mkdir()
    config = (
        b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64,'
        b' "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 100}'
    )
    (directory / "config.json").write_bytes(config)
    entries = {
        "model.embed_tokens.weight": ("F16", (100, 64), 12_800),
        "model.layers.0.self_attn.q_proj.weight": ("F16", (64, 64), 8_192),
        "model.norm.weight": ("F16", (64,), 128),
        "lm_head.weight": ("F16", (100, 64), 12_800),
    }
    (directory / "model.safetensors").write_bytes(safetensors_bytes(entries))
    digest = open_model(directory).digest

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 1)
            assign(beta, stage, alpha)
            path = await beta.ensure(stage)
            assert open_model(path).digest == digest

    run(main())


def test_the_operators_own_incomplete_package_is_completed_beside_it_and_not_in_it(tmp_path):
    directory, manifest, digest = packaged(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    for name in ("shared", "layers"):
        (own / name).mkdir()
    kept = [manifest["shared"]["metadata"]["path"], manifest["layers"][0]["path"], "model-package.json"]
    for name in kept:
        (own / name).write_bytes((directory / name).read_bytes())
    before = sorted(own.rglob("*"))

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": own}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            path = await beta.ensure(stage)
            fetched = {event.sha256 for event in beta.seen(ArtifactFetched)}
            wanted = (manifest["shared"]["embeddings"], manifest["layers"][1])
            assert fetched == {entry["sha256"].lower() for entry in wanted}
            assert (path / kept[1]).resolve() == own / kept[1]
            assert sorted(own.rglob("*")) == before
            again = await beta.ensure(stage)
            assert again == path

    run(main())


def test_a_partly_fetched_package_is_passed_on_to_a_third_node(tmp_path):
    directory, _, digest = packaged(tmp_path)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None, "gamma": None}) as (alpha, beta, gamma):
            stage = assignment_of(digest, 1, 3)
            assign(beta, stage, alpha)
            await beta.ensure(stage)
            assign(gamma, stage, beta)
            (fact,) = beta.artifacts.facts([open_model(directory)])
            gamma.rows.pop(alpha.id)
            gamma.rows[beta.id] = gamma.rows[beta.id].model_copy(update={"models": (fact,)})
            path = await gamma.ensure(stage)
            assert open_model(path).digest == digest
            assert {peer for event in gamma.seen(ArtifactFetched) for peer in event.peers} == {beta.id}

    run(main())


def test_a_blob_damaged_since_is_fetched_again_by_the_next_load(tmp_path):
    path, content, digest = plain(tmp_path, 2)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            got = await beta.ensure(stage)
            blob = got.resolve()
            blob.chmod(0o644)
            blob.write_bytes(content[:-1] + b"!")
            assert (await beta.ensure(stage)).read_bytes() == content
            assert len(beta.seen(ArtifactFetched)) == 2
            assert beta.seen(ArtifactDiscarded)[0].reason == "damaged"

    run(main())


def test_a_peer_revoked_while_its_stream_stands_gets_no_further_answer(tmp_path):
    path, _, digest = plain(tmp_path, 2)

    async def main():
        settings = {"alpha": {"mode": "open"}}
        async with holders(tmp_path, {"alpha": path, "beta": None}, settings=settings) as (alpha, beta):
            request = ListRequest(model_digest=digest)
            reader, writer = await beta.node.transport.open_bulk(alpha.id, ARTIFACT_KIND, encode(request))
            first = decode_reply(await read_frame(reader, MIB))
            assert first != Refused(reason="not_allowed", retry_after_us=1_000_000)
            alpha.node.book.revoke(
                beta.id, signer_public_key=alpha.node.identity.public_key, sign=alpha.node.identity.sign
            )
            writer.write(framed(request))
            await writer.drain()
            assert decode_reply(await read_frame(reader, MIB)) == Refused(
                reason="not_allowed", retry_after_us=1_000_000
            )
            writer.abort()

    run(main())


@pytest.mark.parametrize("header", [b"", b"garbage", b"\xdf\xff\xff\xff\xff" * 20, b"\x81" * 60_000])
def test_a_stream_with_a_nonsense_header_is_closed_and_the_holder_goes_on(tmp_path, header):
    path, content, digest = plain(tmp_path, 1)

    async def main():
        async with holders(tmp_path, {"alpha": path, "beta": None}) as (alpha, beta):
            reader, writer = await beta.node.transport.open_bulk(alpha.id, ARTIFACT_KIND, header)
            assert await reader.read(1) == b""
            writer.abort()
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            assert (await beta.ensure(stage)).read_bytes() == content

    run(main())


def test_a_request_past_the_end_of_the_file_is_refused(tmp_path):
    path, content, digest = plain(tmp_path, 1)

    async def main():
        settings = {"alpha": {"mode": "open"}}
        async with holders(tmp_path, {"alpha": path, "beta": None}, settings=settings) as (alpha, beta):
            await beta.ensure(assignment_of(digest, 0, 2))
            sha256 = hashlib.sha256(content).hexdigest()
            request = FileRequest(model_digest=digest, sha256=sha256, offset=len(content), length=1)
            for asked, reason in (
                (request, "range"),
                (request.model_copy(update={"offset": 2**53}), "range"),
                (request.model_copy(update={"sha256": "00" * 32}), "not_found"),
                (request.model_copy(update={"model_digest": "00" * 32}), "not_found"),
            ):
                reader, writer = await beta.node.transport.open_bulk(alpha.id, ARTIFACT_KIND, encode(asked))
                reply = decode_reply(await read_frame(reader, MIB))
                assert isinstance(reply, Refused)
                assert reply.reason == reason
                writer.abort()

    run(main())


def test_the_operator_hears_of_an_own_file_that_is_not_what_its_manifest_says(tmp_path):
    directory, manifest, digest = packaged(tmp_path)
    damaged = directory / manifest["layers"][1]["path"]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            with pytest.raises(ArtifactError, match="wrong bytes"):
                await beta.ensure(stage)
            await eventually(lambda: bool(alpha.seen(OwnFileDamaged)))
            assert alpha.seen(OwnFileDamaged)[0].path == str(damaged)

    run(main())


def test_many_complaints_about_one_file_make_the_holder_hash_it_once(tmp_path):
    directory, manifest, digest = packaged(tmp_path)
    damaged = directory / manifest["layers"][1]["path"]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    complaint = Complaint(model_digest=digest, sha256=manifest["layers"][1]["sha256"].lower())

    async def main():
        async with holders(tmp_path, {"alpha": directory, "beta": None}) as (alpha, beta):

            async def complain(times):
                reader, writer = await beta.node.transport.open_bulk(alpha.id, ARTIFACT_KIND, encode(complaint))
                for _ in range(times):
                    assert decode_reply(await read_frame(reader, MIB)) == Noted()
                    writer.write(framed(complaint))
                    await writer.drain()
                writer.abort()

            await complain(3)
            assert alpha.seen(OwnFileDamaged) == [], "who was assigned nothing is not listened to"
            assign(beta, assignment_of(digest, 1, 2), alpha)
            await complain(5)
            await eventually(lambda: bool(alpha.seen(OwnFileDamaged)))
            await complain(5)
            assert len(alpha.seen(OwnFileDamaged)) == 1

    run(main())


def test_nothing_of_a_cancelled_or_failed_load_stays_pinned_locked_or_open(tmp_path):
    path, content, digest = plain(tmp_path, 4)

    async def main():
        settings = {"alpha": {"bandwidth_limit_bytes_per_s": 2 * MIB}, "beta": {"store_bytes_max": len(content)}}
        async with holders(tmp_path, {"alpha": path, "beta": None}, settings=settings) as (alpha, beta):
            stage = assignment_of(digest, 0, 2)
            assign(beta, stage, alpha)
            descriptors = open_descriptors()
            for pause in (0.0, 0.05, 0.2, 0.6):
                loading = asyncio.ensure_future(beta.ensure(stage))
                await asyncio.sleep(pause)
                loading.cancel()
                await asyncio.wait({loading})
            await eventually(lambda: alpha.artifacts.server.uploads == 0)
            await eventually(lambda: open_descriptors() <= descriptors)
            assert beta.artifacts._store._pins == {}
            assert beta.artifacts._store._arriving == {}
            assert (await beta.ensure(stage)).read_bytes() == content

    run(main())
