"""The API's commands as inputs of the cores. Every answer says what began or why not; nothing is half done."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from config.settings import PlannerSettings, ReplanSettings
from coordinator.calibrated import HopCosts, NodeSpeed, costs_text, fingerprint, speed_text
from coordinator.model.package import ModelPackage
from coordinator.orders import POLICY_SETTINGS, with_setting
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.problem import Calibration, PlanningProblem
from coordinator.view import ClusterView, ProblemTerms, SignalQuantiser, build_problem, facts_of
from protocol.errors import ModelError, StateError
from protocol.ids import NodeId, Slot
from protocol.orders import (
    EXCLUDE,
    HOP_COSTS,
    LOCK,
    NODE_SPEED,
    PIN_COORDINATOR,
    PIN_STAGE0,
    POLICY,
    OperatorOrder,
    OrderedStage,
)
from stage_agent.admittance import Admittance
from stage_agent.api import commands
from stage_agent.api.commands import Accepted, AnyCommand, Refused
from stage_agent.artifacts.node_artifacts import NodeArtifacts
from stage_agent.clock import monotonic_us
from stage_agent.driver import Driver
from stage_agent.orders import OrderRefusedError
from stage_agent.planner import compute_plan, document_of, explanation_of, refusal_of
from stage_agent.runtimes.reference.requests import GenerationInterrupted
from stage_agent.said import keep_drained
from stage_agent.stage.agent import StageAgent
from stage_agent.switches import Switches


@dataclass(slots=True)
class Operations:
    """See ``CommandSink``."""

    driver: Driver
    agent: StageAgent
    switches: Switches
    calibration: Calibration
    artifacts: NodeArtifacts
    admittance: Admittance

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
            case commands.Revoke(node=node):
                return self.admittance.revoke(node)
            case commands.RotateKey():
                return self.admittance.rotate()
            case commands.Pin():
                return self._pin(command)
            case commands.Exclude():
                return self._exclude(command)
            case commands.SetPolicy():
                return self._policy(command)
            case commands.LockTopology():
                return self._lock(command)
            case commands.ApplyCalibration():
                return self._calibrate(command)
            case _:
                assert_never(command)

    def on_settings(self, planner: PlannerSettings, replan: ReplanSettings) -> None:
        """The configuration was read again; orders stand above it."""
        self.driver.post(
            lambda: self.driver.carry_coordinator(self.driver.coordinator.on_settings(planner, replan, monotonic_us()))
        )

    def _drain(self, *, draining: bool) -> Accepted | Refused:
        try:
            keep_drained(self.driver.store, drained=draining)
        except StateError as error:
            return Refused("not_kept", str(error), status=507)
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
        if any(order.key == (LOCK, slot) and not order.removed for order in self.driver.orders.known(monotonic_us())):
            # Its split was for the model that is given up; the next one is planned freely.
            refused = self._order([_order(LOCK, slot, removed=True)])
            if refused is not None:
                return refused
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
        planner = self.driver.coordinator.planner.model_copy(update=wanted)
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
        result = await self._run(lambda: compute_plan(problem))
        if isinstance(result, Plan):
            return Accepted(document_of(result))
        return _refused(result)

    async def _explain(self, slot: Slot) -> Accepted | Refused:
        package = self._package(slot)
        if package is None:
            return Refused("unknown_slot", f"slot {slot} is not served", status=404)
        problem = self._problem(package, self.driver.coordinator.planner, (), NodeId(""))
        result = await self._run(lambda: compute_plan(problem))
        if not isinstance(result, Plan):
            return _refused(result)
        plan = result
        return Accepted(await self._run(lambda: explanation_of(problem, plan)))

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.driver.planner_pool, work)

    def _package(self, slot: Slot) -> ModelPackage | None:
        return next((spec.package for spec in self.driver.wishes.specs if spec.slot == slot), None)

    def _problem(
        self, package: ModelPackage, planner: PlannerSettings, excluded: tuple[NodeId, ...], pin: NodeId
    ) -> PlanningProblem:
        now_us, standing = monotonic_us(), self.driver.coordinator.orders
        left_out = self.driver.coordinator.snapshot(now_us).left_out
        members = self.driver.membership.members(now_us)
        facts = {node_id: facts_of(member) for node_id, member in members.items()}
        terms = ProblemTerms(
            model=package,
            planner=planner,
            calibration=standing.calibration(self.calibration),
            speeds=standing.speeds,
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
                "epochs": [str(epoch) for epoch in result.epochs],
                "ttft_us": result.ttft_us,
                "tpot_us": result.tpot_us,
                "elapsed_us": monotonic_us() - start_us,
            }
        )

    # ------------------------------------------------------------------ constraints

    def _pin(self, command: commands.Pin) -> Accepted | Refused:
        orders: list[OperatorOrder] = []
        for kind, name in ((PIN_STAGE0, command.stage0), (PIN_COORDINATOR, command.coordinator)):
            if name is None:
                continue
            node_id = self._node(name) if name else NodeId("")
            if isinstance(node_id, Refused):
                return node_id
            orders.append(_order(kind, value=node_id, removed=not node_id))
        return self._order(orders) or Accepted(
            {"pinned": {order.kind.removeprefix("pin_"): order.value for order in orders}}
        )

    def _exclude(self, command: commands.Exclude) -> Accepted | Refused:
        orders: list[OperatorOrder] = []
        for name, exclude in [(each, True) for each in command.add] + [(each, False) for each in command.remove]:
            node_id = self._node(name, gone=not exclude)
            if isinstance(node_id, Refused):
                return node_id
            orders.append(_order(EXCLUDE, node_id, removed=not exclude))
        known = self.driver.orders.known
        return self._order(orders) or Accepted(
            {"excluded": [each.subject for each in known(monotonic_us()) if each.kind == EXCLUDE and not each.removed]}
        )

    def _policy(self, command: commands.SetPolicy) -> Accepted | Refused:
        wanted = command.model_dump(exclude_none=True, exclude={"reset"})
        orders: list[OperatorOrder] = []
        if command.reset:
            standing = {order.subject for order in self.driver.orders.known(0) if order.kind == POLICY}
            orders += [_order(POLICY, name, removed=True) for name in sorted(standing - set(wanted))]
        for name, value in sorted(wanted.items()):
            text = json.dumps(value)
            if name not in POLICY_SETTINGS or with_setting(self.driver.coordinator.planner, name, text) is None:
                return Refused("invalid_policy", f"{name} cannot be {text}", status=422)
            orders.append(_order(POLICY, name, value=text))
        return self._order(orders) or Accepted({"policy": self.driver.coordinator.planner.model_dump(mode="json")})

    def _calibrate(self, command: commands.ApplyCalibration) -> Accepted | Refused:
        members, orders = self.driver.membership.members(), []
        if command.reset:
            kept = [order for order in self.driver.orders.known(0) if order.kind in {NODE_SPEED, HOP_COSTS}]
            orders += [_order(each.kind, each.subject, removed=True) for each in kept if not each.removed]
        for speed in command.speeds:
            node_id = self._node(speed.node)
            if isinstance(node_id, Refused):
                return node_id
            found = NodeSpeed(speed.bytes_per_s, fingerprint(members[node_id].row))
            orders.append(_order(NODE_SPEED, node_id, value=speed_text(found)))
        if command.hops is not None:
            costs = HopCosts(command.hops.rtt_multiplier_milli, command.hops.per_hop_us)
            orders.append(_order(HOP_COSTS, command.hops.profile, value=costs_text(costs)))
        return self._order(orders) or Accepted({"orders": len(orders)})

    def _lock(self, command: commands.LockTopology) -> Accepted | Refused:
        stages: list[OrderedStage] = []
        for stage in command.stages:
            node_id = self._node(stage.node)
            if isinstance(node_id, Refused):
                return node_id
            stages.append(OrderedStage(node_id=node_id, layer_start=stage.layer_start, layer_end=stage.layer_end))
        order = _order(LOCK, command.slot, removed=not stages).model_copy(
            update={
                "stages": tuple(stages),
                "model": command.model or "",
                "manifest_digest": command.manifest_digest or "",
            }
        )
        return self._order([order]) or Accepted({"slot": command.slot, "locked": bool(stages)})

    def _order(self, orders: list[OperatorOrder]) -> Refused | None:
        """Keep the orders, tell everybody, obey; ``None`` when done."""
        try:
            self.driver.orders.say(orders, monotonic_us())
        except OrderRefusedError as error:
            return Refused("too_many_orders", str(error))
        except StateError as error:
            return Refused("not_kept", str(error), status=507)
        self.driver.post(self.driver.orders_changed)
        return None

    def _node(self, name: str, *, gone: bool = False) -> NodeId | Refused:
        """A node by id, unique prefix of an id, or unique name; with ``gone`` also one that only an exclusion names."""
        members = self.driver.membership.members()
        if gone and any(order.key == (EXCLUDE, name) for order in self.driver.orders.known(0)):
            return NodeId(name)
        found = [node_id for node_id, member in members.items() if name in {node_id, member.row.name}]
        found = found or [node_id for node_id in members if node_id.startswith(name)]
        if len(found) == 1:
            return found[0]
        problem = "there is no node" if not found else "several nodes are called"
        return Refused("unknown_node", f"{problem} {name!r}: see `stagemesh peers`", status=404)


def _order(kind: str, subject: str = "", *, value: str = "", removed: bool = False) -> OperatorOrder:
    """An order to be said; who says it, and which version it is, the register knows."""
    return OperatorOrder(kind=kind, subject=subject, value=value, removed=removed, author="here")


def _refused(result: PlanRefused) -> Refused:
    error = refusal_of(result)["error"]
    return Refused(error["code"], error["message"], error["details"])
