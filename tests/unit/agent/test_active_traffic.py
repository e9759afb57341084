"""What an active bandwidth probe gives way to: every frame, every byte of a tunnel, every stage that loads."""

from dataclasses import dataclass

import pytest

from protocol.rows import StageFact
from stage_agent.active_traffic import other_traffic, stages_load
from stage_agent.journal import Journal


@dataclass
class Carried:
    sent_bytes: int = 0
    received_bytes: int = 0


def test_a_frame_and_a_byte_in_a_tunnel_either_way_are_traffic_and_an_open_tunnel_alone_is_not() -> None:
    journal, tunnel = Journal(), Carried()
    seen = [other_traffic(journal)]
    journal.frames["frames_sent"] += 1
    seen.append(other_traffic(journal))
    journal.tunnels.begin("peer", tunnel)
    assert other_traffic(journal) == seen[-1]
    tunnel.sent_bytes += 1
    seen.append(other_traffic(journal))
    tunnel.received_bytes += 1
    seen.append(other_traffic(journal))
    assert len(set(seen)) == 4
    journal.tunnels.end(tunnel, None)
    assert other_traffic(journal) == seen[-1]


@pytest.mark.parametrize(("state", "loads"), [("loading", True), ("serving", False), ("idle", False)])
def test_only_a_stage_that_loads_is_traffic_by_itself(state: str, loads: bool) -> None:
    fact = StageFact.model_validate({"slot": "main", "state": state})
    assert stages_load([fact]) is loads
