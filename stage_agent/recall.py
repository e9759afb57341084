"""The end of amnesia: the first promise that is on disk again makes up for the state that was lost."""

from stage_agent.journal import Journal
from stage_agent.stage.agent import StageAgent
from stage_agent.state.store import StateStore


class Recall:
    """Called after every record that was written; takes the ``amnesia`` mark off the store, and with it off the row, once."""

    def __init__(self, store: StateStore, agent: StageAgent, journal: Journal) -> None:
        self._store, self._agent, self._journal = store, agent, journal
        self._forgetful = store.amnesia

    def __call__(self) -> None:
        """A record was written."""
        if self._forgetful and self._agent.remembers:
            self._store.clear_amnesia()
            self._forgetful = False
            self._journal.tell(
                "state_recovered", "a new promise is on disk: the state that was lost does no harm any more"
            )
