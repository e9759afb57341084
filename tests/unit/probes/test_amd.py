"""AMD's own package is optional; with it the memory that is free is known, and no card is counted twice."""

import sys
from types import ModuleType
from typing import Any

import pytest

from config.settings import Settings
from protocol.rows import DeviceFact
from stage_agent.probes import measure
from stage_agent.probes.amd import amd_cards

CARD = {"name": "Radeon RX 7900 XTX", "version": "gfx1100", "total": 24_560, "used": 560, "bandwidth": 960}


class Library(ModuleType):
    """The part of ``amdsmi`` that is used, for a machine with the given cards."""

    class AmdSmiException(Exception):  # noqa: N818 its name there
        pass

    def __init__(self, cards: list[dict[str, Any]], *, driver: bool = True) -> None:
        super().__init__("amdsmi")
        self.cards, self.driver, self.open = cards, driver, 0

    def amdsmi_init(self) -> None:
        if not self.driver:
            raise self.AmdSmiException("AMDSMI_STATUS_DRIVER_NOT_LOADED")
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[dict[str, Any]]:
        return self.cards

    def amdsmi_get_gpu_asic_info(self, card: dict[str, Any]) -> dict[str, Any]:
        if "broken" in card:
            raise self.AmdSmiException("AMDSMI_STATUS_BUSY")
        return {"market_name": card["name"], "target_graphics_version": card["version"]}

    def amdsmi_get_gpu_vram_usage(self, card: dict[str, Any]) -> dict[str, Any]:
        return {"vram_total": card["total"], "vram_used": card["used"]}

    def amdsmi_get_gpu_vram_info(self, card: dict[str, Any]) -> dict[str, Any]:
        return {"vram_size": card["total"], "vram_max_bandwidth": card["bandwidth"]}


def test_a_card_offers_what_is_free_and_tells_the_vendors_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([CARD])
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    (card,) = amd_cards()
    assert card.graphics_version == "gfx1100"
    assert card.fact == DeviceFact(
        name="Radeon RX 7900 XTX",
        kind="rocm",
        memory_bytes=24_000 * 2**20,
        memory_bandwidth_bytes_per_s=960_000_000_000,
        source="spec",
    )
    assert library.open == 0


def test_a_card_that_cannot_be_read_hides_no_other_and_an_untold_bandwidth_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", Library([{"broken": True}, CARD | {"bandwidth": "N/A"}]))
    (card,) = amd_cards()
    assert (card.fact.memory_bandwidth_bytes_per_s, card.fact.source) == (None, "unknown")


def test_without_package_or_driver_there_are_no_cards_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", Library([CARD], driver=False))
    assert amd_cards() == ()
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert amd_cards() == ()


@pytest.mark.parametrize(
    ("opencl_name", "memory_mib"), [("gfx1100", 24_000), ("gfx1100:sramecc+", 24_000), ("Navi 31", 24_560)]
)
def test_a_card_that_opencl_measured_is_one_card(
    monkeypatch: pytest.MonkeyPatch, opencl_name: str, memory_mib: int
) -> None:
    """By either name; where it has a third one, OpenCL's word stands alone."""
    monkeypatch.setitem(sys.modules, "amdsmi", Library([CARD]))
    seen = {
        "name": opencl_name,
        "kind": "rocm",
        "memory_bytes": 24_560 * 2**20,
        "memory_bandwidth_bytes_per_s": 800_000_000_000,
        "source": "measured",
    }
    monkeypatch.setattr(measure, "_measure_processor", lambda *_, **__: measure._Measured())
    monkeypatch.setattr(
        measure, "_measure_accelerators", lambda *_, **__: measure._Measured(figures={"opencl": [seen]}, age_us=0)
    )
    facts = measure.measure_node(Settings.model_validate({"node": {"layers_on": "accelerators"}}), None)  # type: ignore[arg-type]
    (card,) = [device for device in facts.devices if device.kind == "rocm"]
    assert card.memory_bytes == memory_mib * 2**20
    assert card.memory_bandwidth_bytes_per_s == 800_000_000_000
