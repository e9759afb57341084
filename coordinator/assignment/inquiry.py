"""What a slot asks the planner for, so that nothing that was refused is asked again before something changed.

While nothing serves there are two questions. The first leaves out every node that backs off for its past. Only when that is
refused, the second adds those that waited for a part of it (``NEED_SHARE``): to wait longer would spare nobody, since without
them nothing serves. Each question holds its signals for itself; noise changes neither.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from coordinator.assignment.culprits import Culprits
from coordinator.assignment.moment import Moment, ServedModelSpec, SlotSettings, problem_terms
from coordinator.assignment.rounds import Need
from coordinator.assignment.running import RunningPlan
from coordinator.planner.participants import participant_set_hash
from coordinator.planner.problem import PlanningProblem
from coordinator.view import ProblemTerms, SignalQuantiser, build_problem


@dataclass(frozen=True, slots=True)
class Question:
    """``roomier``: the same without what slots of a lower priority hold; ``None`` when they hold nothing."""

    problem: PlanningProblem
    participant_hash: str
    roomier: PlanningProblem | None
    in_need: bool


class Inquiry:
    """One slot's questions and the refusals they met."""

    def __init__(self, quantiser: Callable[[], SignalQuantiser]) -> None:
        self._quantisers: Final = {False: quantiser(), True: quantiser()}
        self._refused: dict[bool, str] = {}

    def forget(self) -> None:
        """Everything may be asked again."""
        self._refused.clear()

    def refused(self, question: Question) -> None:
        """The planner knows no plan for it."""
        self._refused[question.in_need] = question.participant_hash

    def ask(
        self,
        need: Need,
        spec: ServedModelSpec,
        settings: SlotSettings,
        moment: Moment,
        culprits: Culprits,
        *,
        running: RunningPlan | None,
    ) -> Question | None:
        """What to ask now; ``None`` when it was refused already. A plan that serves is never compared with the reserve."""
        left_out = culprits.current(moment.now_us)
        terms = problem_terms(spec, settings, moment, left_out, running=running)
        question = self._question(moment, terms, in_need=False)
        if need not in {"initial", "broken"} or question.participant_hash != self._refused.get(False):
            return question
        barred = culprits.barred(moment.now_us)
        if not moment.reserve and barred == left_out:
            return None
        terms = problem_terms(spec, settings, moment, barred, running=running, reserve=moment.reserve)
        question = self._question(moment, terms, in_need=True)
        return None if question.participant_hash in self._refused.values() else question

    def _question(self, moment: Moment, terms: ProblemTerms, *, in_need: bool) -> Question:
        quantiser = self._quantisers[in_need]
        problem = build_problem(moment.view, terms, quantiser)
        roomier = None
        if moment.firm_bytes != moment.held_bytes:
            roomier = build_problem(moment.view, replace(terms, held_bytes=moment.firm_bytes), quantiser)
        return Question(problem, participant_set_hash(problem), roomier, in_need)
