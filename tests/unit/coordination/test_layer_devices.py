"""Several devices of a node stand in the cost model as one."""

from coordinator.layer_devices import layer_device
from protocol.rows import DeviceFact


def card(memory: int, speed: int | None, name: str = "card", **fields) -> DeviceFact:
    fields = {"source": "measured", "compute_flops_per_s": speed, "memory_bandwidth_bytes_per_s": speed} | fields
    return DeviceFact(name=name, kind="cuda", memory_bytes=memory, **fields)


def test_a_device_without_layers_does_not_count():
    alone = card(24, 1_000)
    assert layer_device((card(64, 50, "cpu", holds_layers=False), alone)) == alone
    assert layer_device((card(64, 50, holds_layers=False),)) is None
    assert layer_device(()) is None


def test_two_cards_read_their_shares_one_after_the_other():
    both = layer_device((card(24, 1_000), card(8, 250)))
    assert both is not None
    # 32 bytes in 24/1000 + 8/250 seconds
    assert (both.memory_bytes, both.memory_bandwidth_bytes_per_s, both.compute_flops_per_s) == (32, 571, 571)
    assert both.name == "2 × card"


def test_a_card_of_unknown_speed_makes_the_whole_unknown_but_one_without_memory_does_not():
    both = layer_device((card(24, 1_000), card(8, None, source="unknown")))
    assert both is not None
    assert (both.memory_bandwidth_bytes_per_s, both.source) == (None, "unknown")
    useless = layer_device((card(24, 1_000, measured_age_us=5), card(0, None, "display", measured_age_us=9)))
    assert useless is not None
    assert (useless.memory_bandwidth_bytes_per_s, useless.name, useless.measured_age_us) == (1_000, "card + display", 9)
