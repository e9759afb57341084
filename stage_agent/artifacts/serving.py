"""The holder's side of a stream of kind ``artifact``: judge each request, answer it, send within the limits.

Requests of one stream are answered in order; the stream ends when the peer closes it, stays silent for the transport's
idle timeout, or says something that is not a request.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from config.settings import ArtifactSettings
from protocol.errors import WireError
from protocol.ids import NodeId
from protocol.quic.bulk import BulkReader, BulkWriter, Meter
from stage_agent.artifacts.policy import AssignedRange, Verdict, judge_file, judge_manifest
from stage_agent.artifacts.shelf import Shelf, ShownFile
from stage_agent.artifacts.token_bucket import TokenBucket
from stage_agent.artifacts.wire import (
    MAX_REQUEST_BYTES,
    Complaint,
    FileRequest,
    Granted,
    Listed,
    ListRequest,
    Noted,
    Refused,
    Request,
    decode_request,
    framed,
    read_frame,
)

CHUNK_BYTES = 524_288
RETRY_US = 1_000_000
COMPLAINT_SPACING_US = 600_000_000
"""A file that a peer complained about is hashed again at most this often."""
MAX_COMPLAINTS = 1_024


class ArtifactServer:
    """``assigned`` are a peer's stages as its row says; ``recheck`` hashes a doubted file again, in its own task."""

    def __init__(
        self,
        *,
        settings: ArtifactSettings,
        shelf: Shelf,
        admitted: Callable[[NodeId], bool],
        assigned: Callable[[NodeId], Iterable[AssignedRange]],
        recheck: Callable[[str, Path], object],
        clock_us: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._admitted = admitted
        self._assigned = assigned
        self._recheck = recheck
        self._clock_us = clock_us
        self._bucket = TokenBucket(settings.bandwidth_limit_bytes_per_s)
        self._complaints: dict[str, int] = {}
        self.uploads = 0
        self.sent_bytes = 0

    async def serve(self, peer: NodeId, header: bytes, reader: BulkReader, writer: BulkWriter) -> None:
        """Answer until the stream ends. Raises what a peer can cause (``WireError``, ``OSError``, ``TimeoutError``)."""
        raw = header
        while True:
            await self._answer(peer, decode_request(raw), writer)
            try:
                raw = await read_frame(reader, MAX_REQUEST_BYTES)
            except EOFError:
                return

    async def _answer(self, peer: NodeId, request: Request, writer: BulkWriter) -> None:
        match request:
            case ListRequest():
                await self._list(peer, request, writer)
            case FileRequest():
                await self._file(peer, request, writer)
            case Complaint():
                await self._note(peer, request)
                writer.write(framed(Noted()))
                await writer.drain()

    async def _list(self, peer: NodeId, request: ListRequest, writer: BulkWriter) -> None:
        verdict = judge_manifest(
            self._settings.mode,
            admitted=self._admitted(peer),
            assigned=self._assigned(peer),
            model_digest=request.model_digest,
        )
        if verdict != "allowed":
            return await _refuse(writer, Refused(reason=verdict, retry_after_us=RETRY_US))
        listing = await self._shelf.listing(request.model_digest)
        if listing is None:
            return await _refuse(writer, Refused(reason="not_found"))
        if listing.manifest is not None:
            listed = Listed(form="layer_package", manifest_bytes=len(listing.manifest))
            writer.write(framed(listed) + listing.manifest)
        elif listing.files:
            writer.write(framed(Listed(form="files", files=listing.files)))
        else:
            return await _refuse(writer, Refused(reason="preparing", retry_after_us=RETRY_US))
        await writer.drain()
        return None

    async def _file(self, peer: NodeId, request: FileRequest, writer: BulkWriter) -> None:
        if self._settings.mode == "off":
            return await _refuse(writer, Refused(reason="mode_off"))
        if self.uploads >= self._settings.uploads_max:
            return await _refuse(writer, Refused(reason="busy", retry_after_us=RETRY_US))
        self.uploads += 1
        try:
            verdict, shown = await self._judge(peer, request.model_digest, request.sha256)
            if verdict != "allowed":
                return await _refuse(writer, Refused(reason=verdict, retry_after_us=RETRY_US))
            assert shown is not None
            if request.offset + request.length > shown.size_bytes:
                return await _refuse(writer, Refused(reason="range"))
            paced = self._settings.bandwidth_limit_bytes_per_s is not None
            writer.write(framed(Granted(size_bytes=shown.size_bytes, length=request.length, paced=paced)))
            if request.paced:
                measures_no_link(writer.meter)
            await self._send(shown.path, request.offset, request.length, writer)
        finally:
            self.uploads -= 1
        return None

    async def _judge(
        self, peer: NodeId, model_digest: str, sha256: str
    ) -> tuple[Verdict | Literal["not_found"], ShownFile | None]:
        """Who has nothing to do with the model does not even learn whether its files are here."""
        mode, admitted, assigned = self._settings.mode, self._admitted(peer), tuple(self._assigned(peer))
        verdict = judge_manifest(mode, admitted=admitted, assigned=assigned, model_digest=model_digest)
        if verdict != "allowed":
            return verdict, None
        shown = await self._shelf.find(model_digest, sha256)
        if shown is None:
            return "not_found", None
        return judge_file(mode, admitted=admitted, assigned=assigned, uses=shown.uses), shown

    async def _send(self, path: Path, offset: int, length: int, writer: BulkWriter) -> None:
        """Reads ahead by one chunk. A file that became shorter breaks the stream: the peer must not take it for the rest."""
        loop = asyncio.get_running_loop()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        reading: asyncio.Future[bytes] | None = None
        try:
            end = offset + length
            while offset < end or reading is not None:
                chunk = b"" if reading is None else await reading
                reading = None
                if offset < end:
                    size = min(CHUNK_BYTES, end - offset)
                    reading = loop.run_in_executor(None, _read_exactly, descriptor, size, offset)
                    offset += size
                if chunk:
                    await self._pace(len(chunk))
                    writer.write(chunk)
                    await writer.drain()
                    self.sent_bytes += len(chunk)
            writer.meter.report()  # whoever got it may break the stream off
        finally:
            if reading is not None:
                await asyncio.wait({reading})
            os.close(descriptor)

    async def _pace(self, size: int) -> None:
        wait_us = self._bucket.take(size, self._clock_us())
        if wait_us:
            await asyncio.sleep(wait_us / 1_000_000)

    async def _note(self, peer: NodeId, request: Complaint) -> None:
        sha256 = request.sha256
        verdict, shown = await self._judge(peer, request.model_digest, sha256)
        now_us = self._clock_us()
        last_us = self._complaints.get(sha256)
        recent = last_us is not None and now_us - last_us < COMPLAINT_SPACING_US
        if verdict != "allowed" or shown is None or recent:
            return
        while len(self._complaints) >= MAX_COMPLAINTS:
            del self._complaints[next(iter(self._complaints))]
        self._complaints[sha256] = now_us
        self._recheck(sha256, shown.path)


def measures_no_link(meter: Meter) -> None:
    """One end limits itself, so the other end waits without the link being slow: its samples are lower bounds only."""
    observe = meter.observe
    meter.observe = lambda direction, size, duration_us, limit: observe(
        direction, size, duration_us, "app" if limit == "link" else limit
    )


async def _refuse(writer: BulkWriter, refused: Refused) -> None:
    writer.write(framed(refused))
    await writer.drain()


def _read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    parts = []
    while size:
        part = os.pread(descriptor, size, offset)
        if not part:
            raise WireError("truncated", "a model file became shorter while it was sent")
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return b"".join(parts)
