"""Best of N under a scripted clock and a scripted load."""

from itertools import cycle

from stage_agent.probes.bandwidth import buffer_target_bytes
from stage_agent.probes.host import LoadSample
from stage_agent.probes.trial import Trial, best_of

MIB = 1024 * 1024


class Machine:
    """Runs take the scripted times; others keep ``busy`` cores while a run of the script's second part goes on."""

    def __init__(self, script: list[tuple[float, float]]) -> None:
        self.now = 0.0
        self.others = 0.0
        self.own = 0.0
        self._script = cycle(script)

    def run(self) -> None:
        seconds, busy_cores = next(self._script)
        self.now += seconds
        self.own += seconds
        self.others += seconds * busy_cores

    def load(self) -> LoadSample:
        return LoadSample(self.now, self.own + self.others, self.own)

    def trial(self, budget_s: float, wanted: int = 5) -> Trial:
        return best_of(
            self.run,
            budget_s=budget_s,
            busy_load_milli=250,
            cores=4,
            wanted_quiet_runs=wanted,
            load=self.load,
            clock=lambda: self.now,
        )


def test_the_best_quiet_run_counts_even_when_a_busy_one_was_faster() -> None:
    trial = Machine([(0.1, 2.0), (0.3, 0.0), (0.2, 0.5)]).trial(budget_s=60)
    assert abs(trial.best_s - 0.2) < 1e-9
    assert not trial.busy
    assert trial.quiet_runs == 5


def test_busy_runs_are_repeated_until_the_budget_is_used_and_the_result_says_so() -> None:
    machine = Machine([(0.5, 3.0), (0.4, 3.0)])
    trial = machine.trial(budget_s=3.0)
    assert abs(trial.best_s - 0.4) < 1e-9
    assert trial.busy
    assert trial.others_load_milli == 750
    assert trial.runs == 7
    assert machine.now < 3.5


def test_a_quiet_machine_is_not_measured_longer_than_needed() -> None:
    machine = Machine([(0.1, 0.0)])
    assert machine.trial(budget_s=60.0, wanted=5).runs == 5


def test_at_least_one_run_happens_whatever_the_budget() -> None:
    assert Machine([(9.0, 0.0)]).trial(budget_s=0.0).runs == 1


def test_short_runs_are_grouped_until_the_load_can_be_told() -> None:
    trial = Machine([(0.001, 0.0)]).trial(budget_s=60.0)
    assert trial.runs >= 50
    assert not trial.busy


def test_the_buffer_is_four_caches_but_never_more_than_cores_memory_or_two_gigabytes_allow() -> None:
    assert buffer_target_bytes(32 * MIB, cores=8, available_bytes=64 * 1024 * MIB) == 128 * MIB
    assert buffer_target_bytes(480 * MIB, cores=2, available_bytes=64 * 1024 * MIB) == 512 * MIB
    assert buffer_target_bytes(32 * MIB, cores=8, available_bytes=256 * MIB) == 64 * MIB
    assert buffer_target_bytes(1024 * MIB, cores=64, available_bytes=64 * 1024 * MIB) == 2048 * MIB
    assert buffer_target_bytes(1, cores=1, available_bytes=0) == 16 * MIB
