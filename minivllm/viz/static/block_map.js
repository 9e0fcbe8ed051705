// Every physical block, step by step.
import { Frames, Origins } from "./fold.js";
import { Grid, Look, layout, mask } from "./block_paint.js";
import { Lexicon, decision, describe, describeNodes, mediaIn } from "./block_words.js";
import { ownerColour, sharpen } from "./theme.js";
import { button, count, h, makeLegend, makeTooltip, swatch } from "./ui.js";

const TALLEST = 430; // CSS pixels that the grids of a card should not exceed
const MANY = 48; // blocks of a table from which on not every one has an arrow
const LABELS = ["in use, one colour a request", "shared by several", "free, holds cached tokens", "free", "null block"];

export async function render(card, data, context) {
  const { header } = data;
  const origins = new Origins(await data.part(header.origins));
  const words = await data.json(header.words);
  if (header.media !== null) words.media = await data.json(header.media);
  const lexicon = new Lexicon(header, words, origins, await data.part(header.hashes));
  const frames = new Frames(data, origins);
  const steps = await data.part(header.shown);
  let last = 0;
  const shown = Array.from(steps, (by) => (last += by));
  await frames.load(frames.chunkOf(context.cursor.step));
  const view = new BlockMap(card, context, lexicon, frames, shown);
  lexicon.loadTokens(data);
  return () => view.destroy();
}

// How block `id` looks in the pane of `group`: [look, colour name].
function lookOf(fold, id, group, { groups, states }) {
  if (id === 0) return [Look.NULL, "null"];
  const count = fold.ref[id];
  const named = fold.name[id] >= 0;
  if ((count || named) && groups.length > 1 && fold.group[id] !== group) return [Look.ELSEWHERE, "free"];
  if (count) return [count > 1 ? Look.SHARED : states.includes(group) ? Look.STATE : Look.USED, ownerColour(fold.owner[id])];
  return named ? [Look.CACHED, "cached"] : [Look.FREE, "free"];
}

class BlockMap {
  constructor(card, context, lexicon, frames, shown) {
    Object.assign(this, { card, context, lexicon, frames, shown, fold: frames.fold, header: frames.data.header, cursor: context.cursor });
    this.focused = shown[1] ?? 0; // the block that the keyboard is on
    this.zoom = 1;
    this.hovered = null; // a position of the block table under the pointer
    this.rows = []; // history of the pinned block
    this.build();
    this.tooltip = makeTooltip(card.element);
    this.ends = [this.cursor.on((_, changed) => this.follow(changed))];
    context.onTheme(() => this.recolour());
    const watch = new ResizeObserver(() => this.fit());
    watch.observe(this.stage);
    this.ends.push(() => watch.disconnect());
    this.frames.seek(this.cursor.step);
    this.showRequest();
    this.fit();
    this.pin();
  }

  destroy() {
    clearTimeout(this.filling);
    for (const end of this.ends) end();
  }

  // ---- the parts

  build() {
    const kinds = [[Look.USED, "owner-0"], [Look.SHARED, "owner-0"], [Look.CACHED, "cached"], [Look.FREE, "free"], [Look.NULL, "null"]];
    const labels = [...LABELS];
    if (this.header.groups.length > 1) labels[kinds.push([Look.ELSEWHERE, "free"]) - 1] = "of another group";
    if (this.header.states.length) labels[kinds.push([Look.STATE, "owner-0"]) - 1] = "a state, overwritten by every step";
    if (this.header.media !== null) labels[kinds.push([Look.USED, "owner-0", true]) - 1] = "holds tokens of a picture or clip";
    if (this.header.fetched) labels[kinds.push([Look.USED, "owner-0", false, true]) - 1] = "came from elsewhere";
    this.swatches = kinds.map(([look, name, media, fetched]) => swatch(14, 14, (c) => this.paintSwatch(c, look, name, media, fetched)));
    this.legend = makeLegend(this.swatches.map((canvas, i) => ({ label: labels[i], swatch: canvas })));
    this.select = h("select", { class: "mv-select", "aria-label": "request whose block table is shown", onchange: () => this.choose(this.select.value || null), onpointerdown: () => this.fillSelect(), onfocus: () => this.fillSelect() });
    this.about = h("span", { class: "mv-muted" });
    this.strip = h("div", { class: "mv-bm-strip", style: `height: ${Math.min(96, 26 + 24 * this.header.groups.length)}px` }); // always: a click moves nothing
    const folded = this.header.num_blocks - this.shown.length;
    this.rest = h("p", { class: "mv-muted mv-bm-rest", hidden: !folded }, `and ${count(folded, "block")} that this run never touched: free`);
    this.panes = this.makePanes();
    this.over = h("canvas", { class: "mv-bm-over", "aria-hidden": "true" });
    this.stage = h("div", { class: "mv-bm-stage" },
      h("div", { class: "mv-bm-request" }, h("span", {}, "Block table of"), this.select, this.about),
      this.strip, h("div", { class: "mv-bm-panes" }, this.panes.map((pane) => pane.element)), this.rest, this.over);
    this.details = h("aside", { class: "mv-bm-details", "aria-label": "pinned block" });
    this.layout = h("div", { class: "mv-bm" }, this.stage, this.details);
    const number = h("input", { type: "number", min: 0, max: this.header.num_blocks - 1, "aria-label": "block number to pin", placeholder: "block", style: "width: 6.5em",
      onchange: () => { if (number.value !== "") this.choosePhysical("gpu", Math.max(0, Math.min(this.header.num_blocks - 1, Number(number.value)))); } });
    const zoom = (factor) => () => {
      this.zoom = Math.max(1, Math.min(8, this.zoom * factor));
      this.layout.classList.toggle("mv-bm-zoomed", this.zoom > 1);
      this.width = 0;
      this.fit();
    };
    this.card.tools.append(h("span", { class: "mv-muted" }, "pin"), number,
      button("smaller blocks", null, zoom(0.5), { title: "smaller blocks" }), button("larger blocks", null, zoom(2), { title: "larger blocks" }));
    this.card.body.append(this.legend.element, this.layout);
  }

  paintSwatch(c, look, name, media, fetched) {
    const n = 13;
    const bits = mask(look, n, media, fetched);
    c.fillStyle = this.context.colour(name);
    for (let i = 0; i < bits.length; i++) if (bits[i]) c.fillRect(i % n, Math.floor(i / n), 1, 1);
  }

  makePanes() {
    const { groups, num_blocks, num_cpu_blocks } = this.header;
    const panes = groups.map((name, group) => ({ pool: "gpu", group, name, total: num_blocks, shown: this.shown }));
    if (num_cpu_blocks) panes.push({ pool: "cpu", group: 0, name: "swap pool (CPU memory)", total: num_cpu_blocks + 1, shown: Array.from({ length: num_cpu_blocks + 1 }, (_, i) => i) });
    for (const pane of panes) {
      const keys = "Arrow keys move, Enter pins, Escape unpins.";
      pane.canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": `${pane.name}, ${pane.shown.length} blocks in a grid. ${keys}`, "data-pool": pane.pool, "data-group": pane.group,
        onpointermove: (event) => this.hover(pane, event), onpointerleave: () => this.leave(), onclick: (event) => this.click(pane, event),
        onkeydown: (event) => this.key(pane, event), onfocus: () => { this.keyPane = pane; this.overlay(); }, onblur: () => { this.keyPane = null; this.leave(); this.overlay(); } });
      pane.gutter = h("div", { class: "mv-bm-gutter", "aria-hidden": "true" });
      pane.element = h("div", {}, panes.length > 1 ? h("h3", { class: "mv-bm-name" }, pane.name) : null, h("div", { class: "mv-bm-pane" }, pane.gutter, pane.canvas));
    }
    return panes;
  }

  // ---- size and colour

  fit() {
    const width = Math.floor(this.stage.clientWidth);
    if (width < 60 || width === this.width) return;
    this.width = width;
    const across = Math.max(1, Math.min(this.panes.length, Math.floor(width / 330)));
    const room = (width - 20 * (across - 1)) / across - 44;
    this.stage.querySelector(".mv-bm-panes").style.gridTemplateColumns = `repeat(${across}, minmax(0, 1fr))`;
    for (const pane of this.panes) {
      const count = pane.shown.length;
      let { columns, cell } = layout(count, room, this.panes.length > 1 ? TALLEST * 0.7 : TALLEST, count <= 32 ? 48 : count <= 128 ? 34 : 26);
      if (this.zoom > 1) {
        cell = Math.min(40, cell * this.zoom);
        columns = Math.max(1, Math.min(count, Math.floor(room / cell)));
      }
      pane.grid = new Grid(pane.canvas, pane.shown, pane.total, columns, cell);
      Object.assign(pane.canvas.dataset, { columns, pitch: pane.grid.pitch, inner: pane.grid.inner });
      const every = Math.max(1, Math.ceil(30 / pane.grid.cell));
      const labels = [];
      for (let row = 0; row < pane.grid.rows; row += every) labels.push(h("span", { style: `top: ${(row + 0.5) * pane.grid.cell - 7}px` }, String(pane.shown[row * columns])));
      pane.gutter.replaceChildren(...labels);
    }
    this.recolour();
  }

  recolour() {
    if (!this.width) return;
    for (const canvas of this.swatches) canvas.repaint();
    for (const pane of this.panes) pane.grid.setColours(this.context.colour);
    this.fold.all = true;
    this.draw();
  }

  // ---- time

  follow(changed) {
    if (changed.has("request")) {
      this.showRequest();
      this.fold.all = true;
    }
    if (changed.has("block")) this.pin();
    if (changed.has("step")) this.go();
    else if (changed.has("request")) this.draw();
    else if (changed.has("playing") && !this.cursor.playing) this.tell();
  }

  // Show the cursor's step; waits for its chunk where it is not in memory, and then shows where the cursor is by then.
  async go() {
    if (!this.frames.seek(this.cursor.step)) {
      const chunk = this.frames.chunkOf(this.cursor.step);
      await this.frames.load(chunk);
      if (!this.frames.seek(this.cursor.step)) return; // the cursor has moved on, and its own call is waiting
    }
    this.draw();
    if (!this.cursor.playing) this.tell();
  }

  tell() {
    const [used, shared, cached, free] = this.counts;
    const fetched = this.header.fetched ? `, ${this.fetched} came from elsewhere` : "";
    this.card.say(`step ${this.cursor.step}: ${used + shared} blocks in use, ${shared} of them shared, ${cached} cached, ${free} free${fetched}`);
  }

  draw() {
    if (!this.width) return;
    const { fold } = this;
    const mine = this.held();
    for (const pane of this.panes) if (pane.pool === "gpu") this.drawPane(pane, mine);
    if (fold.all) for (const pane of this.panes) if (pane.pool === "cpu") this.drawCpu(pane);
    fold.changed.length = 0;
    fold.all = false;
    this.count();
    this.drawStrip(this.cursor.request !== this.selected);
    this.selected = this.cursor.request;
    this.overlay();
    if (this.cursor.block) this.refreshDetails();
  }

  // The blocks of the request that is looked at; null if it has none, and nothing is to be faded.
  held() {
    const its = this.number === null ? undefined : this.fold.requests.get(this.number);
    const blocks = its ? its.tables.flat() : [];
    return blocks.length || its?.cpu.length ? new Set(blocks) : null;
  }

  drawPane(pane, mine) {
    const { fold, header } = this;
    const { grid, group } = pane;
    const paint = (id) => {
      const [look, name] = lookOf(fold, id, group, header);
      const media = header.media !== null && ![Look.NULL, Look.ELSEWHERE, Look.STATE].includes(look) && mediaIn(fold, this.lexicon, id) !== "";
      const fetched = fold.fetched[id] === 1 && [Look.USED, Look.SHARED, Look.CACHED].includes(look);
      grid.paint(id, look, name, mine !== null && !mine.has(id) && [Look.USED, Look.SHARED, Look.STATE].includes(look), media, fetched);
    };
    if (fold.all) {
      for (const id of pane.shown) paint(id);
      grid.show();
      return;
    }
    for (const id of fold.changed) paint(id);
    grid.showBlocks(fold.changed);
  }

  drawCpu({ grid, shown }) {
    for (const id of shown) {
      const owner = this.fold.cpuOwner[id];
      const ghost = this.number !== null && owner !== this.number;
      if (id === 0) grid.paint(0, Look.NULL, "null", false);
      else if (owner >= 0) grid.paint(id, Look.USED, ownerColour(owner), ghost);
      else grid.paint(id, Look.FREE, "free", false);
    }
    grid.show();
  }

  count() {
    const { ref, name, fetched } = this.fold;
    let used = 0, shared = 0, cached = 0;
    this.fetched = 0;
    for (let id = 1; id < ref.length; id++) {
      if (fetched[id] && (ref[id] || name[id] >= 0)) this.fetched++;
      if (ref[id] === 1) used++;
      else if (ref[id] > 1) shared++;
      else if (name[id] >= 0) cached++;
    }
    this.counts = [used, shared, cached, ref.length - 1 - used - shared - cached];
    this.legend.update([...this.counts.map((n) => n.toLocaleString("en")), ...Array(this.swatches.length - this.counts.length - (this.header.fetched ? 1 : 0)).fill(""),
      ...(this.header.fetched ? [this.fetched.toLocaleString("en")] : [])]);
  }

  // ---- the block table of one request

  choose(id) {
    this.cursor.set({ request: id });
  }

  showRequest() {
    const id = this.cursor.request;
    this.number = id === null ? null : (this.lexicon.numbers.get(id) ?? null);
    this.strip.replaceChildren();
    this.strips = [];
    if (this.number === null) return this.strip.append(h("p", { class: "mv-muted" }, "Choose a request, or click one of its blocks: its block table appears here, with arrows to where its tokens lie."));
    for (const pane of this.panes) {
      if (pane.pool === "cpu") continue;
      const canvas = h("canvas", { role: "img", "aria-label": `block table of ${this.lexicon.names[this.number]} in ${pane.name}`,
        onpointermove: (event) => this.hoverStrip(pane, event), onpointerleave: () => { this.hovered = null; this.leave(); this.overlay(); },
        onclick: (event) => { const at = this.positionAt(pane, event); if (at !== null) this.choosePhysical("gpu", this.tables()[pane.group][at]); } });
      this.strips.push({ pane, canvas });
      this.strip.append(h("span", {}, this.header.groups.length > 1 ? `group ${pane.group}` : "logical"), canvas);
    }
  }

  tables() {
    return this.fold.requests.get(this.number)?.tables ?? this.header.groups.map(() => []);
  }

  drawStrip(changedRequest) {
    if (changedRequest) this.fillSelect();
    else this.fillSoon();
    if (this.number === null) {
      this.about.textContent = "";
      return;
    }
    const its = this.fold.requests.get(this.number);
    const blocks = this.tables().reduce((sum, table) => sum + table.filter((id) => id).length, 0);
    const swapped = its?.cpu.length ?? 0;
    if (!its) this.about.textContent = "not here at this step: not yet arrived, or finished";
    else if (swapped) this.about.textContent = `swapped out: ${swapped} blocks in the swap pool`;
    else if (!blocks) this.about.textContent = "waiting, holds no blocks";
    else if (its.status === "WAITING_FOR_REMOTE_KVS" && !its.computed) this.about.textContent = `waits for its blocks, ${blocks} of them, which come from elsewhere`;
    else this.about.textContent = `${its.computed} tokens computed, in ${blocks} block${blocks === 1 ? "" : "s"}; ${blocks > MANY ? "hover over one to see where it lies" : "arrows lead from logical to physical"}`;
    for (const strip of this.strips) this.paintStrip(strip);
  }

  paintStrip({ pane, canvas }) {
    const table = this.tables()[pane.group];
    const width = this.width - 60;
    const cell = table.length > 160 ? 9 : 16;
    const columns = Math.max(1, Math.floor(width / cell));
    const rows = Math.max(1, Math.ceil(table.length / columns));
    Object.assign(canvas, { cell, columns });
    const c = sharpen(canvas, Math.min(columns, Math.max(table.length, 1)) * cell, rows * cell);
    const colour = this.context.colour(ownerColour(this.number));
    c.lineWidth = 1;
    for (let i = 0; i < table.length; i++) {
      const x = (i % columns) * cell;
      const y = Math.floor(i / columns) * cell;
      c.fillStyle = c.strokeStyle = table[i] ? colour : this.context.colour("null");
      if (table[i]) c.fillRect(x, y, cell - 2, cell - 2);
      else c.strokeRect(x + 0.5, y + 0.5, cell - 3, cell - 3);
      if (table[i] && this.fold.ref[table[i]] > 1) {
        c.fillStyle = this.context.colour("panel");
        c.fillRect(x + cell * 0.3, y + cell * 0.3, cell * 0.27, cell * 0.27);
      }
    }
  }

  // A list of options costs more than a step: it is renewed when the steps have stopped, or somebody opens it.
  fillSoon() {
    clearTimeout(this.filling);
    this.filling = setTimeout(() => this.fillSelect(), 120);
  }

  // The requests that can be chosen now.
  fillSelect() {
    const here = [...this.fold.requests].filter(([, its]) => its.cpu.length || its.tables.some((table) => table.length)).map(([r]) => r);
    const chosen = this.cursor.request;
    const key = `${here.join()} ${chosen}`;
    if (key === this.selectKey) return;
    this.selectKey = key;
    const ids = here.map((r) => this.lexicon.requests[r]);
    if (chosen !== null && !ids.includes(chosen)) ids.unshift(chosen);
    const name = (id) => this.lexicon.names[this.lexicon.numbers.get(id)] ?? id;
    this.select.replaceChildren(h("option", { value: "" }, "no request"), ...ids.map((id) => h("option", { value: id }, name(id))));
    this.select.value = chosen ?? "";
  }

  positionAt(pane, event) {
    const { canvas } = this.strips.find((strip) => strip.pane === pane);
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / canvas.cell);
    const at = Math.floor((event.clientY - box.top) / canvas.cell) * canvas.columns + column;
    return column < canvas.columns && this.tables()[pane.group][at] ? at : null;
  }

  hoverStrip(pane, event) {
    const at = this.positionAt(pane, event);
    this.hovered = at === null ? null : { pane, at };
    this.overlay();
    if (at === null) return this.leave();
    this.tooltip.show(event.clientX, event.clientY, ...describeNodes(this.fold, this.lexicon, this.tables()[pane.group][at]));
  }

  // ---- what lies over the grids: arrows, the pinned block, the keyboard's block

  overlay() {
    if (!this.width) return;
    const busy = this.number !== null || this.cursor.block !== null || this.keyPane;
    if (!busy && !this.overDirty) return;
    const frame = this.stage.getBoundingClientRect();
    if (this.over.offsetWidth !== Math.floor(frame.width) || this.over.offsetHeight !== Math.floor(frame.height)) sharpen(this.over, Math.floor(frame.width), Math.floor(frame.height));
    const c = this.over.getContext("2d");
    c.clearRect(0, 0, frame.width, frame.height);
    this.overDirty = busy;
    const place = (canvas) => { const box = canvas.getBoundingClientRect(); return [box.left - frame.left, box.top - frame.top]; };
    if (this.number !== null) for (const strip of this.strips) this.drawArrows(c, strip, place);
    const { block } = this.cursor;
    for (const pane of this.panes) {
      if (block && block.pool === pane.pool && pane.grid.place[block.id] >= 0) this.ring(c, pane, block.id, place, false);
      if (this.keyPane === pane) this.ring(c, pane, this.focusIn(pane), place, true);
    }
  }

  drawArrows(c, { pane, canvas }, place) {
    const table = this.tables()[pane.group];
    const [fromX, fromY] = place(canvas);
    const [toX, toY] = place(pane.canvas);
    c.strokeStyle = c.fillStyle = this.context.colour(ownerColour(this.number));
    const hovered = this.hovered?.pane === pane ? this.hovered.at : -1;
    const draw = (i, strong) => {
      if (!table[i]) return;
      const x = fromX + ((i % canvas.columns) + 0.5) * canvas.cell - 1;
      const y = fromY + (Math.floor(i / canvas.columns) + 1) * canvas.cell - 2;
      const [cx, cy] = pane.grid.centre(table[i]);
      const [px, py] = [toX + cx, toY + cy - (pane.grid.inner / pane.grid.pitch / 2) * pane.grid.cell]; // its upper edge
      c.globalAlpha = strong ? 1 : hovered >= 0 ? 0.15 : table.length > 100 ? 0.3 : 0.6;
      c.lineWidth = strong ? 2 : 1;
      c.beginPath();
      c.moveTo(x, y);
      c.bezierCurveTo(x, y + (py - y) * 0.45, px, py - (py - y) * 0.45, px, py - 5);
      c.stroke();
      c.globalAlpha = Math.max(c.globalAlpha, 0.8);
      c.beginPath();
      c.moveTo(px, py);
      c.lineTo(px - 3.5, py - 7);
      c.lineTo(px + 3.5, py - 7);
      c.fill();
    };
    if (table.length <= MANY) for (let i = 0; i < table.length; i++) if (i !== hovered) draw(i, false);
    if (hovered >= 0) draw(hovered, true);
    c.globalAlpha = 1;
  }

  ring(c, pane, id, place, dashed) {
    const [x, y] = place(pane.canvas);
    const [cx, cy] = pane.grid.centre(id);
    const half = Math.max(5, (pane.grid.inner / pane.grid.pitch) * pane.grid.cell / 2 + 2);
    c.lineWidth = 2;
    c.setLineDash(dashed ? [3, 2] : []);
    c.strokeStyle = this.context.colour("accent");
    c.strokeRect(x + cx - half, y + cy - half, 2 * half, 2 * half);
    c.setLineDash([]);
  }

  // ---- pointer and keyboard

  blockAt(pane, event) {
    const box = pane.canvas.getBoundingClientRect();
    return pane.grid.at(event.clientX - box.left, event.clientY - box.top);
  }

  hover(pane, event) {
    const id = this.blockAt(pane, event);
    if (id < 0) return this.leave();
    this.tooltip.show(event.clientX, event.clientY, ...this.nodes(pane, id));
  }

  leave() {
    this.tooltip.hide();
  }

  nodes({ pool }, id) {
    if (pool === "gpu") return describeNodes(this.fold, this.lexicon, id);
    const owner = this.fold.cpuOwner[id];
    return [h("div", {}, h("b", {}, `Swap block ${id}`), owner >= 0 ? ` · holds a block of ${this.lexicon.names[owner]}` : id ? " · free" : " · the null block")];
  }

  click(pane, event) {
    const id = this.blockAt(pane, event);
    if (id < 0) return;
    this.focused = id;
    this.choosePhysical(pane.pool, id);
  }

  choosePhysical(pool, id) {
    const old = this.cursor.block;
    if (old && old.pool === pool && old.id === id) return this.cursor.set({ block: null });
    const owner = pool === "gpu" ? this.fold.owner[id] : this.fold.cpuOwner[id];
    const holders = pool === "gpu" ? this.fold.holders(id) : [owner];
    const keep = this.number !== null && holders.includes(this.number);
    this.cursor.set({ block: { pool, id }, request: keep ? this.cursor.request : owner >= 0 ? this.lexicon.requests[owner] : null });
  }

  // The keyboard's block as far as a pane shows it.
  focusIn(pane) {
    return pane.grid.place[this.focused] >= 0 ? this.focused : pane.shown.at(-1);
  }

  key(pane, event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -pane.grid.columns, ArrowDown: pane.grid.columns };
    if (event.key in moves) {
      this.focused = pane.shown[pane.grid.place[this.focusIn(pane)] + moves[event.key]] ?? this.focusIn(pane);
      const box = pane.canvas.getBoundingClientRect();
      const [x, y] = pane.grid.centre(this.focused);
      this.tooltip.show(box.left + x, box.top + y, ...this.nodes(pane, this.focused));
      this.card.say(pane.pool === "gpu" ? describe(this.fold, this.lexicon, this.focused) : `Swap block ${this.focused}`);
      this.overlay();
    } else if (event.key === "Enter") {
      this.choosePhysical(pane.pool, this.focusIn(pane));
    } else if (event.key === "Escape") {
      this.leave();
      this.cursor.set({ block: null, request: null });
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  // ---- the pinned block

  async pin() {
    const { block } = this.cursor;
    this.layout.toggleAttribute("data-pinned", block !== null);
    this.overDirty = true;
    this.rows = [];
    if (block === null) {
      this.now = null;
      this.details.replaceChildren(h("p", { class: "mv-muted" }, "Click a block to read what it holds and everything that happened to it."));
      return this.overlay();
    }
    this.now = h("div", {});
    this.table = h("tbody", {});
    const name = block.pool === "gpu" ? `Block ${block.id}` : `Swap block ${block.id}`;
    this.details.replaceChildren(
      h("div", { class: "mv-bm-details-head" }, this.now, button("unpin", null, () => this.cursor.set({ block: null }))),
      ...(block.pool === "gpu" ? [h("h3", { class: "mv-bm-history" }, "History"),
        h("div", { class: "mv-bm-scroll", tabindex: 0, role: "region", "aria-label": `history of ${name}` }, h("table", { class: "mv-table" },
          h("thead", {}, h("tr", {}, ["step", "event", "what decided it"].map((text) => h("th", { scope: "col" }, text)))), this.table))] : []));
    this.refreshDetails();
    this.overlay();
    if (block.pool !== "gpu") return;
    const rows = await this.frames.history(block.id);
    if (this.cursor.block !== block) return;
    this.rows = rows;
    this.table.replaceChildren(...rows.map((row) => this.historyRow(row)));
    if (!rows.length) this.table.append(h("tr", {}, h("td", { colspan: 3, class: "mv-muted" }, "nothing happened to this block in this trace")));
    this.refreshDetails();
    this.card.say(`${describe(this.fold, this.lexicon, block.id)}. ${rows.length} events in its history.`);
  }

  historyRow(row) {
    const { lexicon } = this;
    const jump = h("button", { type: "button", class: "mv-link", onclick: () => { this.cursor.pause(); this.cursor.go(row.step); } }, String(row.step));
    const event = row.event === "cached" ? [`cached as `, h("span", { class: "mv-code" }, lexicon.hash(row.name))] : [row.event];
    const element = h("tr", { "data-step": row.step, "data-event": row.event, "data-request": row.request >= 0 ? lexicon.requests[row.request] : "",
      "data-group": row.group, "data-position": row.position, "data-hash": lexicon.hash(row.name) },
      h("td", {}, jump), h("td", {}, event), h("td", {}, decision(row, lexicon), row.position >= 0 && row.event === "allocated" ? h("span", { class: "mv-muted" }, ` (position ${row.position})`) : null));
    row.element = element;
    return element;
  }

  refreshDetails() {
    const { block, step } = this.cursor;
    if (!block || !this.now) return;
    this.now.replaceChildren(...this.nodes({ pool: block.pool }, block.id));
    for (const row of this.rows) {
      row.element.dataset.when = row.step < step ? "before" : row.step === step ? "now" : "later";
      if (row.step === step) row.element.setAttribute("aria-current", "step");
      else row.element.removeAttribute("aria-current");
    }
  }
}
