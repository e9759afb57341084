"""Opens what the pure simulator is handed: scenario files, the engine profiles beside ``config``, models by path."""

from importlib import resources
from pathlib import Path

from config.cache_types import CacheType
from coordinator.model.package import ModelPackage
from coordinator.planner.problem import Calibration, PlanRequest
from coordinator.simulator.hardware import Hardware, parse_hardware
from coordinator.simulator.profiles import Profile, parse_profile
from coordinator.simulator.scenario import Scenario, ScenarioError, parse_scenario

MAX_SCENARIO_BYTES = 16 * 1_048_576


def full_profiles() -> dict[str, Profile]:
    """The profiles shipped in ``config/calibrations``, by name, with their derivations."""
    folder = resources.files("config") / "calibrations"
    found: dict[str, Profile] = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            name = entry.name.removesuffix(".toml")
            found[name] = parse_profile(name, entry.read_text(encoding="utf-8"))
    return found


def engine_profiles() -> dict[str, Calibration]:
    """The calibrations of the shipped profiles, by name."""
    return {name: profile.calibration for name, profile in full_profiles().items()}


def hardware_priors() -> Hardware:
    """The device and link priors shipped in ``config/hardware``."""
    folder = resources.files("config") / "hardware"
    devices, links = (folder / name for name in ("devices.toml", "links.toml"))
    return parse_hardware(devices.read_text(encoding="utf-8"), links.read_text(encoding="utf-8"))


def read_text(path: Path) -> str:
    """The file's text, without the byte order mark that some editors put before it.

    Raises:
        ScenarioError: it cannot be opened, is too large, or is not UTF-8.
    """
    try:
        if path.stat().st_size > MAX_SCENARIO_BYTES:
            raise ScenarioError(str(path), 0, "", f"larger than {MAX_SCENARIO_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except IsADirectoryError as error:
        raise ScenarioError(str(path), 0, "", "is a directory; name a file in it") from error
    except OSError as error:
        raise ScenarioError(str(path), 0, "", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ScenarioError(str(path), 0, "", "is not UTF-8 text") from error


def load_scenario(path: Path, default_request: PlanRequest | None = None) -> Scenario:
    """Read a scenario; a model path inside it is relative to the file's folder."""

    def open_beside(model_path: str, cache_type: CacheType) -> ModelPackage:
        from stage_agent.model_source import open_model

        return open_model(path.parent / model_path, cache_type=cache_type)

    return parse_scenario(
        str(path),
        read_text(path),
        profiles=engine_profiles(),
        open_model=open_beside,
        default_request=default_request,
        hardware=hardware_priors(),
    )
