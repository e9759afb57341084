"""Priors of devices and links, for what nobody measured (files in ``config/hardware``). Always marked as ``spec``.

A device streams a model's bytes at ``efficiency`` × its peak and adds ``per_layer_us`` per layer: kernels, launches and
synchronisation that do not shrink with the bytes. The planner knows nodes by bandwidth alone, so the prior is handed
over as the bandwidth at which this model would take just as long.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from coordinator.model.package import ModelPackage
from coordinator.simulator.toml_table import Table, parse_toml

BYTES_PER_GB = 1_000_000_000
DISCRETE_USABLE_MILLI, SHARED_USABLE_MILLI = 900, 750
"""A card of its own keeps 10 % back; where system and applications live in the same memory, a quarter is theirs."""


@dataclass(frozen=True, slots=True)
class Device:
    """A known device. ``basis`` is ``row`` when ``per_layer_us`` comes from its own measurement."""

    name: str
    family: str
    peak_bytes_per_s: int
    efficiency_milli: int
    per_layer_us: int
    shared_memory: bool
    memory_gb: tuple[int, ...] = ()
    basis: str = "family"
    source: str = ""

    def token_us(self, streamed_bytes: int, layers: int) -> int:
        """One decoded token over that many bytes and layers, rounded up."""
        rate = self.peak_bytes_per_s * self.efficiency_milli
        return -(-streamed_bytes * 1_000_000_000 // rate) + layers * self.per_layer_us

    def bandwidth_for(self, model: ModelPackage) -> int:
        """Bytes per second at which ``model`` takes exactly ``token_us`` on this device."""
        streamed = (
            sum(layer.streamed_bytes for layer in model.layers) + model.shared_first_bytes + model.shared_last_bytes
        )
        return max(1, streamed * 1_000_000 // max(1, self.token_us(streamed, model.layer_count)))

    @property
    def usable_milli(self) -> int:
        """Share of its memory that a model may take, in thousandths."""
        return SHARED_USABLE_MILLI if self.shared_memory else DISCRETE_USABLE_MILLI


@dataclass(frozen=True, slots=True)
class LinkPrior:
    """What a link described in words is taken for."""

    words: tuple[str, ...]
    rtt_us: int
    same_machine: bool


UNKNOWN_DEVICE = Device("unknown", "unknown", 33 * BYTES_PER_GB, 1_000, 0, shared_memory=True)
"""A machine nobody knows is taken for a desktop without a card of its own."""
UNKNOWN_LINK = LinkPrior((), 300, same_machine=False)


@dataclass(frozen=True, slots=True)
class Hardware:
    """All priors."""

    devices: tuple[Device, ...] = ()
    links: tuple[LinkPrior, ...] = ()

    def device(self, description: str, peak_bytes_per_s: int | None = None) -> Device:
        """The device that a person's words describe: the one with most matching words, then the nearest peak.

        A stated peak replaces the table's (cards and their cut-down versions share names). Without a match the family
        is unknown: the stated peak at full efficiency, or a slow desktop.
        """
        said = _words(description)
        fits = [device for device in self.devices if _words(device.name) <= said]
        if not fits:
            return _at_peak(UNKNOWN_DEVICE, peak_bytes_per_s)
        best = max(
            fits,
            key=lambda device: (
                len(_words(device.name)),
                0 if peak_bytes_per_s is None else -abs(device.peak_bytes_per_s - peak_bytes_per_s),
                device.name,
            ),
        )
        return _at_peak(best, peak_bytes_per_s)

    def link(self, description: str) -> LinkPrior:
        """The first prior with a word that occurs in ``description``."""
        text = description.lower()
        for prior in self.links:
            if any(word.lower() in text for word in prior.words):
                return prior
        return UNKNOWN_LINK


def _at_peak(device: Device, peak_bytes_per_s: int | None) -> Device:
    if peak_bytes_per_s is None:
        return device
    return Device(
        device.name, device.family, peak_bytes_per_s, device.efficiency_milli, device.per_layer_us,
        device.shared_memory, device.memory_gb, device.basis, device.source,
    )  # fmt: skip


@lru_cache(maxsize=4_096)
def _words(text: str) -> frozenset[str]:
    """Telling words of a device name: without vendor, bus, memory sizes, core counts and spelled-out variants."""
    main = re.sub(r"\(.*?\)|\b\d+(/\d+)*\s?gb\b|\b\d+c\b", " ", text.lower().split(" / ")[0])
    words = re.findall(r"[a-z0-9+]+", main)
    return frozenset(words) - {"apple", "nvidia", "geforce", "amd", "intel", "the", "of", "same", "sxm", "sxm2", "pcie"}


def parse_hardware(devices_text: str, links_text: str) -> Hardware:
    """Read ``devices.toml`` and ``links.toml``.

    Raises:
        ScenarioError: unknown key, unknown family, value out of range.
    """
    root = parse_toml("devices.toml", devices_text)
    families = root.table("family")
    known = {name: _family(families, name) for name in families or ()}
    devices = tuple(_device(row, known) for row in root.tables("device", limit=10_000))
    root.finish()
    root = parse_toml("links.toml", links_text)
    links = tuple(_link(row) for row in root.tables("link", limit=1_000))
    root.finish()
    return Hardware(devices, links)


def _family(families: Table | None, name: str) -> tuple[int, int, bool]:
    assert families is not None
    row = families.table(name)
    assert row is not None
    efficiency, layer = row.number("efficiency", high=1), row.whole("per_layer_us", high=10**6)
    memory = row.choice("memory", ("discrete", "shared"))
    if efficiency is None or layer is None or memory is None or not row.text("derivation"):
        row.fail(None, "needs efficiency, per_layer_us, memory and derivation")
    row.finish()
    return int(efficiency * 1_000), layer, memory == "shared"


def _device(row: Table, families: dict[str, tuple[int, int, bool]]) -> Device:
    name, peak = row.text("name"), row.number("peak_gb_per_s", high=10**6)
    family = row.choice("family", sorted(families))
    if name is None or family is None or not peak:
        row.fail(None, "needs name, family and peak_gb_per_s")
    own = row.whole("per_layer_us", high=10**6)
    efficiency, layer, shared = families[family]
    memory = row.entries("memory_gb")
    basis, source = row.choice("basis", ("row", "family")) or "family", row.text("source") or ""
    row.finish()
    return Device(
        name, family, int(peak * BYTES_PER_GB), efficiency, layer if own is None else own, shared,
        tuple(int(size) for size in memory), basis, source,
    )  # fmt: skip


def _link(row: Table) -> LinkPrior:
    words, rtt = row.texts("words"), row.number("rtt_ms", high=10_000)
    if not words or rtt is None or not row.text("derivation"):
        row.fail(None, "needs words, rtt_ms and derivation")
    same = row.flag("same_machine") or False
    row.finish()
    return LinkPrior(tuple(words), int(rtt * 1_000), same)
