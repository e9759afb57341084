"""A flood of refused connections is one line in ten seconds and reason, with the number of those it stands for."""

from stage_agent.journal import Journal
from stage_agent.refusals import EVERY_US, Refusals


def test_a_flood_is_summed_up_and_another_reason_is_told_at_once() -> None:
    journal = Journal()
    refusals = Refusals(journal)
    for number in range(1_000):
        refusals.tell("unadmitted", f"192.0.2.{number % 250}:1", number)
    refusals.tell("wrong_mesh", "192.0.2.9:1", 1_000)
    texts = [event.text for event in journal.events(0)]
    assert texts == [
        "refused a connection from 192.0.2.0:1 (unadmitted)",
        "refused a connection from 192.0.2.9:1 (wrong_mesh)",
    ]
    refusals.tell("unadmitted", "192.0.2.1:1", EVERY_US)
    assert journal.events(0)[-1].text.endswith("(unadmitted), and 999 more since the last line")
    refusals.tell("unadmitted", "192.0.2.1:1", 2 * EVERY_US)
    assert journal.events(0)[-1].text == "refused a connection from 192.0.2.1:1 (unadmitted)"
