"""The head: ``llama-server`` beside stage 0, driving every stage's rpc-server.

Order: wait until every peer's door is open and its build is ours; ask ``--list-devices`` and require every endpoint; start
the server; watch its log for the layer map and the tunnels for progress; wait for its health; compare the map with the
plan; produce one token. Only then is it ready. Anything else is a failure that names the node.
"""

import asyncio
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from config.settings import RuntimeSettings
from coordinator.exporters.layer_split import MAX_DEVICES
from protocol.ballots import StageAssignment
from protocol.errors import ModelError
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.interface import DecodeTiming, RuntimeFailure
from stage_agent.runtimes.llama_cpp.command import LOOPBACK, head_command, probe_command
from stage_agent.runtimes.llama_cpp.devices import (
    DeviceLayers,
    expected_map,
    first_difference,
    missing_endpoints,
    parse_assigned,
    parse_devices,
    spread,
)
from stage_agent.runtimes.llama_cpp.output_layer import output_on_head
from stage_agent.runtimes.llama_cpp.program import Program, choose_port
from stage_agent.tunnel.tunnels import Door, Listener, Tunnels, http_door, rpc_door

_POLL_S = 0.1
_HTTP_S = 2.0
_PROBE_S = 30.0
_TOKEN_S = 120.0
_STAGE_LOST = "Remote RPC server crashed"
_PROBE_WORDS = ("mismatch", "Failed to connect", _STAGE_LOST)
_EVAL = re.compile(r"\beval time =\s*([\d.]+) ms /\s*(\d+) (?:runs|tokens)")


@dataclass(slots=True)
class Decoded:
    """What llama-server's own clock says of decoding, over the whole pipeline and under this plan."""

    tokens: int = 0
    total_us: int = 0
    newest_us: int = 0

    def add(self, elapsed_us: int, tokens: int) -> None:
        """One request. A single token says little: it shares its request with the prompt."""
        if tokens > 1:
            self.tokens += tokens
            self.total_us += elapsed_us
            self.newest_us = time.monotonic_ns() // 1_000

    def timing(self) -> DecodeTiming | None:
        """Mean time per output token; ``None`` before the first."""
        if not self.tokens:
            return None
        age_us = time.monotonic_ns() // 1_000 - self.newest_us
        return DecodeTiming(None, 0, age_us, tpot_us=-(-self.total_us // self.tokens), tpot_tokens=self.tokens)


class Head:
    """One start of the head. ``stop`` may come at any time."""

    def __init__(self, settings: RuntimeSettings, context: RuntimeContext, assignment: StageAssignment) -> None:
        assert context.tunnels is not None
        self._settings = settings
        self._context = context
        self._assignment = assignment
        self._tunnels: Tunnels = context.tunnels
        self._listeners: dict[str, Listener] = {}
        """By the node whose rpc-server they lead to."""
        self._directory: Path | None = None
        self._assigned: dict[int, str] = {}
        self._door: Door | None = None
        self._stage_lost = False
        self.program: Program | None = None
        self.decoded = Decoded()

    async def start(self, own_endpoint: str, progress: Callable[[int], None]) -> None:
        """Ready at return. ``own_endpoint`` = stage 0's rpc-server; empty = stage 0 runs in the head, on the CPU.

        ``progress`` gets the bytes sent to other stages so far. Raises ``RuntimeFailure``.
        """
        servers = len(self._assignment.stages) - (not own_endpoint)
        if servers > MAX_DEVICES:
            raise RuntimeFailure("range_invalid", f"{servers} rpc-servers: llama.cpp takes at most {MAX_DEVICES}")
        endpoints, counts = await self._endpoints(own_endpoint)
        cpu_layers = 0 if own_endpoint else self._assignment.layer_end
        devices = await self._devices(endpoints, counts) if endpoints else ()
        port = choose_port(self._settings)
        self._directory = Path(tempfile.mkdtemp(prefix="stagemesh-head-"))  # 0700
        key_file, key = self._directory / "api-key", secrets.token_urlsafe(32)
        key_file.touch(mode=0o600)
        key_file.write_text(key + "\n", "utf-8")
        model = self._model()
        command = head_command(
            self._settings,
            self._assignment,
            model=model,
            port=port,
            key_file=key_file,
            endpoints=endpoints,
            devices=devices,
            cpu_layers=cpu_layers,
            output_on_head=await self._output_on_head(model),
        )
        self.program = program = await Program.start(command, self._settings, self._context.tasks, self._on_line)
        await self._healthy(program, port, progress)
        difference = first_difference(expected_map(devices, cpu_layers), self._assigned)
        if difference:
            raise RuntimeFailure("range_invalid", f"llama-server placed the model otherwise: {difference}")
        await self._one_token(program, port, key)
        self._forget_key_file()  # read once, at the start: nothing is left even if this agent is killed
        self._door = Door(port, engine=self._context.engine, secret=key)

    def publish(self) -> None:
        """From now on this is the slot's head, for this node and its peers."""
        assert self._door is not None
        self._tunnels.open_door(http_door(self._assignment.slot), self._door)

    def failure(self, program: Program) -> RuntimeFailure:
        """Why ``program`` ended. ``stage_lost``: it gave up because an rpc-server went away, which is not its own fault."""
        failure = program.failure()
        if self._stage_lost and failure.reason == "engine_exited":
            return RuntimeFailure("stage_lost", failure.detail)
        return failure

    async def stop(self) -> None:
        """End the program and the tunnels; idempotent."""
        if self._door is not None:
            self._tunnels.close_door(http_door(self._assignment.slot), self._door)
        self._forget_key_file()
        if self.program is not None:
            await self.program.stop(self._settings.stop_grace_us)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            await listener.close()

    def _forget_key_file(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _endpoints(self, own: str) -> tuple[list[str], list[int]]:
        """``host:port`` and layer count of every rpc-server in stage order; peers' ones are tunnels."""
        endpoints, counts = [], []
        for share in self._assignment.stages:
            if share.node_id == self._context.node_id:
                if not own:
                    continue
                endpoints.append(own)
            else:
                endpoints.append(await self._way_to(share.node_id))
            counts.append(share.layer_end - share.layer_start)
        return endpoints, counts

    async def _way_to(self, node_id: str) -> str:
        """To the node's rpc-server of this very plan, once it is up: a tunnel, or its own address if both ends say so.

        The caller's deadline ends the waiting.
        """
        epoch = self._context.epoch
        door = rpc_door(self._assignment.slot, f"{epoch.term}/{epoch.node_id}/{epoch.instance}")
        while True:
            try:
                answer = await self._tunnels.ask(node_id, door)
            except ConnectionError:
                answer = None
            if answer is not None and answer.open:
                break
            await asyncio.sleep(_POLL_S)
        if answer.engine != self._context.engine:
            raise RuntimeFailure(
                "engine_mismatch",
                f"{node_id[:8]} runs {answer.engine or 'an unknown build'}, this node {self._context.engine}: "
                "install one build of llama.cpp on all nodes",
            )
        if answer.direct and self._settings.llama_direct_host:
            return answer.direct
        self._listeners[node_id] = await self._tunnels.listen(node_id, door, self._context.tasks)
        return f"{LOOPBACK}:{self._listeners[node_id].port}"

    async def _devices(self, endpoints: list[str], counts: list[int]) -> tuple[DeviceLayers, ...]:
        lines: list[str] = []
        command = probe_command(self._settings, endpoints)
        probe = await Program.start(command, self._settings, self._context.tasks, lines.append)
        try:
            await asyncio.wait([probe.engine.exited], timeout=_PROBE_S)
            if not probe.ended:
                raise RuntimeFailure("engine_not_ready", f"--list-devices did not end within {_PROBE_S:.0f} s")
            failure = probe.failure() if probe.engine.exited.result() else None
        finally:
            await probe.stop(0)
        devices = parse_devices(lines)
        missing = missing_endpoints(endpoints, devices)
        if failure is not None and failure.reason == "engine_mismatch":
            raise failure
        if failure is not None or missing:
            said = next((line for line in lines if any(word in line for word in _PROBE_WORDS)), "")
            raise RuntimeFailure(
                "engine_not_ready", f"llama-server cannot use {self._blamed(endpoints, missing)}; {said}"
            )
        return spread(endpoints, counts, devices)

    def _blamed(self, endpoints: list[str], missing: tuple[str, ...]) -> str:
        """The rpc-servers at fault: those whose tunnel was refused (the engine may end at the first), else the missing."""
        refused = [node_id for node_id, listener in self._listeners.items() if listener.counters.refused]
        stages = [share.node_id for share in self._assignment.stages][-len(endpoints) :]
        named = refused or [stages[endpoints.index(each)] for each in missing]
        return "the rpc-server of " + ", ".join(node_id[:8] for node_id in named)

    async def _healthy(self, program: Program, port: int, progress: Callable[[int], None]) -> None:
        if not await program.listening(port):
            raise self.failure(program)
        async with httpx.AsyncClient(timeout=_HTTP_S, trust_env=False) as client:
            while not program.ended:
                progress(sum(listener.counters.sent_bytes for listener in self._listeners.values()))
                try:
                    if (await client.get(f"http://{LOOPBACK}:{port}/health")).status_code == httpx.codes.OK:
                        return
                except httpx.HTTPError:
                    pass  # not yet, or dead: then ``ended`` says so
                await asyncio.wait([program.engine.exited], timeout=_POLL_S)
        raise self.failure(program)

    async def _one_token(self, program: Program, port: int, key: str) -> None:
        """Some builds start well and die at the first computation: only a token proves that all stages compute."""
        body: dict[str, Any] = {"prompt": " ", "n_predict": 1, "temperature": 0, "cache_prompt": False}
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with httpx.AsyncClient(timeout=_TOKEN_S, trust_env=False) as client:
                answer = await client.post(f"http://{LOOPBACK}:{port}/completion", json=body, headers=headers)
        except httpx.HTTPError as error:
            await asyncio.wait([program.engine.exited], timeout=5.0)
            if program.ended:
                raise self.failure(program) from None
            raise RuntimeFailure("engine_not_ready", f"no first token: {type(error).__name__}") from None
        if answer.status_code != httpx.codes.OK:
            raise RuntimeFailure("engine_not_ready", f"no first token: HTTP {answer.status_code} {answer.text[:200]}")

    def _model(self) -> Path:
        try:
            return self._context.model_path(self._assignment)
        except ModelError as error:
            raise RuntimeFailure("model_unavailable", str(error)) from None

    async def _output_on_head(self, model: Path) -> str:
        """Whether to keep the output layer here: ``tied``, ``untied`` or empty."""
        last = self._assignment.stages[-1]
        if last.node_id == self._context.node_id:
            return ""
        speeds = self._context.readout_speeds(last.node_id)
        return await asyncio.to_thread(output_on_head, model, last, speeds, setting=self._settings.llama_output_layer)

    def _on_line(self, line: str) -> None:
        if (assigned := parse_assigned(line)) is not None:
            self._assigned[assigned[0]] = assigned[1]
        elif (timed := _EVAL.search(line)) and "prompt eval" not in line:
            self.decoded.add(round(float(timed.group(1)) * 1_000), int(timed.group(2)))
        elif _STAGE_LOST in line:
            self._stage_lost = True
