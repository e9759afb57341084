"""``python -m stage_agent``: the same as the console script ``stagemesh``."""

from stage_agent.cli.main import main

main()
