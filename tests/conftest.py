"""Several workers share the tests by lane, see `tests/lanes.py`; one process runs them in the order of their files.

How long an example of a property takes on the wall clock says only what else the machine does: no property fails by it.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.lanes import GiveWay, Lanes, rank

settings.register_profile("shared", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(GiveWay())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    config.option.loadscopereorder = False
    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))
