"""Whether an engine goes on with its load is known before anything is loaded, because memory depends on it."""

import pytest

from config.settings import RuntimeSettings
from stage_agent.runtimes.factory import keeps_loads


@pytest.mark.parametrize(
    ("settings", "keeps"),
    [
        ({"kind": "mapped"}, True),
        ({"kind": "reference"}, True),
        ({"kind": "llama_cpp"}, False),
        ({"kind": "process", "command": ("engine", "--layers", "{layer_start}-{layer_end}", "--port", "{port}")}, True),
        ({"kind": "process", "command": ("engine", "--next", "{next}")}, False),
        ({"kind": "process", "command": ("engine", "--rank={stage_index}/{stage_count}")}, False),
        ({"kind": "process", "command": ("engine", "--literal", "{{next}}")}, True),
    ],
)
def test_an_engine_whose_command_names_its_neighbours_is_started_anew(settings, keeps):
    assert keeps_loads(RuntimeSettings(**settings)) == keeps
