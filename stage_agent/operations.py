"""The API's commands as inputs of the cores. Every answer says what began or why not; nothing is half done."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

from config.settings import PlannerSettings, ReplanSettings
from coordinator.assignment.commands import Exclude as ExcludeNode
from coordinator.assignment.commands import Lock, OperatorCommand
from coordinator.assignment.commands import Pin as PinNode
from coordinator.model.package import ModelPackage
from coordinator.planner.document import plan_document, refusal_document
from coordinator.planner.explain import explain, explanation_document
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.planning import plan as compute_plan
from coordinator.planner.problem import Calibration, LockedStage, LockedTopology, PlanningProblem
from coordinator.view import ClusterView, ProblemTerms, SignalQuantiser, build_problem, facts_of
from protocol.errors import ModelError, StateError
from protocol.ids import NodeId, Slot
from stage_agent.api import commands
from stage_agent.api.commands import Accepted, AnyCommand, Refused
from stage_agent.artifacts.node_artifacts import NodeArtifacts
from stage_agent.assembly import Switches
from stage_agent.clock import monotonic_us
from stage_agent.driver import Driver
from stage_agent.runtimes.reference.requests import GenerationInterrupted
from stage_agent.stage.agent import StageAgent


@dataclass(slots=True)
class Operations:
    """See ``CommandSink``."""

    driver: Driver
    planner: PlannerSettings
    agent: StageAgent
    switches: Switches
    calibration: Calibration
    artifacts: NodeArtifacts
    excluded: set[NodeId] = field(default_factory=set)

    async def submit(self, command: AnyCommand) -> Accepted | Refused:  # noqa: C901, PLR0912 - one line a command
        """Carry out ``command`` or say why not."""
        match command:
            case commands.PreviewPlan():
                return await self._preview(command)
            case commands.ExplainPlan(slot=slot):
                return await self._explain(Slot(slot))
            case commands.ServeModel():
                return await self._serve(command)
            case commands.UnserveModel(slot=slot):
                return self._unserve(Slot(slot))
            case commands.Generate():
                return await self._generate(command)
            case commands.Drain():
                return self._drain(draining=True)
            case commands.Resume():
                return self._drain(draining=False)
            case commands.Leave():
                self.switches.forget_mesh = True
                self.switches.stop.set()
                return Accepted({"leaving": True})
            case commands.Pin():
                return self._pin(command)
            case commands.Exclude():
                return self._exclude(command)
            case commands.SetPolicy():
                return self._policy(command)
            case commands.LockTopology():
                return self._lock(command)
            case _:
                assert_never(command)

    def on_settings(self, planner: PlannerSettings, replan: ReplanSettings) -> None:
        """The configuration was read again."""
        self.planner = planner
        self.driver.post(
            lambda: self.driver.carry_coordinator(self.driver.coordinator.on_settings(planner, replan, monotonic_us()))
        )

    def _drain(self, *, draining: bool) -> Accepted:
        self.switches.draining = draining
        (self.agent.drain if draining else self.agent.resume)()
        self.driver.post(self.driver.row_changed)
        return Accepted({"draining": draining})

    # ------------------------------------------------------------------ models

    async def _serve(self, command: commands.ServeModel) -> Accepted | Refused:
        try:
            model = await asyncio.to_thread(self.driver.wishes.library.open, command.model)
        except ModelError as error:
            return Refused("model_unreadable", str(error), status=422)
        slot = Slot(command.slot)
        try:
            self.driver.wishes.wish(slot, model, command.priority)
        except (StateError, ModelError) as error:
            return Refused("not_served", str(error), status=507)
        await self.artifacts.refresh()
        self.driver.post(self.driver.row_changed)
        return Accepted({"slot": slot, "model": str(model.path), "digest": model.package.digest})

    def _unserve(self, slot: Slot) -> Accepted | Refused:
        try:
            taken_back = self.driver.wishes.take_back(slot)
        except StateError as error:
            return Refused("not_unserved", str(error), status=507)
        if not taken_back:
            return Refused("unknown_slot", f"slot {slot} serves nothing: see `stagemesh status`", status=404)
        self.driver.post(self.driver.row_changed)
        return Accepted({"slot": slot})

    # ------------------------------------------------------------------ plans

    async def _preview(self, command: commands.PreviewPlan) -> Accepted | Refused:
        package: ModelPackage | None
        if command.model:
            try:
                package = (await asyncio.to_thread(self.driver.wishes.library.open, command.model)).package
            except ModelError as error:
                return Refused("model_unreadable", str(error), status=422)
        else:
            package = self._package(Slot(command.slot))
        if package is None:
            return Refused("unknown_slot", f"slot {command.slot} is not served: name a model", status=404)
        wanted = command.model_dump(exclude={"model", "slot", "exclude_nodes", "pin_stage0"}, exclude_none=True)
        planner = self.planner.model_copy(update=wanted)
        excluded: list[NodeId] = []
        for name in command.exclude_nodes:
            found = self._node(name)
            if isinstance(found, Refused):
                return found
            excluded.append(found)
        pin = self._node(command.pin_stage0) if command.pin_stage0 else NodeId("")
        if isinstance(pin, Refused):
            return pin
        problem = self._problem(package, planner, tuple(excluded), pin)
        result = await self._run(lambda: compute_plan(problem, clock_us=monotonic_us))
        if isinstance(result, Plan):
            return Accepted(plan_document(result))
        return _refused(result)

    async def _explain(self, slot: Slot) -> Accepted | Refused:
        package = self._package(slot)
        if package is None:
            return Refused("unknown_slot", f"slot {slot} is not served", status=404)
        problem = self._problem(package, self.planner, (), NodeId(""))
        result = await self._run(lambda: compute_plan(problem, clock_us=monotonic_us))
        if not isinstance(result, Plan):
            return _refused(result)
        plan = result
        explanation = await self._run(lambda: explain(problem, plan, clock_us=monotonic_us))
        return Accepted(explanation_document(explanation))

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.driver.planner_pool, work)

    def _package(self, slot: Slot) -> ModelPackage | None:
        return next((spec.package for spec in self.driver.wishes.specs if spec.slot == slot), None)

    def _problem(
        self, package: ModelPackage, planner: PlannerSettings, excluded: tuple[NodeId, ...], pin: NodeId
    ) -> PlanningProblem:
        now_us = monotonic_us()
        left_out = self.driver.coordinator.snapshot(now_us).left_out
        members = self.driver.membership.members(now_us)
        facts = {node_id: facts_of(member) for node_id, member in members.items()}
        terms = ProblemTerms(
            model=package,
            planner=planner,
            calibration=self.calibration,
            excluded={**left_out, **dict.fromkeys(excluded, "excluded")},
            pin_stage0=pin or None,
        )
        return build_problem(ClusterView(self.driver.node_id, facts), terms, SignalQuantiser())

    async def _generate(self, command: commands.Generate) -> Accepted | Refused:
        start_us = monotonic_us()
        try:
            result = await self.driver.runner.generate(Slot(command.slot), command.prompt, command.max_tokens)
        except GenerationInterrupted as interruption:
            return Refused(interruption.reason, str(interruption), status=503 if interruption.retriable else 422)
        return Accepted(
            {
                "slot": command.slot,
                "tokens": list(result.tokens),
                "ttft_us": result.ttft_us,
                "tpot_us": result.tpot_us,
                "elapsed_us": monotonic_us() - start_us,
            }
        )

    # ------------------------------------------------------------------ constraints

    def _pin(self, command: commands.Pin) -> Accepted | Refused:
        orders: list[OperatorCommand] = []
        for what, name in (("stage0", command.stage0), ("coordinator", command.coordinator)):
            if name is None:
                continue
            node_id = self._node(name) if name else NodeId("")
            if isinstance(node_id, Refused):
                return node_id
            orders.append(PinNode("stage0" if what == "stage0" else "coordinator", node_id))
        self._order(orders)
        return Accepted({"pinned": {order.what: order.node_id for order in orders if isinstance(order, PinNode)}})

    def _exclude(self, command: commands.Exclude) -> Accepted | Refused:
        orders: list[OperatorCommand] = []
        for name, exclude in [(each, True) for each in command.add] + [(each, False) for each in command.remove]:
            node_id = self._node(name)
            if isinstance(node_id, Refused):
                return node_id
            orders.append(ExcludeNode(node_id, exclude))
            (self.excluded.add if exclude else self.excluded.discard)(node_id)
        self._order(orders)
        return Accepted({"excluded": sorted(self.excluded)})

    def _policy(self, command: commands.SetPolicy) -> Accepted | Refused:
        self.planner = self.planner.model_copy(update=command.model_dump(exclude_none=True))
        self.driver.post(
            lambda: self.driver.carry_coordinator(
                self.driver.coordinator.on_settings(self.planner, None, monotonic_us())
            )
        )
        return Accepted({"policy": self.planner.model_dump(mode="json")})

    def _lock(self, command: commands.LockTopology) -> Accepted | Refused:
        stages: list[LockedStage] = []
        for stage in command.stages:
            node_id = self._node(stage.node)
            if isinstance(node_id, Refused):
                return node_id
            stages.append(LockedStage(node_id, stage.layer_start, stage.layer_end))
        topology = LockedTopology(tuple(stages), command.version, command.model, command.manifest_digest)
        self._order([Lock(Slot(command.slot), topology if stages else None)])
        return Accepted({"slot": command.slot, "locked": bool(stages)})

    def _order(self, orders: list[OperatorCommand]) -> None:
        for order in orders:
            self.driver.post(
                lambda order=order: self.driver.carry_coordinator(  # type: ignore[misc]
                    self.driver.coordinator.on_operator(order, monotonic_us())
                )
            )

    def _node(self, name: str) -> NodeId | Refused:
        """A node by id, unique prefix of an id, or unique name."""
        members = self.driver.membership.members()
        found = [node_id for node_id, member in members.items() if name in {node_id, member.row.name}]
        found = found or [node_id for node_id in members if node_id.startswith(name)]
        if len(found) == 1:
            return found[0]
        problem = "there is no node" if not found else "several nodes are called"
        return Refused("unknown_node", f"{problem} {name!r}: see `stagemesh peers`", status=404)


def _refused(result: PlanRefused) -> Refused:
    error = refusal_document(result)["error"]
    return Refused(error["code"], error["message"], error["details"])
