"""How often an engine may fail before the agent stops trying. Pure: the clock is an argument."""

from collections import deque


class StartBudget:
    """At most ``limit`` failures (starts that did not become ready, crashes) per ``window_us``.

    One budget per slot, kept by the driver across assignments: an engine that crashes under every plan must not be
    started for ever. In-place restarts do not exist: a restarted engine has lost its caches, and continuing requests on it
    would give wrong tokens, so a crash is always reported and the next plan starts it again.
    """

    def __init__(self, limit: int, window_us: int) -> None:
        self._limit = limit
        self._window_us = window_us
        self._failures: deque[int] = deque(maxlen=limit + 1)
        self._unfit: tuple[str, str] | None = None

    def record_failure(self, now_us: int) -> None:
        """Count a failure."""
        self._failures.append(now_us)

    def condemn(self, program: str, why: str) -> None:
        """``program`` (its identity, not only its name) can never run here; the last one is remembered."""
        self._unfit = program, why

    def condemned(self, program: str) -> str:
        """Why ``program`` must not be started again, whatever the window; empty when it may."""
        return self._unfit[1] if self._unfit is not None and self._unfit[0] == program else ""

    def exhausted(self, now_us: int) -> bool:
        """Whether another start must be refused now."""
        while self._failures and now_us - self._failures[0] >= self._window_us:
            self._failures.popleft()
        return len(self._failures) > self._limit

    def retry_after_us(self, now_us: int) -> int:
        """How long until one start is allowed again; 0 when it is."""
        return self._failures[0] + self._window_us - now_us if self.exhausted(now_us) else 0
