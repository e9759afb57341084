"""What a head knows when it chooses where logits are made: main memory here, the layers' device there, the link back."""

from dataclasses import dataclass

from protocol.rows import DeviceFact, LinkFact, NodeRow
from stage_agent.speeds import readout_speeds

CPU = DeviceFact(name="cpu", kind="cpu", memory_bytes=64, memory_bandwidth_bytes_per_s=40, holds_layers=False)
CARD = DeviceFact(name="card", kind="cuda", memory_bytes=24, memory_bandwidth_bytes_per_s=900)


@dataclass
class Known:
    row: NodeRow


class Mesh:
    """The part of the membership that is asked, with two nodes of one card each."""

    def members(self):
        return {name: Known(row(name)) for name in ("here", "there")}

    def link_facts(self, _now_us):
        return (LinkFact(target="there", send_bytes_per_s=7, receive_bytes_per_s=5), LinkFact(target="other"))


def row(name: str) -> NodeRow:
    return NodeRow(
        node_id=name, public_key=bytes(32), boot_counter=1, seq=1, instance="0" * 32, name=name, version="1",
        devices=(CPU, CARD),
    )  # fmt: skip


def test_the_head_s_main_memory_the_last_stage_s_card_and_the_way_back_are_compared() -> None:
    speeds = readout_speeds(Mesh(), "here", "there")
    assert (speeds.head_bytes_per_s, speeds.last_bytes_per_s, speeds.link_bytes_per_s) == (40, 900, 5)


def test_a_node_that_nobody_knows_has_no_speed() -> None:
    speeds = readout_speeds(Mesh(), "here", "stranger")
    assert (speeds.head_bytes_per_s, speeds.last_bytes_per_s, speeds.link_bytes_per_s) == (40, None, None)
