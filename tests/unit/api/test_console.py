"""What the console's page draws of the API's own documents, run by a JavaScript engine where the machine has one."""

import json
import re
import shutil
import subprocess

import pytest

from stage_agent.api.snapshot import LeftOutView, SlotView
from stage_agent.console.page import HTML
from tests.unit.api.pictures import SLOT, ask, shown

NODE = shutil.which("node")
READS = ("status", "nodes", "links", "plans", "stages", "events?limit=40")
BROWSER = """
class Made {
  constructor(tag) { this.tag = tag; this.style = {}; this.children = []; this.own = ""; }
  set textContent(text) { this.own = String(text); this.children = []; }
  get textContent() { return this.own + this.children.map((c) => c.textContent ?? c).join(" "); }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.own = ""; this.children = more; }
  *lines() { if (this.tag === "p") yield [this.className, this.textContent]; for (const c of this.children) if (c.lines) yield* c.lines(); }
}
const byId = {};
globalThis.document = { createElement: (tag) => new Made(tag), getElementById: (id) => byId[id] ??= new Made(id) };
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async (path) => ({ ok: true, status: 200, json: async () => ANSWERS[path] });
globalThis.setTimeout = () => console.log(JSON.stringify([byId.trouble.hidden, byId.trouble.textContent, ...byId.plans.lines()]));
"""


def drawn(*slots: SlotView) -> list:
    """Whether trouble is hidden, its text, and the paragraphs under *Plan* with their style."""
    app = shown(slots=slots)
    answers = {f"/api/v1/{name}": ask(app, "GET", f"/api/v1/{name}").json() for name in READS}
    script = re.search(r"<script>(.*?)</script>", HTML, re.DOTALL)
    assert script is not None
    assert NODE is not None
    program = f"const ANSWERS = {json.dumps(answers)};{BROWSER}\n{script.group(1).replace(chr(34) + 'use strict' + chr(34), '')}"
    ran = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(ran.stdout)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_console_says_who_is_left_out_of_a_plan_and_why():
    left_out = (LeftOutView("b" * 32, "<b>beta</b>", "settling"), LeftOutView("c" * 32, "gamma", "load failed"))
    from_plan = SlotView("a", "active", plan=SLOT.plan, left_out=left_out)
    without_plan = SlotView(
        "b", "planning", left_out=tuple(LeftOutView(str(n), f"n{n}", "draining") for n in range(10))
    )
    hidden, trouble, *lines = drawn(from_plan, without_plan, SlotView("c", "planning"))
    assert (hidden, trouble) == (True, "")
    told = [line for line in lines if "left out" in line[1]]
    eight = ", ".join(f"n{n} (draining)" for n in range(8))
    assert told == [
        ["warn", "left out of a: <b>beta</b> (settling), gamma (load failed)"],
        ["warn", f"left out of b: {eight} and 2 more"],
    ]
