"""Where a node says that it can be dialled."""

import pytest

from config.settings import ListenSettings
from protocol.errors import ConfigurationError
from protocol.quic.address import parse_address
from stage_agent.addresses import ADDRESSES_MAX, card_hosts, own_addresses

CARDS = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.168.1.5", "fe80::1", "00:11:22:33:44:55"],
    "enx1": ["10.0.7.2"],
    "wlan0": ["192.168.1.77", "169.254.3.4"],
    "docker0": ["172.17.0.1"],
    "wg0": ["10.66.0.1"],
}


def test_every_network_card_is_told_and_no_bridge_no_tunnel_and_nothing_that_is_local_to_a_machine():
    assert card_hosts(CARDS, lambda name: name in {"lo", "eth0", "enx1", "wlan0"}) == [
        "10.0.7.2", "192.168.1.5", "192.168.1.77",
    ]  # fmt: skip


def test_what_is_advertised_or_listened_on_is_told_as_it_is():
    assert own_addresses(ListenSettings(advertise=("node.example:1",))) == ("node.example:1",)
    assert own_addresses(ListenSettings(host="127.0.0.1", port=7_000)) == ("127.0.0.1:7000",)
    with pytest.raises(ConfigurationError, match="--address HOST:PORT"):
        own_addresses(ListenSettings(port=0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_node_that_listens_everywhere_tells_at_least_one_address_of_this_machine(host):
    told = own_addresses(ListenSettings(host=host, port=7_001))
    assert 1 <= len(told) <= ADDRESSES_MAX
    assert len(set(told)) == len(told)
    assert {parse_address(address).port for address in told} == {7_001}
