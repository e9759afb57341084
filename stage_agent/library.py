"""The models this node knows: what it can read from its own disk, and what others described.

A model is named by its content digest. The coordinator needs every served model's ``ModelPackage``; a node that cannot
read the file itself asks a node that knows it (``PackageRequest``), checks that the answer has the digest that
was asked for, and keeps it. Reading a file's header is fast, but it is disk work: callers do it in a thread.
"""

from dataclasses import dataclass
from pathlib import Path

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType
from coordinator.model.exchange import package_from_document, package_to_document
from coordinator.model.package import ModelPackage
from protocol.ballots import StageAssignment
from protocol.errors import ModelError, WireError
from stage_agent.model_source import open_model

MAX_MODELS = 16
"""Local models and, separately, models learnt from others."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that was opened on this node."""

    path: Path
    package: ModelPackage


class ModelLibrary:
    """Models read here, and packages learnt from others, by digest."""

    def __init__(self, activation_value_bytes: int = 2, cache_type: CacheType = DEFAULT_CACHE_TYPE) -> None:
        """``cache_type`` sizes what is read here; a learnt package says its own."""
        self._cache_type = cache_type
        self._activation_value_bytes = activation_value_bytes
        self._local: dict[str, LocalModel] = {}
        self._learnt: dict[str, ModelPackage] = {}

    def open(self, path: str) -> LocalModel:
        """Read the header of the model at ``path``. Raises ``ModelError`` in one line. Safe to call in a thread."""
        absolute = Path(path).expanduser().absolute()
        package = open_model(absolute, cache_type=self._cache_type, activation_value_bytes=self._activation_value_bytes)
        return LocalModel(absolute, package)

    def hold(self, model: LocalModel) -> None:
        """``model`` can be read here, whether or not it is served from here."""
        while len(self._local) >= MAX_MODELS and model.package.digest not in self._local:
            del self._local[next(iter(self._local))]
        self._local[model.package.digest] = model

    def local_paths(self) -> dict[str, Path]:
        """Models that can be read here, by digest."""
        return {digest: model.path for digest, model in self._local.items()}

    def packages(self) -> tuple[ModelPackage, ...]:
        """Every package known here, each digest once, by digest."""
        known = {**self._learnt, **{digest: model.package for digest, model in self._local.items()}}
        return tuple(known[digest] for digest in sorted(known))

    def package(self, digest: str) -> ModelPackage | None:
        """The package with ``digest``, read here or learnt."""
        local = self._local.get(digest)
        return local.package if local is not None else self._learnt.get(digest)

    def learn(self, digest: str, document: bytes) -> bool:
        """A peer's answer to ``PackageRequest``; false when it is not the package that was asked for."""
        try:
            package = package_from_document(document)
        except WireError:
            return False
        if package.digest != digest:
            return False
        while len(self._learnt) >= MAX_MODELS:
            del self._learnt[next(iter(self._learnt))]
        self._learnt[digest] = package
        return True

    def document(self, digest: str) -> bytes | None:
        """The package to send to a peer that asked for it."""
        package = self.package(digest)
        return None if package is None else package_to_document(package)

    def path_of(self, assignment: StageAssignment) -> Path:
        """Where this node has the assigned model. Raises ``ModelError`` when it does not."""
        local = self._local.get(assignment.model_digest)
        if local is not None:
            return local.path
        model = self.open(assignment.model_source)
        if model.package.digest != assignment.model_digest:
            raise ModelError(
                f"{model.path} is another model than the plan's ({model.package.digest[:12]}, "
                f"not {assignment.model_digest[:12]}): copy the file from the node that serves it"
            )
        self.hold(model)
        return model.path
