"""Which files a stage needs: from a manifest that is here, or from a peer that lists the model's files."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from protocol.ballots import ArtifactRef, StageAssignment
from protocol.errors import ModelError
from protocol.ids import NodeId
from stage_agent.artifacts.assembly import Assembly
from stage_agent.artifacts.download import Means
from stage_agent.artifacts.session import PEER_FAULTS, HolderSession
from stage_agent.artifacts.stage_files import Listing, check_listing, manifest_at
from stage_agent.artifacts.wire import Listed, ListRequest, Refused
from stage_agent.model_files import PackageFiles, locate


@dataclass(frozen=True, slots=True)
class Wanted:
    """A listing that passed ``check_listing``, and the stage's files in it. ``source`` is the peer that gave it."""

    listing: Listing
    files: tuple[ArtifactRef, ...]
    source: NodeId | None


class Listings:
    """Finds out what a stage needs. Manifests may be large: they are parsed in threads."""

    def __init__(self, means: Means, assembly: Assembly) -> None:
        self._means = means
        self._assembly = assembly

    async def known(self, assignment: StageAssignment, own: Path | None) -> Wanted | None:
        """From a layer package that is here in part, fetched or at the operator's path ``own``: it says what it lacks."""
        return await asyncio.to_thread(self._known, assignment, own)

    async def ask(self, peer: NodeId, assignment: StageAssignment, told: dict[NodeId, str]) -> Wanted | None:
        """From ``peer``; why it gave none is put into ``told``. A listing that cannot be the model's is held against it."""
        session = HolderSession(peer, self._means.open_bulk, self._means.settings)
        try:
            reply = await session.ask(ListRequest(model_digest=assignment.model_digest))
            match reply:
                case Listed(form="layer_package", manifest_bytes=size):
                    listing = Listing(manifest=await session.exactly(size))
                case Listed(files=files):
                    listing = Listing(files)
                case Refused(reason=reason):
                    told[peer] = reason
                    return None
                case _:
                    told[peer] = "answered something else"
                    self._means.blame(peer, assignment.model_digest, "malformed")
                    return None
            wanted = await asyncio.to_thread(check_listing, listing, assignment)
        except PEER_FAULTS as fault:
            told[peer] = str(fault) or type(fault).__name__
            return None
        except ModelError as error:
            told[peer] = str(error)
            self._means.blame(peer, assignment.model_digest, "wrong_manifest")
            return None
        finally:
            await session.end()
        return Wanted(listing, wanted, peer)

    def _known(self, assignment: StageAssignment, own: Path | None) -> Wanted | None:
        for path in (self._assembly.path(assignment.model_digest), own):
            try:
                files = None if path is None else locate(path)
                if isinstance(files, PackageFiles):
                    listing = Listing(manifest=manifest_at(files.directory)[0])
                    return Wanted(listing, check_listing(listing, assignment), None)
            except ModelError:
                continue  # a damaged one is asked for again
        return None
