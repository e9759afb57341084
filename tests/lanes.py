"""Which worker runs which test when there are several: what waits for real processes in one lane, what computes in the others.

A mesh of processes mostly waits, a property or a simulation only computes: side by side they take as long as the longer of the
two. Two meshes side by side would take the processor from each other and measure that. So everything that is slow because it
waits is one unit of work, the first one, and belongs to one worker whatever their number is; the others compute at a lower
priority, so that what is timed on the wall clock does not wait for them.
"""

import os

import pytest
from xdist.scheduler import LoadScopeScheduling

LIVE = (
    "tests/e2e/",
    "tests/namespaces/",
    "tests/integration/",
    "tests/unit/agent/test_alarm.py",
    "tests/unit/llama_cpp/test_runtime.py",
    "tests/unit/probes/test_measure.py",
    "tests/unit/quic/test_conditioner.py",
    "tests/unit/runtimes/",
)
"""Real processes, sockets and time; the unit tests among them hold something to the wall clock."""
LONG = ("tests/simulation/", "tests/property/")
"""Long and nothing but computing: begun early, so that no worker ends with one of these while another has nothing to do."""
COMPUTING_NICENESS = 10


def rank(nodeid: str) -> int:
    """What is begun first, second and last."""
    return 0 if nodeid.startswith(LIVE) else 1 if nodeid.startswith(LONG) else 2


class Lanes(LoadScopeScheduling):
    """Everything live on one worker; the rest by file on whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        return "live" if rank(nodeid) == 0 else nodeid.split("::", 1)[0]


class GiveWay:
    """A worker that computes gives way. The one of the live lane comes to such a test only after all of its own."""

    def __init__(self) -> None:
        self._given = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if rank(item.nodeid) and not self._given:
            self._given = True
            os.nice(COMPUTING_NICENESS)
