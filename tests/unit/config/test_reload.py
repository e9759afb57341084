"""A reload takes over what can change live and names the rest."""

from config.reload import reload
from config.settings import ApiSettings, LogSettings, PlannerSettings, Settings


def test_live_knobs_are_taken_over_and_others_are_named_and_kept():
    old = Settings()
    new = Settings(
        log=LogSettings(level="debug"), planner=PlannerSettings(concurrency=4), api=ApiSettings(port=1, host="::1")
    )
    answer = reload(old, new)
    assert answer.applied == ("log.level", "planner.concurrency")
    assert answer.needs_restart == ("api.host", "api.port")
    assert answer.settings == Settings(log=new.log, planner=new.planner)


def test_an_unchanged_configuration_changes_nothing():
    answer = reload(Settings(), Settings())
    assert (answer.settings, answer.applied, answer.needs_restart) == (Settings(), (), ())
