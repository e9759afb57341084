"""The demo's pretended hardware: a TOML profile, turned into the settings that any node has.

Memory and bandwidth are given relative to the model (see the profile), so that one story fits every GGUF.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.model.package import ModelPackage
from coordinator.planner.memory import Shape, ShapeMemory, minimum_context
from protocol.codec import first_problem
from protocol.errors import ConfigurationError

MAX_NODES = 16
HEADROOM_MILLI = 900
"""Usable share of detected memory when 10 % headroom is held back."""


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NodeShape(_Closed):
    """One pretended machine."""

    memory_ratio: float = Field(gt=0, le=1_000)
    model_read_ms: float = Field(gt=0, le=1e7)


class LinkShape(_Closed):
    """One direction of a pretended link; the keys are those of the conditioner's file."""

    delay_ms: float = Field(default=0.0, ge=0, le=60_000)
    jitter_ms: float = Field(default=0.0, ge=0, le=60_000)
    loss: float = Field(default=0.0, ge=0, le=1)
    mib_per_s: float | None = Field(default=None, gt=0, le=1e6)
    mtu: int | None = Field(default=None, ge=1_200, le=65_535)


class DemoProfile(_Closed):
    """The whole file."""

    why: str
    nodes: Annotated[dict[str, NodeShape], Field(min_length=1, max_length=MAX_NODES)]
    links: dict[str, LinkShape] = {}


@dataclass(frozen=True, slots=True)
class ShapedMachine:
    """What one node is told to pretend: bytes, bytes per second."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: int


def load_profile(path: Path | None, nodes: int | None) -> DemoProfile:
    """The profile at ``path`` (``None`` = the built-in one), cut or repeated to ``nodes`` machines.

    Repeated machines are numbered (``laptop-2``) and have the links of the one they repeat.
    """
    name = str(path) if path else "built-in demo profile"
    try:
        text = (
            path.read_text("utf-8")
            if path
            else resources.files("config").joinpath("profiles/demo.toml").read_text("utf-8")
        )
        profile = DemoProfile.model_validate(tomllib.loads(text))
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot be read ({error.strerror}); name a readable profile file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name}: not TOML ({error}); mend the file") from None
    except ValidationError as error:
        raise ConfigurationError(f"{name}: {first_problem(error)}; mend the file") from None
    return _resized(profile, nodes if nodes is not None else len(profile.nodes))


def _resized(profile: DemoProfile, count: int) -> DemoProfile:
    if not 1 <= count <= MAX_NODES:
        raise ConfigurationError(f"--nodes {count}: a demo has 1 to {MAX_NODES} nodes")
    originals = list(profile.nodes)
    origin: dict[str, str] = {}
    for index in range(count):
        original = originals[index % len(originals)]
        copy = index // len(originals)
        origin[original if copy == 0 else f"{original}-{copy + 1}"] = original
    fallback = LinkShape(delay_ms=0.4)
    links = {
        f"{a} -> {b}": profile.links.get(f"{origin[a]} -> {origin[b]}", fallback)
        for a in origin
        for b in origin
        if a != b
    }
    return DemoProfile(why=profile.why, nodes={name: profile.nodes[o] for name, o in origin.items()}, links=links)


def machines(profile: DemoProfile, model: ModelPackage) -> tuple[ShapedMachine, ...]:
    """The profile's machines in bytes for ``model``; memory includes the headroom that the planner holds back."""
    smallest = Shape(minimum_context(model.native_context_length), lanes=1)
    needed = ShapeMemory(model, smallest, "per_lane").required(0, model.layer_count)
    return tuple(
        ShapedMachine(
            name,
            memory_bytes=int(needed * shape.memory_ratio * 1_000 / HEADROOM_MILLI) + 1,
            memory_bandwidth_bytes_per_s=max(1, int(model.weight_bytes * 1_000 / shape.model_read_ms)),
        )
        for name, shape in profile.nodes.items()
    )


def conditioner_text(profile: DemoProfile) -> str:
    """The links as the file that the conditioner reads."""
    lines: list[str] = []
    for link, shape in profile.links.items():
        lines.append(f'[links."{link}"]')
        lines += [
            f"{key} = {value}" for key, value in shape.model_dump(exclude_none=True, exclude_defaults=True).items()
        ]
        lines.append("")
    return "\n".join(lines)


def settings_text(sections: dict[str, dict[str, Any]]) -> str:
    """A configuration file with ``sections``; values are strings, numbers or booleans."""
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            text = (
                str(value).lower()
                if isinstance(value, bool)
                else str(value)
                if isinstance(value, int | float)
                else _quoted(value)
            )
            lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
