"""State and cache directories: the setting, what systemd prepared, root's, the user's."""

from pathlib import Path

import pytest

from config.paths import cache_dir, default_config_files, state_dir
from config.settings import NodeSettings, Settings

HOME = {"HOME": "/home/ann"}


def test_the_setting_wins_and_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(node=NodeSettings(state_dir="state", cache_dir="/c"))
    environment = {"STATE_DIRECTORY": "/var/lib/x", **HOME}
    assert state_dir(settings, environment) == tmp_path / "state"
    assert cache_dir(settings, environment) == Path("/c")


def test_what_systemd_prepared_wins_over_the_usual_places():
    environment = {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "CACHE_DIRECTORY": "/var/cache/a", **HOME}
    assert state_dir(Settings(), environment, root=True) == Path("/var/lib/a")
    assert cache_dir(Settings(), environment, root=True) == Path("/var/cache/a")


@pytest.mark.parametrize(
    ("environment", "root", "state", "cache"),
    [
        (HOME, True, "/var/lib/stagemesh", "/var/cache/stagemesh"),
        (HOME, False, "/home/ann/.local/state/stagemesh", "/home/ann/.cache/stagemesh"),
        ({**HOME, "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c"}, False, "/s/stagemesh", "/c/stagemesh"),
        (
            {**HOME, "XDG_STATE_HOME": "relative", "STATE_DIRECTORY": "relative"},
            False,
            "/home/ann/.local/state/stagemesh",
            "/home/ann/.cache/stagemesh",
        ),
    ],
)
def test_root_and_users_have_their_usual_places(environment, root, state, cache):
    assert state_dir(Settings(), environment, root=root) == Path(state)
    assert cache_dir(Settings(), environment, root=root) == Path(cache)


def test_root_prefers_the_system_configuration_and_a_user_their_own():
    own = Path("/home/ann/.config/stagemesh/stagemesh.toml")
    system = Path("/etc/stagemesh/stagemesh.toml")
    assert default_config_files(HOME, root=True) == (system, own)
    assert default_config_files(HOME, root=False) == (own, system)
