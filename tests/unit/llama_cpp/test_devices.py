import pytest

from config.settings import RuntimeSettings
from stage_agent.runtimes.llama_cpp.command import exit_words, worker_command
from stage_agent.runtimes.llama_cpp.devices import (
    DeviceLayers,
    RemoteDevice,
    expected_map,
    first_difference,
    missing_endpoints,
    parse_assigned,
    parse_devices,
    spread,
)

LISTED = """Available devices:
  RPC0: 127.0.0.1:21061 (24105 MiB, 24105 MiB free)
  RPC1: 127.0.0.1:21061 (8035 MiB, 8000 MiB free)
  RPC2: 127.0.0.1:21062 (24105 MiB, 100 MiB free)
  Vulkan0: llvmpipe (2048 MiB, 2048 MiB free)
""".splitlines()


def test_devices_are_numbered_over_all_endpoints_and_local_ones_are_not_used() -> None:
    devices = parse_devices(LISTED)
    assert [(each.name, each.endpoint) for each in devices] == [
        ("RPC0", "127.0.0.1:21061"), ("RPC1", "127.0.0.1:21061"), ("RPC2", "127.0.0.1:21062"),
    ]  # fmt: skip
    assert missing_endpoints(["127.0.0.1:21062", "127.0.0.1:21063"], devices) == ("127.0.0.1:21063",)


def test_a_worker_with_two_devices_splits_its_layers_by_their_memory() -> None:
    layers = spread(["127.0.0.1:21061", "127.0.0.1:21062"], [10, 5], parse_devices(LISTED))
    assert layers == (DeviceLayers("RPC0", 8), DeviceLayers("RPC1", 2), DeviceLayers("RPC2", 5))


@pytest.mark.parametrize("count", range(20))
def test_no_layer_is_lost_or_made_when_devices_are_unequal(count) -> None:
    devices = [RemoteDevice(f"RPC{index}", "e", mib) for index, mib in enumerate((3, 5, 7))]
    assert sum(each.layers for each in spread(["e"], [count], devices)) == count


def test_the_engine_s_word_about_a_layer_is_read_whatever_stands_around_it() -> None:
    assert parse_assigned("0.01.087.110 D load_tensors: layer   3 assigned to device RPC1, is_swa = 0") == (3, "RPC1")
    assert parse_assigned("load_tensors: layer  30 assigned to device CPU") == (30, "CPU")
    assert parse_assigned("load_tensors: offloaded 31/31 layers to GPU") is None


def test_the_map_includes_the_output_layer_and_the_first_difference_is_named() -> None:
    expected = expected_map([DeviceLayers("RPC0", 1), DeviceLayers("RPC1", 2)], cpu_layers=1)
    assert expected == {0: "CPU", 1: "RPC0", 2: "RPC1", 3: "RPC1", 4: "RPC1"}
    assert first_difference(expected, dict(expected)) == ""
    assert "layer 4 is on no device" in first_difference(expected, {key: expected[key] for key in range(4)})
    assert "did not say" in first_difference(expected, {})


def test_workers_never_listen_elsewhere_than_on_loopback() -> None:
    command = worker_command(RuntimeSettings(llama_threads=2, llama_devices="CPU"), 21_070, cache=True)
    assert command == ["ggml-rpc-server", "-H", "127.0.0.1", "-p", "21070", "-t", "2", "-d", "CPU", "-c"]


@pytest.mark.parametrize(
    ("code", "word"), [(132, "SIGILL"), (134, "aborted"), (141, "SIGPIPE"), (139, "signal 11"), (3, "code 3")]
)
def test_the_way_a_program_ended_is_told_in_words(code, word) -> None:
    assert word in exit_words("llama-server", code, "")
