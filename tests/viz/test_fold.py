"""One schema, two folds: the page's rebuilds, after every step, the state that Python's does."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from remote_store import remote_trace
from viz_runs import Moody, busy_trace
from viz_traces import make_trace

import minivllm.viz
from minivllm.core.trace import Trace
from minivllm.viz.block_map import BlockMap, fetched_blocks
from minivllm.viz.tables import javascript
from minivllm.viz.timeline import Timeline

STATIC = Path(minivllm.viz.__file__).parent / "static"
STATES = """
export async function walk(made, header, bytes) {
  const data = new made.Data(header, Uint8Array.from(bytes));
  const frames = new made.Frames(data, new made.Origins(await data.part(header.origins)));
  const at = async (step) => {
    while (!frames.seek(step)) await frames.load(frames.chunkOf(step));
    const { fold } = frames;
    const requests = [...fold.requests].sort(([a], [b]) => a - b).map(([r, its]) => [r, its.status, its.computed, its.tables, its.cpu]);
    return JSON.stringify({ ref: [...fold.ref], name: [...fold.name], free: fold.firstFree(fold.numFree), cached: fold.numCachedFree,
      cpu: [...fold.cpuOwner].flatMap((r, id) => (r < 0 ? [] : [[id, r]])), requests, waiting: fold.waiting, running: fold.running,
      remote: fold.remote, fetched: [...fold.fetched].flatMap((bit, id) => (bit ? [id] : [])) });
  };
  const forwards = [];
  for (let step = 0; step < frames.steps; step++) forwards.push(await at(step));
  const wrong = [];
  for (let step = frames.steps - 1; step >= 0; step--) {
    if (await at(step) !== forwards[step]) wrong.push(step);
    if (step % 20 === 0) await new Promise((rest) => setTimeout(rest, 30));  // checkpoints are made meanwhile
  }
  for (let i = 0, step = 1; i < 200; i++, step = (step * 37 + 11) % frames.steps) if (await at(step) !== forwards[step]) wrong.push(step);
  return { states: forwards.map((state) => JSON.parse(state)), wrong, checkpoints: frames.checkpoints.size };
}
"""
RUN = """
import { readFileSync } from "node:fs";
import { Data } from "./data.js";
import { Frames, Origins } from "./fold.js";
import { walk } from "./walk.js";
const { header, bytes } = JSON.parse(readFileSync("payload.json", "utf8"));
console.log(JSON.stringify(await walk({ Data, Frames, Origins }, header, bytes)));
"""

ROUTED = """
import { readFileSync } from "node:fs";
import { Data } from "./data.js";
import { readLanes } from "./timeline.js";
const { header, bytes } = JSON.parse(readFileSync("payload.json", "utf8"));
const lanes = await readLanes(new Data(header, Uint8Array.from(bytes)), header.lanes);
console.log(JSON.stringify(lanes.ids.map((_, request) => lanes.facts(request, 3).find(([name]) => name === "routed")[1])));
"""


def folded_by_javascript(trace: Trace, folder: Path) -> dict:
    """What the page's fold makes of a trace, in Node; checkpoints lie closer together than on a page, so that they are used."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not here: `apt-get install nodejs`")
    payload = BlockMap(trace).data()
    for name in ("data.js", "schema.js"):
        shutil.copy(STATIC / name, folder)
    fold = (STATIC / "fold.js").read_text()
    assert "const APART = 16384;" in fold
    (folder / "fold.js").write_text(fold.replace("const APART = 16384;", "const APART = 300;"))
    (folder / "walk.js").write_text(STATES)
    (folder / "run.js").write_text(RUN)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "payload.json").write_text(json.dumps({"header": payload.full_header(), "bytes": list(payload.bytes())}))
    done = subprocess.run([node, "run.js"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def folded_by_python(trace: Trace) -> list[dict]:
    """The same, from the states that `Trace.states` gives."""
    stream = BlockMap(trace).reading
    number, names = stream.requests.of, stream.names.of
    return [
        {
            "ref": state.ref_cnt,
            "name": [-1 if name is None else names[name] for name in state.hashes],
            "free": state.free,
            "cached": sum(state.hashes[block] is not None for block in state.free),
            "cpu": sorted([block, number[r]] for r, its in state.requests.items() for block in its.cpu_blocks),
            "requests": sorted(
                [number[r], its.status, its.num_computed_tokens, its.tables, its.cpu_blocks]
                for r, its in state.requests.items()
            ),
            "waiting": [number[r] for r in state.waiting],
            "running": [number[r] for r in state.running],
            "remote": [number[r] for r in state.remote],
            "fetched": sorted(fetched_blocks(trace, step)),
        }
        for step, state in trace.states()
    ]


def with_rejected_drafts() -> Trace:
    """A run in which the model took back a token of the first request after every fifth decision."""
    trace = make_trace(num_blocks=97, steps=60, rate=0.8)
    decisions = [i for i, event in enumerate(trace.events) if event[0] == "schedule"][::-5]
    for i in decisions:
        trace.events.insert(i + 1, ("rollback", {next(iter(trace.events[i][1])): 1}))
    return trace


def with_routes() -> Trace:
    """A run whose requests a router has sent."""
    trace = busy_trace(13)
    for i in [i for i, event in enumerate(trace.events) if event[0] == "add"][::-1]:
        candidates = ((i % 3, 8 * i, None), (2, 5, 1.5))
        trace.events.insert(i, ("route", trace.events[i][1], 0.1, i % 2, candidates, f"reason {i}"))
    return trace


TRACES = {
    "requests of a router": with_routes,
    "rejected drafts": with_rejected_drafts,
    "shared prefixes": lambda: make_trace(num_blocks=97, steps=120, rate=0.8),
    "many chunks": lambda: make_trace(num_blocks=300, steps=400, rate=1.0, seqs=24),
    "swap": lambda: make_trace(num_blocks=70, swap=60, steps=100, rate=0.9),
    "groups": lambda: make_trace(num_blocks=150, kind="hybrid", steps=80, rate=0.8),
    "begun under way, aborts, a reset": lambda: busy_trace(3),
    "a policy that gives nothing": lambda: busy_trace(5, policy=Moody()),
    "salts and swap": lambda: busy_trace(7, swap=30, salts=(None, "a")),
    "blocks from elsewhere": lambda: remote_trace()[0],
    "windows": lambda: busy_trace(11, kind="hybrid", blocks=40),
}


@pytest.mark.parametrize("name", TRACES)
def test_both_folds_rebuild_the_same_states(name, tmp_path):
    """Forwards; then backwards from checkpoints that lie close together, and by jumps."""
    trace = TRACES[name]()
    seen = folded_by_javascript(trace, tmp_path)
    for step, (page, python) in enumerate(zip(seen["states"], folded_by_python(trace), strict=True)):
        assert page == python, f"step {step}"
    assert seen["wrong"] == []
    if len(trace) > 1000:
        assert seen["checkpoints"] > 2


def test_the_blocks_that_are_marked_are_those_that_the_store_filled():
    trace, brought = remote_trace(1)
    trace.check()
    marked = [fetched_blocks(trace, step) for step in range(trace.num_steps)]
    for (step, state), known in zip(trace.states(), brought, strict=True):
        assert {block for block in marked[step] if state.hashes[block]} == known, step
    assert sum(map(bool, brought)) > trace.num_steps / 2
    kinds = [event[0] for event in trace.events]
    assert all(kinds.count(kind) for kind in ("kv_wait", "kv_arrive", "kv_keep", "kv_release"))


def test_the_page_knows_the_schema_of_python():
    """`minivllm.viz.tables.write()` writes it anew."""
    assert (STATIC / "schema.js").read_text() == javascript()


def test_the_page_tells_where_a_router_has_sent_each_request(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not here: `apt-get install nodejs`")
    view = Timeline(trace := with_routes())
    payload = view.data()
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run.js").write_text(ROUTED)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "payload.json").write_text(
        json.dumps({"header": payload.full_header(), "bytes": list(payload.bytes())})
    )
    done = subprocess.run([node, "run.js"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = dict(zip(view.lanes.request_ids, json.loads(done.stdout), strict=True))
    sent = {e.request: f"to replica {e.replica} of 2: {e.reason}" for e in trace if e.kind == "route"}
    assert told == dict.fromkeys(trace.start.requests) | sent and len(sent) > 10
    name = next(iter(sent))
    assert any(f"was sent {sent[name]}" in line for line in trace.why(name))
