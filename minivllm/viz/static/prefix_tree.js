// The cached prefixes as a tree: a branch a row, a block a box. What is in use, kept or lost at the step, and how often it was found.
import { CACHED, EVICTED, HIT, TREE_KINDS } from "./schema.js";
import { ownerColour, sharpen, tint } from "./theme.js";
import { button, count, facts, h, makeLegend, makeTooltip, onceAFrame, swatch } from "./ui.js";

const ROW = 22, HEAD = 6, MOST = 380, FOLD_FROM = 4, LONG = 24, STRIP = 74, GUTTER = 92, RIGHT = 16;

class Tree {
  constructor(header, ids, layout, events, refs, names, texts) {
    Object.assign(this, { header, ids, names, texts });
    const b = header.branches;
    this.first = new Int32Array(b + 1);
    for (let i = 0; i < b; i++) this.first[i + 1] = this.first[i] + layout[i];
    this.parent = layout.subarray(b, 2 * b);
    this.branchHits = layout.subarray(2 * b, 3 * b);
    this.group = layout.subarray(3 * b, 4 * b);
    this.depth = layout.subarray(4 * b);
    const n = events.length / 5;
    this.events = { count: n, step: cumulated(events, n), node: part(events, 1, n), kind: part(events, 2, n), block: part(events, 3, n), request: part(events, 4, n) };
    this.owner = new Int32Array(header.nodes).fill(-1); // who computed a node first
    for (let i = n - 1; i >= 0; i--) if (this.events.kind[i] === CACHED) this.owner[this.events.node[i]] = this.events.request[i];
    const m = refs.length / 3;
    this.refs = { count: m, step: cumulated(refs, m), node: part(refs, 1, m), change: part(refs, 2, m) };
    this.leaf = new Uint8Array(b).fill(1);
    for (const p of this.parent) if (p >= 0) this.leaf[p] = 0;
    this.historyOf = null;
  }

  // The tree after a step: per node whether it is cached (how many blocks hold it), was ever, hits, holders; and what happened in the step.
  at(step) {
    const n = this.header.nodes;
    const state = { step, cached: new Int8Array(n), ever: new Uint8Array(n), hits: new Int32Array(n), refs: new Int32Array(n), news: new Map() };
    const { events, refs } = this;
    for (let i = 0; i < events.count && events.step[i] <= step; i++) {
      const node = events.node[i];
      if (events.kind[i] === CACHED) {
        state.cached[node]++;
        state.ever[node] = 1;
      } else if (events.kind[i] === HIT) state.hits[node]++;
      else state.cached[node]--;
      if (events.step[i] === step) state.news.set(node, events.kind[i]);
    }
    for (let i = 0; i < refs.count && refs.step[i] <= step; i++) state.refs[refs.node[i]] += refs.change[i];
    return state;
  }

  // The events of one node, as rows of step, kind, block, request.
  history(node) {
    if (!this.historyOf) {
      this.historyOf = Array.from({ length: this.header.nodes }, () => []);
      const { events } = this;
      for (let i = 0; i < events.count; i++) this.historyOf[events.node[i]].push([events.step[i], events.kind[i], events.block[i], events.request[i]]);
    }
    return this.historyOf[node];
  }

  text(node) {
    return this.texts[node];
  }

  who(request) {
    return request < 0 ? "an unknown request" : this.ids[request];
  }
}

const part = (flat, i, n) => flat.subarray(i * n, (i + 1) * n);
function cumulated(flat, n) {
  const out = new Int32Array(n);
  for (let i = 0, sum = 0; i < n; i++) out[i] = sum += flat[i];
  return out;
}

// Boxes in the colour of the request that computed them first: in use is full, kept is pale with a rim, lost is crossed, not yet cached is a faint rim.
function paintBlock(pen, kind, x, y, w, height, hue, colour) {
  pen.lineWidth = 1;
  if (kind === "in use") {
    pen.fillStyle = hue;
    pen.fillRect(x, y, w, height);
  } else if (kind === "kept") {
    pen.fillStyle = tint(hue, 0.3, colour("panel"));
    pen.fillRect(x, y, w, height);
    pen.strokeStyle = hue;
    if (w > 3) pen.strokeRect(x + 0.5, y + 0.5, w - 1, height - 1);
  } else if (kind === "lost") {
    pen.strokeStyle = colour("preempted");
    if (w > 3) pen.strokeRect(x + 0.5, y + 0.5, w - 1, height - 1);
    pen.beginPath();
    pen.moveTo(x + 1, y + 1);
    pen.lineTo(x + w - 1, y + height - 1);
    pen.moveTo(x + w - 1, y + 1);
    pen.lineTo(x + 1, y + height - 1);
    pen.stroke();
  } else {
    pen.strokeStyle = colour("line");
    pen.strokeRect(x + 0.5, y + 0.5, w - 1, height - 1);
  }
}

const oneLine = (text) => text.replace(/\s+/g, " ").trim();

export async function render(card, data, context) {
  const { cursor } = context;
  const { header } = data;
  const [ids, layout, events, refs, names, texts] = await Promise.all([
    data.json(header.ids), data.part(header.layout), data.part(header.events), data.part(header.refs), data.json(header.names), data.json(header.texts)]);
  const tree = new Tree(header, ids, layout, events, refs, names, texts);
  const colour = (name) => context.colour(name);
  const hueOf = (node) => (tree.owner[node] < 0 ? colour("prefill") : colour(ownerColour(tree.owner[node])));
  const legend = TREE_KINDS.map((kind) => ({ label: kind === "kept" ? "kept for reuse" : kind, value: "", kind,
    swatch: swatch(14, 14, (pen, w, height) => paintBlock(pen, kind, 0, 0, w, height, colour("prefill"), colour)) }));
  const found = { label: "times found", swatch: swatch(14, 14, (pen, w, height) => { pen.fillStyle = colour("decode"); pen.fillRect(0, height - 6, w, 4); }) };
  const words = makeLegend([...legend, found]);
  if (!header.nodes) {
    card.body.append(h("p", { class: "mv-note" }, header.caching
      ? "Nothing was cached in this run: no block was full."
      : "Prefix caching was off in this run, so nothing was kept (enable_prefix_caching)."));
    return () => {};
  }
  card.body.append(words.element);

  const canvas = h("canvas", { class: "mv-tree-canvas", "aria-hidden": "true" });
  const spacer = h("div");
  const pane = h("div", { class: "mv-tree-pane", tabindex: 0, role: "application", "aria-roledescription": "tree of cached blocks",
    "aria-label": "cached prefixes. Up and down: branch; left and right: block; Enter: pin the block in every view; F: fold or unfold" }, spacer);
  const box = h("div", { class: "mv-tree-box" }, canvas, pane);
  const strip = h("canvas", { class: "mv-tree-strip", role: "img", "aria-label": "cached blocks, blocks found and blocks lost in each step" });
  const line = h("div", { class: "mv-lanes-cursor" });
  const stripBox = h("div", { class: "mv-tree-strips" }, strip, line);
  const detail = h("p", { class: "mv-lanes-detail" });
  card.body.append(box, stripBox, detail);
  const tooltip = makeTooltip(card.element);

  const unfolded = new Set(); // parents whose plain branches are shown one by one
  let group = 0;
  let rows = [];
  let state = tree.at(cursor.step);
  let chosen = -1; // node
  let width = 0;
  let cell = 14;

  const plain = (b) => tree.leaf[b] && tree.branchHits[b] === 0;

  function arrange() {
    const same = new Map();
    for (let b = 0; b < header.branches; b++) if (plain(b) && tree.group[b] === group) same.set(tree.parent[b], [...(same.get(tree.parent[b]) ?? []), b]);
    rows = [];
    const ends = new Map();
    const at = new Map();
    for (let b = 0; b < header.branches; b++) {
      if (tree.group[b] !== group) continue;
      const parent = tree.parent[b];
      const alike = plain(b) ? same.get(parent) : null;
      const folded = alike !== null && alike.length >= FOLD_FROM && !unfolded.has(parent);
      if (folded && b !== alike[0]) continue;
      const size = tree.first[b + 1] - tree.first[b];
      const start = parent >= 0 && ends.has(parent) ? ends.get(parent) + 1 : 0;
      const shown = size > LONG + 4 ? LONG : size;
      const row = { branch: b, parent, start, shown, size, stands: folded ? alike.length : 1, above: at.get(parent) ?? -1, alike: alike?.length ?? 0 };
      ends.set(b, start + shown + (shown < size ? 2 : 0));
      at.set(b, rows.length);
      row.end = ends.get(b);
      rows.push(row);
    }
    measure();
  }

  function measure() {
    width = box.clientWidth;
    if (!width) return;
    const longest = Math.max(...rows.map((row) => row.end), 1);
    cell = Math.max(5, Math.min(16, Math.floor((width * 0.55) / longest)));
    box.style.height = `${Math.min(MOST, rows.length * ROW + HEAD * 2)}px`;
    spacer.style.height = `${rows.length * ROW + HEAD * 2}px`;
    draw();
  }

  const draw = onceAFrame(() => {
    if (!card.element.isConnected || !width) return;
    drawTree();
    drawStrip();
    drawCursor();
    count_();
  });

  const kindOf = (node) => (!state.ever[node] ? "not yet cached" : !state.cached[node] ? "lost" : state.refs[node] ? "in use" : "kept");

  function count_() {
    const total = Object.fromEntries(TREE_KINDS.map((kind) => [kind, 0]));
    let hits = 0;
    for (let b = 0; b < header.branches; b++) {
      if (tree.group[b] !== group) continue;
      for (let node = tree.first[b]; node < tree.first[b + 1]; node++) {
        total[kindOf(node)]++;
        hits += state.hits[node];
      }
    }
    words.update([...legend.map((item) => total[item.kind].toLocaleString("en")), hits.toLocaleString("en")]);
    card.subtitle.textContent = `${count(total["in use"] + total.kept, "cached block")} of ${header.blockSize} tokens after step ${state.step}${header.groups > 1 ? `, KV cache group ${group}` : ""}`;
  }

  const xOf = (column) => 8 + column * cell;

  function drawTree() {
    const height = box.clientHeight;
    const pen = sharpen(canvas, width, height);
    const top = pane.scrollTop - HEAD;
    pen.textBaseline = "middle";
    for (let i = 0; i < rows.length; i++) {
      const y = i * ROW - top;
      const row = rows[i];
      if (row.above >= 0 && y > -ROW && row.above * ROW - top < height) elbow(pen, row, y, top);
      if (y < -ROW || y > height) continue;
      drawBranch(pen, row, y);
    }
  }

  function elbow(pen, row, y, top) {
    const x = xOf(rows[row.above].end) - cell / 2;
    pen.strokeStyle = colour("muted");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(x) + 0.5, row.above * ROW - top + ROW - 4);
    pen.lineTo(Math.round(x) + 0.5, Math.round(y + ROW / 2) + 0.5);
    pen.lineTo(xOf(row.start) - 2, Math.round(y + ROW / 2) + 0.5);
    pen.stroke();
  }

  // The nodes of a row in its columns: [node, column]; a long branch shows its beginning and its last block.
  function columns(row) {
    const first = tree.first[row.branch];
    const list = [];
    const head = row.shown < row.size ? row.shown - 1 : row.shown;
    for (let i = 0; i < head; i++) list.push([first + i, row.start + i]);
    if (head < row.shown) list.push([first + row.size - 1, row.end - 1]);
    return list;
  }

  function drawBranch(pen, row, y) {
    const gap = cell > 8 ? 2 : 1;
    const size = ROW - 8;
    for (const [node, column] of columns(row)) {
      const x = xOf(column);
      paintBlock(pen, kindOf(node), x, y + 3, cell - gap, size, hueOf(node), colour);
      const hits = state.hits[node];
      if (hits) {
        pen.fillStyle = colour("decode");
        const thick = Math.min(5, 1 + Math.log2(hits));
        pen.fillRect(x, y + 3 + size + 1, cell - gap, thick * 0.8);
      }
      const news = state.news.get(node);
      if (news !== undefined || node === chosen) {
        pen.strokeStyle = colour(node === chosen ? "accent" : news === EVICTED || news > EVICTED ? "warning" : "ink");
        pen.lineWidth = 2;
        const out = node === chosen ? 2 : 1;
        pen.strokeRect(x - out, y + 3 - out, cell - gap + 2 * out, size + 2 * out);
      }
    }
    if (row.shown < row.size) {
      pen.fillStyle = colour("muted");
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillText("…", xOf(row.end - 2), y + 3 + size / 2);
    }
    const hits = state.hits[tree.first[row.branch]];
    pen.textAlign = "left";
    pen.font = `${hits ? "600 " : ""}12px system-ui, sans-serif`;
    let x = xOf(row.end) + 8;
    const middle = y + 3 + size / 2;
    if (row.stands > 1) {
      pen.font = "12px system-ui, sans-serif";
      pen.fillStyle = colour("muted");
      return pen.fillText(`▸ ${row.stands} branches that nobody found`, x, middle);
    }
    if (hits) {
      pen.fillStyle = colour("ink");
      pen.fillText(`${hits}×`, x, middle);
      x += pen.measureText(`${hits}×`).width + 8;
    }
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = colour("muted");
    const more = row.shown < row.size ? `${row.size} blocks  ` : "";
    fitText(pen, more + oneLine(tree.text(tree.first[row.branch])), x, middle, width - x - 16);
  }

  function fitText(pen, text, x, y, room) {
    if (room < 30) return;
    let shown = text.slice(0, 200);
    while (shown.length > 2 && pen.measureText(shown).width > room) shown = shown.slice(0, Math.max(2, Math.floor(shown.length * 0.9) - 1));
    pen.fillText(shown.length < text.length ? `${shown.slice(0, -1)}…` : shown, x, y);
  }

  // Beneath: cached blocks as an area; found upwards, lost downwards, in each step.
  const series = { cached: new Int32Array(cursor.steps), found: new Int32Array(cursor.steps), lost: new Int32Array(cursor.steps) };
  function tally() {
    for (const values of Object.values(series)) values.fill(0);
    const groupOf = new Uint8Array(header.nodes);
    for (let b = 0; b < header.branches; b++) groupOf.fill(tree.group[b], tree.first[b], tree.first[b + 1]);
    const { events: e } = tree;
    for (let i = 0; i < e.count; i++) {
      if (groupOf[e.node[i]] !== group) continue;
      const step = Math.max(0, e.step[i]);
      if (e.kind[i] === HIT) series.found[step]++;
      else if (e.kind[i] === CACHED) series.cached[step]++;
      else {
        series.cached[step]--;
        series.lost[step]++;
      }
    }
    for (let i = 1; i < cursor.steps; i++) series.cached[i] += series.cached[i - 1];
  }

  const plot = () => Math.max(50, strip.parentElement.clientWidth - GUTTER - RIGHT);
  const stepX = (step) => GUTTER + (step / cursor.steps) * plot();

  function drawStrip() {
    const total = strip.parentElement.clientWidth;
    const pen = sharpen(strip, total, STRIP);
    const size = plot();
    const most = Math.max(1, ...series.cached.length < 50000 ? series.cached : [0]);
    const bars = Math.max(1, Math.max(...series.found.length < 50000 ? series.found : [0]), Math.max(...series.lost.length < 50000 ? series.lost : [0]));
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    pen.fillStyle = colour("muted");
    pen.fillText("cached", GUTTER - 12, 18);
    pen.fillText(most.toLocaleString("en"), GUTTER - 12, 5);
    pen.fillText("found", GUTTER - 12, 45);
    pen.fillText("lost", GUTTER - 12, 62);
    const columnsOf = Math.min(size, cursor.steps);
    for (let i = 0; i < columnsOf; i++) {
      const from = Math.floor((i / columnsOf) * cursor.steps);
      const to = Math.max(from + 1, Math.floor(((i + 1) / columnsOf) * cursor.steps));
      let [cached, up, down] = [0, 0, 0];
      for (let s = from; s < to; s++) {
        cached = Math.max(cached, series.cached[s]);
        up = Math.max(up, series.found[s]);
        down = Math.max(down, series.lost[s]);
      }
      const x = Math.round(GUTTER + (i / columnsOf) * size);
      const w = Math.max(1, Math.round(GUTTER + ((i + 1) / columnsOf) * size) - x);
      pen.fillStyle = colour("free");
      pen.fillRect(x, 32 - (cached / most) * 28, w, (cached / most) * 28);
      pen.fillStyle = colour("decode");
      if (up) pen.fillRect(x, 54 - Math.max(2, (up / bars) * 18), w, Math.max(2, (up / bars) * 18));
      pen.fillStyle = colour("preempted");
      if (down) pen.fillRect(x, 55, w, Math.max(2, (down / bars) * 18));
    }
    pen.fillStyle = colour("muted");
    pen.fillRect(GUTTER, 32, size, 1);
    pen.fillRect(GUTTER, 54, size, 1);
  }

  function drawCursor() {
    line.style.left = `${stepX(cursor.step)}px`;
    line.style.width = `${Math.max(2, plot() / cursor.steps)}px`;
  }

  function rowAt(clientY) {
    const i = Math.floor((clientY - pane.getBoundingClientRect().top + pane.scrollTop - HEAD) / ROW);
    return rows[i] ? i : -1;
  }

  function nodeAt(event) {
    const i = rowAt(event.clientY);
    if (i < 0) return [-1, -1];
    const column = Math.floor((event.clientX - pane.getBoundingClientRect().left - 8) / cell);
    return [i, columns(rows[i]).find(([, c]) => c === column)?.[0] ?? -1];
  }

  function story(node) {
    const lines = tree.history(node).filter(([step]) => step <= state.step).map(([step, kind, block, request]) => [
      step < 0 ? "before" : `step ${step}`,
      [`cached in block ${block}, computed by ${tree.who(request)}`, `found by ${tree.who(request)} in block ${block}`, `lost: ${tree.who(request)} needed block ${block}`, "forgotten in a reset"][kind],
    ]);
    return lines.length > 7 ? [...lines.slice(0, 2), ["…", count(lines.length - 6, "more event")], ...lines.slice(-4)] : lines;
  }

  const standing = (node) => ({ "in use": `in use by ${count(state.refs[node], "request")}`, kept: "kept, no request uses it" })[kindOf(node)] ?? kindOf(node);

  function describe(node) {
    return [["block", `${tree.depth[node] + 1} of its text, ${header.blockSize} tokens`], ["now", `${standing(node)}; found ${count(state.hits[node], "time")}`],
      [header.decoded ? "text" : "tokens", oneLine(tree.text(node)).slice(0, 160) || "not in the trace"], ["hash", `${names[node]}…`], ...story(node)];
  }

  function choose(node, pin = true) {
    chosen = node;
    if (node >= 0) {
      detail.textContent = `Block ${tree.depth[node] + 1} of its text: ${standing(node)}; found ${count(state.hits[node], "time")}. ${header.decoded ? `“${oneLine(tree.text(node)).slice(0, 90)}”` : ""}`;
      card.say(detail.textContent);
      if (pin && state.cached[node]) {
        const last = tree.history(node).filter(([step, kind]) => step <= state.step && kind === CACHED).at(-1);
        if (last) cursor.set({ block: { pool: "gpu", id: last[2] } });
      }
    } else detail.textContent = "Click a block to pin it in every view.";
    draw();
  }

  function toggle(i) {
    const { parent, alike } = rows[i];
    if (alike < FOLD_FROM) return;
    if (unfolded.has(parent)) unfolded.delete(parent);
    else unfolded.add(parent);
    arrange();
  }

  pane.addEventListener("pointermove", (event) => {
    const [i, node] = nodeAt(event);
    if (node < 0) return tooltip.hide();
    if (rows[i].stands > 1) return tooltip.show(event.clientX, event.clientY, `${rows[i].stands} branches; click to see them`);
    tooltip.show(event.clientX, event.clientY, facts(describe(node)));
  });
  pane.addEventListener("pointerleave", () => tooltip.hide());
  pane.addEventListener("click", (event) => {
    const [i, node] = nodeAt(event);
    if (i >= 0 && rows[i].stands > 1) toggle(i);
    else if (node >= 0) choose(node);
  });
  pane.addEventListener("scroll", () => { tooltip.hide(); draw(); });
  pane.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    let i = rows.findIndex((row) => chosen >= tree.first[row.branch] && chosen < tree.first[row.branch + 1]);
    const go = (row, node) => {
      choose(node ?? tree.first[rows[row].branch], false);
      const top = row * ROW;
      if (top < pane.scrollTop) pane.scrollTop = top;
      else if (top + ROW + 2 * HEAD > pane.scrollTop + pane.clientHeight) pane.scrollTop = top + ROW + 2 * HEAD - pane.clientHeight;
    };
    const actions = {
      ArrowDown: () => go(Math.min(rows.length - 1, i + 1)),
      ArrowUp: () => go(Math.max(0, i - 1)),
      Home: () => go(0),
      End: () => go(rows.length - 1),
      ArrowRight: () => { if (i < 0) go(0); else go(i, Math.min(chosen + 1, tree.first[rows[i].branch + 1] - 1)); },
      ArrowLeft: () => { if (i < 0) go(0); else go(i, Math.max(chosen - 1, tree.first[rows[i].branch])); },
      Enter: () => { if (i >= 0 && rows[i].stands > 1) toggle(i); else if (chosen >= 0) choose(chosen); },
      f: () => { if (i >= 0) toggle(i); },
      Escape: () => choose(-1),
    };
    if (!(event.key in actions)) return;
    actions[event.key]();
    event.preventDefault();
    event.stopPropagation();
  });
  strip.addEventListener("pointerdown", (event) => {
    const move = (e) => { cursor.pause(); cursor.go(Math.floor(((e.clientX - strip.getBoundingClientRect().left - GUTTER) / plot()) * cursor.steps)); };
    move(event);
    strip.setPointerCapture(event.pointerId);
    strip.onpointermove = (e) => { if (e.buttons) move(e); };
  });

  if (header.groups > 1) {
    const choice = h("select", { class: "mv-select", "aria-label": "KV cache group", onchange: () => { group = Number(choice.value); chosen = -1; tally(); arrange(); } },
      Array.from({ length: header.groups }, (_, i) => h("option", { value: i }, `group ${i}`)));
    card.tools.append(choice);
  }
  if (rows.length || header.branches > FOLD_FROM) {
    const fold = button("unfold all", null, () => {
      const open = fold.getAttribute("aria-pressed") !== "true";
      unfolded.clear();
      if (open) for (const parent of new Set([-1, ...tree.parent])) unfolded.add(parent);
      fold.setAttribute("aria-pressed", String(open));
      arrange();
    }, { "aria-pressed": "false", title: "show each branch that nobody found on a row of its own" });
    card.tools.append(fold);
  }
  const end = cursor.on((_, changed) => {
    if (!changed.has("step")) return;
    state = tree.at(cursor.step);
    if (chosen >= 0) choose(chosen, false);
    draw();
  });
  const repaint = () => { for (const item of [...legend, found]) item.swatch.repaint(); draw(); };
  context.onTheme(repaint);
  const observer = new ResizeObserver(() => { if (box.clientWidth !== width) measure(); });
  observer.observe(box);
  tally();
  arrange();
  repaint();
  choose(-1);
  card.element.tree = { tree, rows: () => rows, state: () => state, cell: () => cell, kindOf, choose };
  return () => {
    end();
    observer.disconnect();
  };
}
