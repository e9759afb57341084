"""The key of the head's HTTP server is known to the agent and the server, and is written nowhere that outlives its reading."""

import asyncio
import logging

import psutil

from stage_agent.tunnel.tunnels import http_door
from tests.integration.transport_mesh import run
from tests.unit.llama_cpp.stages import EPOCH, two_stages


def test_the_engine_s_key_stands_on_no_command_line_in_no_environment_log_output_or_file(
    tmp_path, capfd, caplog
) -> None:
    told = {}

    async def main():
        async with two_stages(tmp_path) as (head, worker):
            await asyncio.gather(head.load(), worker.load())
            await head.runtime.activate(EPOCH, head.assignment)
            told["key"] = head.tunnels.door(http_door("default")).secret
            children = psutil.Process().children(recursive=True)
            assert len(children) >= 2
            told["command lines"] = "".join(" ".join(each.cmdline()) for each in children)
            told["environments"] = "".join(" ".join(each.environ().values()) for each in children)
            told["files"] = "".join(each.read_text(errors="replace") for each in tmp_path.rglob("*") if each.is_file())
            await head.runtime.unload()
            await worker.runtime.unload()

    with caplog.at_level(logging.DEBUG):
        run(main())
    output = capfd.readouterr()
    told |= {"stdout": output.out, "stderr": output.err, "log": caplog.text}
    key = told.pop("key")
    assert len(key) >= 32
    assert "--api-key-file" in told["command lines"]
    assert [where for where, text in told.items() if key in text] == []
