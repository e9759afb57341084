"""The demo as a story on the screen: prepare, form, measure, elect, plan, place; and with ``--once`` lose and recover."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coordinator.model.package import ModelPackage
from stage_agent.cli.client import post_json
from stage_agent.cli.mesh_view import event_row
from stage_agent.cli.plan_view import columns, milliseconds, plan_view, size, with_names
from stage_agent.demo.mesh import DemoMesh, DemoNode
from stage_agent.demo.profile import DemoProfile, ShapedMachine
from stage_agent.demo.watch import MeshWatch, SeenEvent

FORM_LIMIT_S = 45.0
SERVE_LIMIT_S = 60.0
REPLAN_LIMIT_S = 60.0
RECOVERY_LIMIT_S = 60.0

PROMPT = (1, 300, 301, 302, 303, 304, 305, 306)
TOKENS = 48

QUIET_KINDS = frozenset({"row_published", "dial_failed"})
"""Events that would only be noise on the demo's screen; they are in the API and the logs all the same."""


class Story:
    """Tells one run. ``console`` is standard output; everything shown comes from the nodes' APIs or the profile."""

    def __init__(
        self, console: Console, mesh: DemoMesh, machines: tuple[ShapedMachine, ...], model: ModelPackage, path: Path
    ) -> None:
        self.console = console
        self.mesh = mesh
        self.machines = machines
        self.model = model
        self.path = path
        self.watch = MeshWatch(mesh, self._show_event)
        self.shown: list[Mapping[str, Any]] = []
        self.tokens: list[tuple[int, ...]] = []
        """What the same prompt gave under each plan; always the same."""

    def introduce(self, profile: DemoProfile) -> None:
        """What is pretended and what is real, before anything runs."""
        table = columns("machine", ">memory for layers", ">memory bandwidth", "link delay, each way (shaped)")
        for machine in self.machines:
            delays = [
                f"→ {link.split(' -> ')[1]} {shape.delay_ms:g} ms"
                for link, shape in profile.links.items()
                if link.startswith(f"{machine.name} -> ")
            ]
            table.add_row(
                Text(machine.name, style="bold"),
                f"{size(machine.memory_bytes)} (shaped)",
                f"{size(machine.memory_bandwidth_bytes_per_s)}/s (shaped)",
                ", ".join(delays),
            )
        model = self.model
        self.console.print(
            Panel(
                Group(
                    Text(" ".join(profile.why.split())),
                    Text(),
                    table,
                    Text(),
                    Text.assemble(
                        ("model  ", "dim"), (model.name, "bold"), f"  {model.layer_count} layers, {size(model.weight_bytes)}",
                        f" of weights, embeddings {'tied' if model.tied_embeddings else 'untied'}  ", (str(self.path), "dim"),
                    ),
                    Text.assemble(
                        ("real   ", "dim"), "processes, certificates, QUIC, gossip, round trips, election, planning, loading, fencing",
                    ),
                    Text.assemble(("shaped ", "dim"), "memory sizes, memory bandwidths, link delays (from the profile)"),
                ),
                title="stagemesh demo",
                title_align="left",
            )
        )  # fmt: skip

    def form(self) -> None:
        """Found the mesh, join everybody, settle, elect, plan, place; then show the plan."""
        self._step("starting agents and joining them with one-time tokens", self._form_mesh)
        self._wait("every agent sees every other", FORM_LIMIT_S, self.watch.everybody_alive)
        self._wait("round trips settled on every link", FORM_LIMIT_S, self.watch.links_settled)
        self._wait("one coordinator", SERVE_LIMIT_S, lambda: self.watch.coordinator() is not None)
        self._step(f"asked the mesh to serve {self.model.name}", self._serve_model)
        self._wait(
            "a plan is placed, every stage is ready, stage 0 is routable",
            SERVE_LIMIT_S,
            lambda: self.watch.serving() is not None,
        )
        self.show_plan("the plan")
        self.generate()
        self.show_links()
        self.show_addresses()

    def lose_and_recover(self) -> None:
        """Kill the last stage's node, see the replan under a higher epoch, start it again, see it back in the plan."""
        before = self.shown[-1]
        victim = self._victim(before)
        names = self.watch.names()
        old_term = int(before["term"])
        self.console.rule(f"[bold]power cut: {victim.name}", align="left")
        lost_s = time.monotonic()
        self.mesh.kill(victim)
        self._wait(
            f"a plan without {victim.name} serves under a higher epoch",
            REPLAN_LIMIT_S,
            lambda: self._is_replanned(old_term, victim, names, present=False),
        )
        replanned_s = time.monotonic() - lost_s
        self.show_plan("the plan after the loss")
        after = self.shown[-1]
        self.generate()
        self.console.rule(f"[bold]power back: {victim.name}", align="left")
        back_s = time.monotonic()
        self.mesh.start(victim)
        self.mesh.wait_for_api(victim)
        self._wait(
            f"{victim.name} is back in the mesh, under its old identity", FORM_LIMIT_S, self.watch.everybody_alive
        )
        self._wait(
            f"the better plan with {victim.name} serves again",
            RECOVERY_LIMIT_S,
            lambda: self._is_replanned(int(after["term"]), victim, names, present=True),
        )
        recovered_s = time.monotonic() - back_s
        self.show_plan("the plan after recovery")
        last = self.shown[-1]
        self.generate()
        self._summary(before, after, last, victim, replanned_s, recovered_s)

    def follow(self) -> None:
        """Show events until interrupted."""
        self.console.print(Text("following events; Ctrl-C stops the mesh and removes its files", style="dim"))
        while True:
            self.watch.poll()
            time.sleep(0.25)

    def show_plan(self, title: str) -> None:
        """The serving plan as tables, with names instead of ids; remembered for the summary."""
        slot = self._serving()
        self.shown.append(slot)
        names = self.watch.names()
        coordinator = self.watch.coordinator()
        facts = Text.assemble(
            ("coordinator ", "dim"), coordinator.name if coordinator else "?",
            ("   term ", "dim"), str(slot["term"]),
            ("   epoch ", "dim"), str(slot["epoch"]),
            ("   generation ", "dim"), str(slot["generation"]),
            ("\nparticipants ", "dim"), str(slot["participant_set_hash"]),
        )  # fmt: skip
        body: list[RenderableType] = [plan_view(with_names(slot["plan"], names)), Text(), facts]
        if slot["reason"]:
            body.append(Text.assemble(("why ", "dim"), str(slot["reason"])))
        self.console.print(Panel(Group(*body), title=title, title_align="left"))

    def generate(self) -> None:
        """Send a prompt through the placed stages; measured against predicted time per token."""
        if self.mesh.engine != "reference":
            return
        slot = self._serving()
        first = self.watch.names()[slot["plan"]["stages"][0]["node_id"]]
        node = next(each for each in self.mesh.nodes if each.name == first)
        body = {"slot": slot["slot"], "prompt": list(PROMPT), "max_tokens": TOKENS}
        answer = post_json(node.api, "/api/v1/generate", body)
        predicted_us, measured_us = slot["plan"]["modeled"]["decode_tpot_us"], answer["tpot_us"]
        self.tokens.append(tuple(answer["tokens"]))
        off = f"{(measured_us - predicted_us) / predicted_us:+.0%}" if predicted_us else "not predicted"
        self.console.print(
            Text.assemble(
                (f"tokens {' '.join(str(token) for token in answer['tokens'][:16])} …\n", "cyan"),
                ("time per token  ", "dim"), f"measured {milliseconds(measured_us)}", ("  predicted ", "dim"),
                milliseconds(predicted_us), ("  off by ", "dim"), off,
            )
        )  # fmt: skip

    def show_links(self) -> None:
        """What was measured on every directed link beside what it is shaped to be."""
        table = columns("link", ">round trip (measured)", ">shaped to", ">samples", "settled", title="links")
        shapes = self.mesh.profile.links
        for link in sorted(
            self.watch.links(self.watch.running()[0]), key=lambda each: (each["source_name"], each["target_name"])
        ):
            there, back = (
                f"{link['source_name']} -> {link['target_name']}",
                f"{link['target_name']} -> {link['source_name']}",
            )
            shaped_us = round((shapes[there].delay_ms + shapes[back].delay_ms) * 1_000)
            table.add_row(
                there.replace("->", "→"),
                milliseconds(link["rtt_us"]),
                milliseconds(shaped_us),
                str(link["samples"]),
                "yes" if link["settled"] else "no",
            )
        self.console.print(table)

    def show_addresses(self) -> None:
        """Where to look with a browser, curl or Prometheus."""
        self.console.print(Text("\nconsole of every node (also /metrics, /api/v1/status, /api/v1/plan)", style="bold"))
        for node in self.watch.running():
            self.console.print(Text.assemble(f"{node.name:<14}", f"http://{node.api}/"), soft_wrap=True)
        self.console.print()

    def _serving(self) -> Mapping[str, Any]:
        slot = self.watch.serving()
        assert slot is not None, "called only after a wait for it"
        return slot

    def _victim(self, slot: Mapping[str, Any]) -> DemoNode:
        """The node of the last stage that does not coordinate; any other stage's node when that is the coordinator."""
        names = self.watch.names()
        coordinator = self.watch.coordinator()
        order = [names[stage["node_id"]] for stage in reversed(slot["plan"]["stages"])]
        spared = coordinator.name if coordinator and len(order) > 1 else ""
        chosen = next(name for name in order if name != spared)
        return next(node for node in self.mesh.nodes if node.name == chosen)

    def _is_replanned(self, old_term: int, victim: DemoNode, names: Mapping[str, str], *, present: bool) -> bool:
        slot = self.watch.serving()
        if slot is None or int(slot["term"]) <= old_term:
            return False
        uses = any(names.get(stage["node_id"]) == victim.name for stage in slot["plan"]["stages"])
        return uses is present

    def _summary(
        self,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        last: Mapping[str, Any],
        victim: DemoNode,
        replanned_s: float,
        recovered_s: float,
    ) -> None:
        names = self.watch.names()
        table = Table(box=None, show_header=True, header_style="dim", pad_edge=False)
        for header in ("", "stages", "epoch", "modelled time per token"):
            table.add_column(header)
        for label, slot in (("first plan", before), (f"without {victim.name}", after), ("recovered", last)):
            stages = " → ".join(
                f"{names.get(stage['node_id'], victim.name)} [{stage['layer_start']},{stage['layer_end']})"
                for stage in slot["plan"]["stages"]
            )
            table.add_row(label, stages, str(slot["epoch"]), milliseconds(slot["plan"]["modeled"]["decode_tpot_us"]))
        self.console.print(
            Panel(
                Group(
                    table,
                    Text(),
                    Text(
                        f"serving again {replanned_s:.1f} s after the power cut; back on the better plan {recovered_s:.1f} s after power returned; {self.watch.elapsed_s:.0f} s in all"
                    ),
                ),
                title="summary",
                title_align="left",
                border_style="green",
            )
        )

    def _serve_model(self) -> None:
        self.watch.serve(self.path)

    def _form_mesh(self) -> None:
        self.mesh.form()

    def _step(self, label: str, action: Callable[[], None]) -> None:
        start = time.monotonic()
        action()
        self._done(label, time.monotonic() - start)

    def _wait(self, label: str, limit_s: float, condition: Callable[[], bool]) -> None:
        self._done(label, self.watch.until(label, limit_s, condition))

    def _done(self, label: str, took_s: float) -> None:
        self.console.print(
            Text.assemble(
                (f"{self.watch.elapsed_s:6.1f} s  ", "dim"), ("✓ ", "green"), label, (f"  ({took_s:.1f} s)", "dim")
            )
        )

    def _show_event(self, event: SeenEvent) -> None:
        if event.kind not in QUIET_KINDS:
            who = Text(f"{event.at_s:6.1f} s    {event.node:<12}", "dim")
            self.console.print(event_row(who, Text(f"{event.kind:<16}", "cyan"), event.text))
