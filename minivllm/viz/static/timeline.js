// The timeline: requests by steps or by seconds, the token budget and the queues beneath. Compare draws two of its charts.
import { DECODE, DECODE_TINT, FINISHES, OWNER_COLOURS, PREEMPTED, PREFILL, REMOTE, STALLED, SWAPPED, WAITING } from "./schema.js";
import { hatch, ownerColour, pixel, readable, sharpen, tint } from "./theme.js";
import { button, count, duration, h, makeLegend, makeTooltip, onceAFrame, swatch } from "./ui.js";

// ---- what happened to each request in each step: the spans that `timeline_data.py` made, and the words for them

const KINDS = ["waiting", "preempted", "swapped out", "blocks on their way", "running, no tokens", "prefill chunk", "decode"];

function sums(deltas, from, count) {
  const out = new Float64Array(count);
  let sum = 0;
  for (let i = 0; i < count; i++) out[i] = sum += deltas[from + i];
  return out;
}

// The last index whose value is at most x, in an ascending array from `low` to `high` (exclusive); low - 1 if there is none.
function lastAtMost(values, x, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

class Lanes {
  constructor(about, ids, names, parts) {
    Object.assign(this, { about, ids, names }); // names: what the requests are called
    this.steps = about.steps;
    this.count = about.requests;
    this.budget = about.budget;
    this.readSpans(parts.spans, parts.chunks);
    const n = this.count;
    [this.prompt, this.output, this.finish, this.finishKind] = [0, 1, 2, 3].map((i) => parts.requests.subarray(i * n, (i + 1) * n));
    this.preemptions = this.events(parts.preemptions);
    this.admissions = this.events(parts.admissions);
    this.drafts = this.events(parts.drafts); // draft tokens verified, and accepted
    this.media = this.events(parts.media); // tokens of pictures and the like computed, embeddings encoded
    const waits = parts.waits.length / 3;
    this.waits = { step: sums(parts.waits, 0, waits), request: parts.waits.subarray(waits, 2 * waits), reason: parts.waits.subarray(2 * waits) };
    this.loras = Array.from({ length: parts.loras.length / 4 }, (_, i) => [0, 1, 2, 3].map((column) => parts.loras[column * parts.loras.length / 4 + i]));
    this.slots = this.loras.length ? Math.max(...this.loras.map((row) => row[0])) + 1 : 0;
    const s = this.steps;
    this.time = new Float64Array(s + 1);
    for (let i = 0; i < s; i++) this.time[i + 1] = this.time[i] + parts.time[i] * about.unit;
    this.stepEnd = Float64Array.from({ length: s }, (_, i) => this.time[i] + parts.time[s + i] * about.unit);
    [this.prefill, this.decode, this.running, this.waiting] = [0, 1, 2, 3].map((i) => sums(parts.strips, i * s, s));
  }

  readSpans(raw, chunks) {
    const n = this.count;
    const total = (raw.length - n) / 3;
    this.first = new Int32Array(n + 1);
    this.start = new Int32Array(total);
    this.end = new Int32Array(total);
    this.kind = new Uint8Array(total);
    this.reason = new Uint8Array(total);
    this.tokens = new Int32Array(total);
    this.wanted = new Int32Array(total);
    const prefills = chunks.length / 2;
    let at = 0;
    let chunk = 0;
    for (let r = 0; r < n; r++) {
      let end = 0;
      for (let left = raw[r]; left > 0; left--, at++) {
        this.start[at] = end + raw[n + at];
        end = this.end[at] = this.start[at] + raw[n + total + at];
        const code = raw[n + 2 * total + at];
        this.kind[at] = code & 7;
        this.reason[at] = code >> 3;
        if (this.kind[at] === PREFILL) {
          this.tokens[at] = chunks[chunk];
          this.wanted[at] = chunks[chunk] + chunks[prefills + chunk];
          chunk++;
        }
      }
      this.first[r + 1] = at;
    }
  }

  // Rows of step, request, two numbers: as lists by request.
  events(flat) {
    const n = flat.length / 4;
    const steps = sums(flat, 0, n);
    const byRequest = new Map();
    for (let i = 0; i < n; i++) {
      const row = [steps[i], flat[n + i], flat[2 * n + i], flat[3 * n + i]];
      if (!byRequest.has(row[1])) byRequest.set(row[1], []);
      byRequest.get(row[1]).push(row);
    }
    return byRequest;
  }

  // The span of a request that a step falls into, or -1.
  span(request, step) {
    const i = lastAtMost(this.start, step, this.first[request], this.first[request + 1]);
    return i >= this.first[request] && step < this.end[i] ? i : -1;
  }

  // What happened to a request in a step, and why, in one line: the words of `TimelineData.describe`.
  describe(request, step) {
    const i = this.span(request, step);
    if (i < 0) return step <= this.finish[request] ? "not there yet" : `finished: ${FINISHES[this.finishKind[request]]}`;
    const reason = this.about.reasons[this.reason[i]];
    if (this.kind[i] === DECODE) {
      const draft = (this.drafts.get(request) ?? []).find((row) => row[0] === step);
      return draft ? `decode, ${draft[3]} of ${draft[2]} draft tokens accepted` : "decode";
    }
    if (this.kind[i] === PREFILL) {
      const n = this.tokens[i];
      const media = this.mediaIn(request, step);
      return `prefill, ${n} token${n === 1 ? "" : "s"}${media}${reason ? ` of the ${this.wanted[i]} that it wanted: ${reason}` : ""}`;
    }
    if (this.kind[i] === STALLED) return "running, but got no tokens";
    const why = this.whyWaiting(request, step, reason);
    return KINDS[this.kind[i]] + (why ? `: ${why}` : "");
  }

  // What a chunk holds of pictures and the like, in words; "" for nothing.
  mediaIn(request, step) {
    const [, , seen, encoded] = (this.media.get(request) ?? []).find((row) => row[0] === step) ?? [0, 0, 0, 0];
    const runs = encoded ? `, ${encoded} embedding${encoded === 1 ? "" : "s"} encoded` : "";
    return seen || encoded ? ` (${seen} of media${runs})` : "";
  }

  whyWaiting(request, step, reason) {
    if (reason) return reason;
    const head = lastAtMost(this.waits.step, step);
    if (head < 0) return "";
    const first = this.waits.request[head];
    const i = this.span(first, step);
    if (first === request || i < 0 || this.kind[i] > REMOTE) return "";
    return `behind ${this.names[first]} (${this.about.reasons[this.waits.reason[head]]})`;
  }

  // Tokens of a request computed up to the end of a step, or null while it holds none.
  computed(request, step) {
    const i = this.span(request, step);
    if (i < 0 || [WAITING, PREEMPTED, REMOTE].includes(this.kind[i])) return null;
    const admission = (this.admissions.get(request) ?? []).filter((row) => row[0] <= step).at(-1);
    let at = Math.max(this.first[request], admission ? lastAtMost(this.start, admission[0], this.first[request], i + 1) : 0);
    let done = admission ? admission[2] : null;
    if (done === null) return null;
    for (; at <= i; at++) {
      if (this.kind[at] === PREFILL) done += this.tokens[at];
      else if (this.kind[at] === DECODE) done += this.gained(request, this.start[at], Math.min(step + 1, this.end[at]));
    }
    return done;
  }

  // Tokens that decodes of these steps gave a request: one a step, and the accepted draft tokens.
  gained(request, from, to) {
    const drafts = (this.drafts.get(request) ?? []).filter((row) => row[0] >= from && row[0] < to);
    return drafts.reduce((sum, row) => sum + row[3], to - from);
  }

  // When the first in the queue waited, and for what: [start, end, request, reason].
  queueReasons() {
    const out = [];
    for (let i = 0; i < this.waits.step.length; i++) {
      const [start, request] = [this.waits.step[i], this.waits.request[i]];
      const span = this.span(request, start);
      if (span < 0) continue;
      let last = span;
      while (last + 1 < this.first[request + 1] && this.start[last + 1] === this.end[last] && this.kind[last + 1] <= REMOTE) last++;
      out.push([start, Math.min(this.end[last], this.waits.step[i + 1] ?? this.steps), request, this.waits.reason[i]]);
    }
    return out.filter(([start, end]) => end > start);
  }

  // The adapters in the slots during a step, in words; "" for none.
  adaptersAt(step) {
    const there = this.loras.filter(([, start, end]) => start <= step && step < end);
    return there.map(([slot, , , adapter]) => `${this.about.adapters[adapter]} in slot ${slot}`).join(", ");
  }

  // The whole life of a request: [first step, last step, words] for each thing that it did, decodes in a row as one.
  story(request) {
    const out = [];
    for (let i = this.first[request]; i < this.first[request + 1]; i++) {
      const words = this.kind[i] === DECODE ? `decode, ${this.gained(request, this.start[i], this.end[i])} tokens` : this.describe(request, this.start[i]);
      out.push([this.start[i], this.end[i] - 1, words]);
    }
    if (this.finishKind[request]) out.push([this.finish[request], this.finish[request], `finished: ${FINISHES[this.finishKind[request]]}`]);
    return out;
  }

  // What a tooltip tells about a request in a step, as rows of name and value.
  facts(request, step) {
    const done = this.computed(request, step);
    const preempted = (this.preemptions.get(request) ?? []).filter((row) => row[0] <= step);
    const cached = (this.admissions.get(request) ?? []).find((row) => row[0] <= step)?.[3];
    const last = preempted.at(-1);
    const ended = this.finish[request] <= step && this.finishKind[request];
    return [
      ["routed", this.about.routes[request] ?? null],
      ["this step", this.describe(request, step)],
      ["tokens", `${this.prompt[request]} prompt${cached ? `, ${cached} of them cached` : ""}${done === null ? "" : `; ${done} computed`}`],
      ["preempted", last ? `${preempted.length === 1 ? "once" : `${preempted.length} times`}, last in step ${last[0]} for ${this.names[last[2]]}${last[3] ? " (swapped)" : ""}` : null],
      ["ended", ended ? `in step ${this.finish[request]}: ${FINISHES[this.finishKind[request]]}` : null],
    ];
  }
}

// The lanes that a header's description names, read from its parts.
export async function readLanes(data, about) {
  const names = Object.keys(about.parts);
  const routes = about.routes ? await data.json(about.routes) : {}; // where a router has sent requests, and why
  const [ids, called, ...parts] = await Promise.all([data.json(about.ids), data.json(about.names), ...names.map((name) => data.part(about.parts[name]))]);
  return new Lanes({ ...about, routes }, ids, called, Object.fromEntries(names.map((name, i) => [name, parts[i]])));
}

// ---- rows: one per request, in its colour; kinds differ in height, texture and tint

const SHAPES_FROM = 5; // pixels: a lower row has room for colours only

// The colour of a kind for a request whose colour is `hue`.
const toneOf = (kind, hue, colour) => (kind === WAITING ? colour("waiting") : kind === DECODE ? tint(hue, DECODE_TINT, colour("panel")) : hue);

// One bar of a kind, `height` being that of the row. Also draws the legend's swatches.
function paintBar(context, kind, x, y, width, height, hue, colour, patterns = {}) {
  const tone = toneOf(kind, hue, colour);
  context.fillStyle = context.strokeStyle = tone;
  const middle = y + height / 2;
  if (kind === WAITING) {
    context.fillRect(x, middle - 1, width, 2);
  } else if (kind === PREFILL) {
    context.fillRect(x, y + 1, width > 2 ? width - 1 : width, height - 2);
  } else if (kind === DECODE) {
    const thick = Math.max(2, Math.round(height * 0.44));
    context.fillRect(x, Math.round(middle - thick / 2), width, thick);
  } else if (kind === PREEMPTED) {
    context.fillStyle = patterns[tone] ??= hatch(context, tone);
    context.fillRect(x, y + 1, width, height - 2);
    context.fillStyle = tone;
    context.fillRect(x, y + 1, Math.min(2, width), height - 2);
    context.fillRect(x + width - Math.min(1, width), y + 1, Math.min(1, width), height - 2);
  } else if (kind === REMOTE) {
    const dot = Math.max(2, Math.round(height * 0.3));
    for (let at = x; at < x + width; at += 2 * dot) context.fillRect(at, Math.round(middle - dot / 2), Math.min(dot, x + width - at), dot);
  } else if (kind === SWAPPED) {
    const thick = Math.max(1, Math.round(height * 0.16));
    context.fillRect(x, y + 1, width, thick);
    context.fillRect(x, y + height - 1 - thick, width, thick);
    context.fillRect(x, y + 1, Math.min(2, width), height - 2);
  } else {
    const thick = Math.max(4, Math.round(height * 0.44));
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, Math.round(middle - thick / 2) + 0.5, Math.max(1, width - 1), thick - 1);
  }
}

// The sign of an end: stop, length, abort, error.
function paintEnd(context, kind, x, y, size, colour) {
  const half = size / 2;
  context.fillStyle = context.strokeStyle = colour("finished");
  context.beginPath();
  const name = FINISHES[kind];
  if (name === "stop") context.arc(x, y, half, 0, 7);
  else if (name === "length") context.rect(x - half, y - half, size, size);
  else if (name === "error") {
    context.moveTo(x, y - half);
    context.lineTo(x + half, y + half);
    context.lineTo(x - half, y + half);
  } else {
    context.moveTo(x - half, y - half);
    context.lineTo(x + half, y + half);
    context.moveTo(x + half, y - half);
    context.lineTo(x - half, y + half);
    context.lineWidth = 1.8;
    context.stroke();
    return;
  }
  context.fill();
}

// Paint rows from `top` (in pixels down the list) into a canvas of width x height. `xAt(step)` is where a step begins;
// `from`, `to` are the steps in sight.
function paintLanes(context, lanes, { width, height, top, rowHeight, xAt, from, to, colour }) {
  context.clearRect(0, 0, width, height);
  if (rowHeight < 1) paintDense(context, lanes, { width, height, top, rowHeight, xAt, from, to, colour });
  else paintRows(context, lanes, { height, top, rowHeight, xAt, from, to, colour });
}

function paintRows(context, lanes, { height, top, rowHeight, xAt, from, to, colour }) {
  const firstRow = Math.max(0, Math.floor(top / rowHeight));
  const lastRow = Math.min(lanes.count, Math.ceil((top + height) / rowHeight));
  const patterns = {};
  const shapes = rowHeight >= SHAPES_FROM;
  const bar = Math.min(rowHeight - (rowHeight >= 8 ? 2 : shapes ? 1 : 0), 22);
  for (let row = firstRow; row < lastRow; row++) {
    const y = row * rowHeight - top + (rowHeight - bar) / 2;
    const hue = colour(ownerColour(row));
    const [low, high] = [lanes.first[row], lanes.first[row + 1]];
    let painted = -1;
    for (let i = Math.max(low, lastAtMost(lanes.start, from, low, high)); i < high && lanes.start[i] <= to; i++) {
      if (lanes.end[i] <= from) continue;
      const x = xAt(lanes.start[i]);
      const end = xAt(lanes.end[i], lanes.start[i + 1] !== lanes.end[i] || i + 1 === high);
      if (end <= painted && lanes.kind[i] === lanes.kind[i - 1]) continue; // nothing that is not there already
      painted = Math.max(end, x + 1);
      if (shapes) {
        paintBar(context, lanes.kind[i], x, y, Math.max(1, end - x), bar, hue, colour, patterns);
        label(context, lanes, i, x, y, end - x, bar, hue);
      } else {
        context.fillStyle = toneOf(lanes.kind[i], hue, colour);
        context.fillRect(x, y, Math.max(1, end - x), bar);
      }
    }
    if (bar >= 8) paintMedia(context, lanes, row, { y, bar, xAt, from, to, colour });
    if (bar >= 8) paintDrafts(context, lanes, row, { y: y + bar, xAt, from, to, hue });
    if (shapes && lanes.finishKind[row] && lanes.finish[row] >= from - 1 && lanes.finish[row] <= to) {
      const size = Math.min(8, bar - 1);
      paintEnd(context, lanes.finishKind[row], xAt(lanes.finish[row] + 1, true), y + bar / 2, size, colour);
    }
  }
}

// A strip at the foot of a row: the share of each step's draft tokens that was accepted.
function paintDrafts(context, lanes, row, { y, xAt, from, to, hue }) {
  context.fillStyle = context.strokeStyle = hue;
  context.lineWidth = 1;
  for (const [step, , verified, accepted] of lanes.drafts.get(row) ?? []) {
    if (step < from || step > to) continue;
    const [x, end] = [xAt(step), xAt(step + 1)];
    if (end - x < 3) continue; // too narrow to tell a share
    context.strokeRect(x + 0.5, y - 2.5, end - x - 2, 2);
    context.fillRect(x, y - 3, ((end - x - 1) * accepted) / verified, 3);
  }
}

// A diamond at the top of a chunk that holds tokens of pictures and the like; filled where the encoder ran for it.
function paintMedia(context, lanes, row, { y, bar, xAt, from, to, colour }) {
  for (const [step, , , encoded] of lanes.media.get(row) ?? []) {
    if (step < from || step > to) continue;
    const size = Math.min(3.5, bar / 4);
    paintDiamond(context, xAt(step) + 4.5, y + size + 1, size, encoded > 0, colour);
  }
}

function paintDiamond(context, x, y, size, filled, colour) {
  context.beginPath();
  for (const [dx, dy] of [[0, -1], [1, 0], [0, 1], [-1, 0]]) context.lineTo(x + dx * size, y + dy * size);
  context.closePath();
  context.lineWidth = 1;
  context.fillStyle = filled ? colour("accent") : colour("panel");
  context.strokeStyle = colour("ink");
  context.fill();
  context.stroke();
}

function label(context, lanes, i, x, y, width, bar, hue) {
  if (lanes.kind[i] !== PREFILL || bar < 12) return;
  const text = String(lanes.tokens[i]);
  context.font = "10.5px system-ui, sans-serif";
  if (context.measureText(text).width > width - 5) return;
  context.fillStyle = readable(hue);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x + width / 2 - 0.5, y + bar / 2 + 0.5);
}

// More rows than pixels: each pixel shows the rarest of what its requests do, in the colour of the one that does it, so that nothing that matters drowns.
const RANK = [1, 7, 6, 5, 4, 3, 2];
const BY_RANK = [null, WAITING, DECODE, PREFILL, STALLED, REMOTE, SWAPPED, PREEMPTED];

function paintDense(context, lanes, { width, height, top, rowHeight, xAt, from, to, colour }) {
  const w = Math.ceil(width);
  const h = Math.ceil(height);
  const ranks = new Uint8Array(w * h);
  const hues = new Uint8Array(w * h);
  for (let row = Math.max(0, Math.floor(top / rowHeight)); row < lanes.count; row++) {
    const y = Math.floor(row * rowHeight - top);
    if (y >= h) break;
    const [low, high] = [lanes.first[row], lanes.first[row + 1]];
    for (let i = Math.max(low, lastAtMost(lanes.start, from, low, high)); i < high && lanes.start[i] <= to; i++) {
      const rank = RANK[lanes.kind[i]];
      const x = Math.max(0, Math.floor(xAt(lanes.start[i])));
      const end = Math.min(w, Math.max(x + 1, Math.floor(xAt(lanes.end[i]))));
      for (let at = y * w + x; at < y * w + end; at++) {
        if (ranks[at] >= rank) continue;
        ranks[at] = rank;
        hues[at] = row % OWNER_COLOURS;
      }
    }
  }
  const image = new ImageData(w, h);
  const pixels = new Uint32Array(image.data.buffer);
  const owners = Array.from({ length: OWNER_COLOURS }, (_, n) => colour(ownerColour(n)));
  const colours = BY_RANK.map((kind) => owners.map((hue) => (kind === null ? 0 : pixel(toneOf(kind, hue, colour)))));
  for (let i = 0; i < pixels.length; i++) pixels[i] = colours[ranks[i]][hues[i]];
  const canvas = new OffscreenCanvas(w, h);
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0);
}

// ---- the chart: rows over an axis of steps or of seconds, with strips beneath: tokens of each step, queues, what the first in line waits for

const NARROW = 92, WIDE = 176; // pixels for the names of requests: ids, or words
const RIGHT = 16;
const TALLEST = 20; // pixels of a row
const STRIP = { tokens: [8, 52], queue: [76, 44], reasons: [136, 16], adapters: [160, 120], axis: 160, height: 182 }; // adapters: the most that their slots take

// What part of a run is in sight, in steps or in seconds. Several charts can share one.
export class Axis {
  constructor(all) {
    this.all = all;
    this.listeners = new Set();
    this.setMode("step");
  }

  setMode(mode) {
    this.mode = mode;
    this.limit = Math.max(...this.all.map((lanes) => (mode === "step" ? lanes.steps : lanes.time[lanes.steps])), 1e-9);
    this.show(0, this.limit);
  }

  show(from, to) {
    const least = this.mode === "step" ? Math.min(4, this.limit) : this.limit / Math.max(1, this.all[0].steps / 4);
    const size = Math.min(this.limit, Math.max(least, to - from));
    this.from = Math.max(0, Math.min(this.limit - size, from + (to - from - size) / 2));
    this.to = this.from + size;
    for (const listener of this.listeners) listener();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) / factor, around + (this.to - around) / factor);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    const held = Math.max(-this.from, Math.min(this.limit - this.to, by));
    this.show(this.from + held, this.to + held);
  }

  // Where a step begins; with `ended`, where the one before it had its result.
  at(lanes, step, ended = false) {
    if (this.mode === "step") return step;
    return ended && step > 0 ? lanes.stepEnd[step - 1] : lanes.time[step];
  }

  stepAt(lanes, value) {
    const step = this.mode === "step" ? Math.floor(value) : lastAtMost(lanes.time, value);
    return Math.max(0, Math.min(lanes.steps - 1, step));
  }
}

function niceStep(span, most) {
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
}

function elide(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let keep = text.length - 1;
  while (keep > 1 && context.measureText(`${text.slice(0, keep)}…`).width > width) keep--;
  return `${text.slice(0, keep)}…`;
}

export function makeLanesChart(card, context, lanes, axis, { label, most = 360, select = () => {}, cursor = context.cursor }) {
  const rowsCanvas = h("canvas", { class: "mv-lanes-canvas", "aria-hidden": "true" });
  const spacer = h("div", { class: "mv-lanes-spacer" });
  const pane = h("div", { class: "mv-lanes-pane", tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": label }, spacer);
  const rowMark = h("div", { class: "mv-lanes-row", hidden: true });
  const rows = h("div", { class: "mv-lanes-rows" }, rowsCanvas, rowMark, pane);
  const stripCanvas = h("canvas", { class: "mv-lanes-strips", role: "img", "aria-label": "tokens of each step, requests running and waiting, and what the first in the queue waits for" });
  const line = h("div", { class: "mv-lanes-cursor" });
  const element = h("div", { class: "mv-lanes" }, rows, stripCanvas, line);
  const tooltip = makeTooltip(card.element);
  const reasons = lanes.queueReasons();
  const slotHeight = lanes.slots ? Math.max(3, Math.min(16, STRIP.adapters[1] / lanes.slots)) : 0;
  const below = lanes.slots ? Math.ceil(slotHeight * lanes.slots) + 8 : 0; // what the slots of adapters add to the strips
  let width = 0;
  let rowHeight = TALLEST;
  let fit = true;
  let GUTTER = NARROW;
  const named = lanes.names.some((name, i) => name !== lanes.ids[i]);

  const plot = () => Math.max(50, width - GUTTER - RIGHT);
  const xOf = (value) => GUTTER + ((value - axis.from) / (axis.to - axis.from)) * plot();
  const valueAt = (x) => axis.from + ((x - GUTTER) / plot()) * (axis.to - axis.from);
  const stepIn = (clientX) => axis.stepAt(lanes, valueAt(clientX - element.getBoundingClientRect().left));
  const rowAt = (clientY) => {
    const row = Math.floor((clientY - pane.getBoundingClientRect().top + pane.scrollTop) / rowHeight);
    return row >= 0 && row < lanes.count ? row : -1;
  };
  const selected = () => (cursor.request === null ? -1 : lanes.ids.lastIndexOf(cursor.request));

  function layout() {
    width = element.clientWidth;
    if (!width) return;
    GUTTER = named && width > 560 ? WIDE : NARROW;
    const n = Math.max(1, lanes.count);
    rowHeight = fit ? Math.min(TALLEST, most / n) : Math.max(16, Math.min(TALLEST, most / n));
    if (rowHeight > 1 && fit) rowHeight = Math.min(TALLEST, Math.floor(rowHeight * 2) / 2);
    const whole = n * rowHeight > most ? Math.floor(most / rowHeight) * rowHeight : Math.ceil(n * rowHeight); // no row is cut
    const paneHeight = Math.max(20, rowHeight < 1 ? most : whole);
    rows.style.height = `${paneHeight}px`;
    spacer.style.height = `${Math.ceil(n * rowHeight)}px`;
    draw();
  }

  const draw = onceAFrame(() => {
    if (!element.isConnected || !width) return;
    drawRows();
    drawStrips();
    drawCursor();
  });

  function drawRows() {
    const height = rows.clientHeight;
    const pen = sharpen(rowsCanvas, width, height);
    const colour = context.colour;
    const top = pane.scrollTop;
    const size = plot();
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, size + 6, height);
    pen.clip();
    pen.translate(GUTTER, 0);
    const scale = size / (axis.to - axis.from);
    paintLanes(pen, lanes, {
      width: size + 6, height, top, rowHeight, colour, from: axis.stepAt(lanes, axis.from), to: axis.stepAt(lanes, axis.to),
      xAt: (step, ended = false) => (axis.at(lanes, step, ended) - axis.from) * scale,
    });
    pen.restore();
    drawLabels(pen, top, height, colour);
  }

  function drawLabels(pen, top, height, colour) {
    const every = rowHeight >= 13 ? 1 : niceStep(13 / rowHeight, 1);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const chosen = selected();
    for (let row = Math.max(0, Math.floor(top / rowHeight) - 1); row < lanes.count && row * rowHeight - top < height; row++) {
      const y = (row + 0.5) * rowHeight - top;
      if (rowHeight >= 4) {
        pen.fillStyle = colour(ownerColour(row));
        pen.fillRect(GUTTER - 8, y - rowHeight / 2 + 1, 3, rowHeight - 2);
      }
      if ((row % every && row !== chosen) || y < Math.min(5, rowHeight / 2) || y > height - Math.min(5, rowHeight / 2)) continue;
      if (row !== chosen && chosen >= 0 && Math.abs(row - chosen) * rowHeight < 12) continue; // its label has priority
      pen.font = `${row === chosen ? "600 " : ""}11.5px system-ui, sans-serif`;
      pen.fillStyle = colour(row === chosen ? "ink" : "muted");
      pen.fillText(elide(pen, lanes.names[row], GUTTER - 16), GUTTER - 12, Math.max(7, Math.min(height - 7, y)));
    }
  }

  function drawStrips() {
    const pen = sharpen(stripCanvas, width, STRIP.height + below);
    pen.clearRect(0, 0, width, STRIP.height + below);
    pen.font = "11px system-ui, sans-serif";
    drawTokens(pen);
    drawQueue(pen);
    drawReasons(pen);
    drawAdapters(pen);
    drawAxis(pen);
  }

  // Calls f(x0, x1, first step, last step) for each stretch of about a pixel: one step, or the many that share it.
  function stretches(f) {
    const last = axis.stepAt(lanes, axis.to);
    let step = axis.stepAt(lanes, axis.from);
    while (step <= last) {
      const x = xOf(axis.at(lanes, step));
      let end = step + 1;
      while (end <= last && xOf(axis.at(lanes, end)) < x + 1) end++;
      const x1 = Math.min(GUTTER + plot(), xOf(axis.at(lanes, end, axis.mode === "time")));
      f(Math.max(GUTTER, Math.round(x)), Math.max(Math.round(x1), Math.round(x) + 1), step, end - 1);
      step = end;
    }
  }

  function scaleLabel(pen, name, y, height, top) {
    const { colour } = context;
    pen.textAlign = "right";
    pen.fillStyle = colour("muted");
    pen.textBaseline = "middle";
    pen.fillText(name, GUTTER - 12, y + height / 2);
    pen.textBaseline = "top";
    pen.fillText(top.toLocaleString("en"), GUTTER - 12, y - 3);
    pen.fillStyle = colour("line");
    pen.fillRect(GUTTER, y + height, plot(), 1);
  }

  function drawTokens(pen) {
    const [y, height] = STRIP.tokens;
    const { colour } = context;
    let top = 1;
    for (let i = 0; i < lanes.steps; i++) top = Math.max(top, lanes.prefill[i] + lanes.decode[i]);
    const shown = lanes.budget && lanes.budget <= 3 * top ? Math.max(top, lanes.budget) : top;
    stretches((x, end, first, last) => {
      let [prefill, decode] = [0, 0];
      for (let i = first; i <= last; i++) {
        if (lanes.prefill[i] + lanes.decode[i] > prefill + decode) [prefill, decode] = [lanes.prefill[i], lanes.decode[i]];
      }
      const a = (prefill / shown) * height;
      const b = (decode / shown) * height;
      pen.fillStyle = colour("prefill");
      pen.fillRect(x, y + height - a, end - x, a);
      pen.fillStyle = colour("decode");
      pen.fillRect(x, y + height - a - b, end - x, b);
    });
    scaleLabel(pen, "tokens", y, height, shown);
    if (lanes.budget && lanes.budget <= shown) {
      pen.strokeStyle = colour("ink");
      pen.setLineDash([4, 3]);
      pen.lineWidth = 1;
      const at = Math.round(y + height - (lanes.budget / shown) * height) + 0.5;
      pen.beginPath();
      pen.moveTo(GUTTER, at);
      pen.lineTo(GUTTER + plot(), at);
      pen.stroke();
      pen.setLineDash([]);
    }
  }

  function drawQueue(pen) {
    const [y, height] = STRIP.queue;
    const { colour } = context;
    let top = 1;
    for (let i = 0; i < lanes.steps; i++) top = Math.max(top, lanes.running[i], lanes.waiting[i]);
    const level = (value) => y + height - (value / top) * height;
    const trace = (values) => {
      pen.beginPath();
      let begun = false;
      stretches((x, end, first, last) => {
        let most = 0;
        for (let i = first; i <= last; i++) most = Math.max(most, values[i]);
        if (!begun) pen.moveTo(x, level(most));
        begun = true;
        pen.lineTo(x, level(most));
        pen.lineTo(end, level(most));
      });
    };
    trace(lanes.waiting);
    pen.lineTo(GUTTER + plot(), level(0));
    pen.lineTo(GUTTER, level(0));
    pen.fillStyle = colour("waiting");
    pen.globalAlpha = 0.45;
    pen.fill();
    pen.globalAlpha = 1;
    trace(lanes.running);
    pen.strokeStyle = colour("decode");
    pen.lineWidth = 1.8;
    pen.stroke();
    scaleLabel(pen, "", y, height, top);
    pen.fillStyle = colour("muted");
    pen.textBaseline = "middle";
    pen.fillText("running", GUTTER - 12, y + 19);
    pen.fillText("waiting", GUTTER - 12, y + 34);
    pen.fillStyle = colour("decode");
    pen.fillRect(GUTTER - 74, y + 18, 16, 2);
    pen.fillStyle = colour("waiting");
    pen.globalAlpha = 0.45;
    pen.fillRect(GUTTER - 74, y + 29, 16, 10);
    pen.globalAlpha = 1;
  }

  function drawReasons(pen) {
    const [y, height] = STRIP.reasons;
    const { colour } = context;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = colour("muted");
    pen.fillText("first waits for", GUTTER - 12, y + height / 2 + 0.5);
    for (const [start, end, , reason] of reasons) {
      const x = Math.max(GUTTER, xOf(axis.at(lanes, start)));
      const x1 = Math.min(GUTTER + plot(), xOf(axis.at(lanes, end, true)));
      if (x1 <= x) continue;
      pen.fillStyle = colour("raised");
      pen.strokeStyle = colour("muted");
      pen.lineWidth = 1;
      pen.fillRect(x, y, Math.max(1, x1 - x), height);
      if (x1 - x > 3) pen.strokeRect(x + 0.5, y + 0.5, x1 - x - 1.5, height - 1);
      else {
        pen.fillStyle = colour("muted");
        pen.fillRect(x, y, Math.max(1, x1 - x - 0.5), height);
      }
      const [letter, name] = shortReason(lanes.about.reasons[reason]);
      const text = pen.measureText(name).width < x1 - x - 8 ? name : letter;
      if (pen.measureText(text).width < x1 - x - 4) {
        pen.textAlign = "center";
        pen.fillStyle = colour("ink");
        pen.fillText(text, (x + x1) / 2, y + height / 2 + 0.5);
      }
    }
  }

  // A row for each slot: the adapter that lies in it, from its load to its eviction.
  function drawAdapters(pen) {
    if (!lanes.slots) return;
    const { colour } = context;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    pen.fillStyle = colour("muted");
    pen.fillText("adapters", GUTTER - 12, STRIP.adapters[0] + (slotHeight * lanes.slots) / 2);
    pen.textAlign = "center";
    for (const [slot, start, end, adapter] of lanes.loras) {
      const x = Math.max(GUTTER, xOf(axis.at(lanes, start)));
      const x1 = Math.min(GUTTER + plot(), xOf(axis.at(lanes, end, true)));
      if (x1 <= x) continue;
      const y = STRIP.adapters[0] + slot * slotHeight;
      pen.fillStyle = colour(ownerColour(adapter));
      pen.fillRect(x, y, Math.max(1, x1 - x - 1), Math.max(2, slotHeight - 1));
      const name = lanes.about.adapters[adapter];
      if (slotHeight > 10 && pen.measureText(name).width < x1 - x - 6) {
        pen.fillStyle = readable(colour(ownerColour(adapter)));
        pen.fillText(name, (x + x1) / 2, y + slotHeight / 2);
      }
    }
  }

  function drawAxis(pen) {
    const { colour } = context;
    const y = STRIP.axis + below;
    const step = Math.max(niceStep(axis.to - axis.from, Math.max(2, plot() / 90)), axis.mode === "step" ? 1 : 0);
    pen.strokeStyle = pen.fillStyle = colour("muted");
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (let value = Math.ceil(axis.from / step) * step; value <= axis.to + step * 1e-6; value += step) {
      const x = xOf(value);
      if (x > GUTTER + plot() - 34) break;
      pen.fillRect(Math.round(x), y, 1, 4);
      const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      pen.fillText(axis.mode === "step" ? Math.round(value).toLocaleString("en") : value.toFixed(digits), Math.max(x, GUTTER + 4), y + 7);
    }
    pen.textAlign = "right";
    pen.fillText(axis.mode === "step" ? "step" : "s", GUTTER + plot(), y + 7);
  }

  function drawCursor() {
    const over = cursor.step >= lanes.steps;
    const step = Math.min(cursor.step, lanes.steps - 1);
    const x = xOf(axis.at(lanes, step));
    const end = xOf(axis.at(lanes, step + 1, true));
    line.hidden = over || end < GUTTER || x > GUTTER + plot() + 1;
    line.style.left = `${Math.max(GUTTER, x)}px`;
    line.style.width = `${Math.max(2, Math.min(GUTTER + plot(), end) - Math.max(GUTTER, x))}px`;
    const row = selected();
    rowMark.hidden = row < 0;
    if (row >= 0) {
      rowMark.style.top = `${row * rowHeight - pane.scrollTop}px`;
      rowMark.style.height = `${Math.max(3, rowHeight)}px`;
    }
  }

  // Bring the cursor's step and the selected request into sight.
  function reveal() {
    const step = Math.min(cursor.step, lanes.steps - 1);
    const at = axis.at(lanes, step);
    if (at < axis.from || axis.at(lanes, step + 1) > axis.to) {
      const size = axis.to - axis.from;
      axis.show(at - size / 3, at + (2 * size) / 3);
    }
  }

  function revealRow(row) {
    const [top, bottom] = [row * rowHeight, (row + 1) * rowHeight];
    if (top < pane.scrollTop) pane.scrollTop = top;
    else if (bottom > pane.scrollTop + pane.clientHeight) pane.scrollTop = bottom - pane.clientHeight;
  }

  function tell(event, inStrips) {
    const x = event.clientX - element.getBoundingClientRect().left;
    const step = stepIn(event.clientX);
    const row = inStrips ? -1 : rowAt(event.clientY);
    if (x < GUTTER - 60 || (!inStrips && row < 0) || (inStrips && x < GUTTER)) return tooltip.hide();
    const when = `step ${step}, ${duration(lanes.time[step])}`;
    if (row >= 0) tooltip.show(event.clientX, event.clientY, h("strong", {}, lanes.names[row]), ` at ${when}`, factList(lanes.facts(row, step)));
    else tooltip.show(event.clientX, event.clientY, h("strong", {}, when), factList(stepFacts(lanes, step, reasons)));
  }

  function press(event, inStrips) {
    if (event.button) return;
    if (!inStrips && event.clientX > pane.getBoundingClientRect().left + pane.clientWidth) return; // the scroll bar
    const begin = { x: event.clientX, y: event.clientY, from: axis.from, to: axis.to, top: pane.scrollTop };
    let moved = false;
    const target = event.currentTarget;
    target.setPointerCapture(event.pointerId);
    const move = (e) => {
      moved ||= Math.hypot(e.clientX - begin.x, e.clientY - begin.y) > 4;
      if (!moved) return;
      tooltip.hide();
      element.classList.add("mv-lanes-dragged");
      const by = ((begin.x - e.clientX) / plot()) * (begin.to - begin.from);
      const held = Math.max(-begin.from, Math.min(axis.limit - begin.to, by));
      axis.show(begin.from + held, begin.to + held);
      if (!inStrips) pane.scrollTop = begin.top + begin.y - e.clientY;
    };
    const up = (e) => {
      target.removeEventListener("pointermove", move);
      target.removeEventListener("pointerup", up);
      target.removeEventListener("pointercancel", up);
      element.classList.remove("mv-lanes-dragged");
      if (moved || e.type === "pointercancel") return;
      const row = inStrips ? -1 : rowAt(e.clientY);
      cursor.pause();
      cursor.go(stepIn(e.clientX));
      if (row >= 0) cursor.set({ request: lanes.ids[row] });
    };
    target.addEventListener("pointermove", move);
    target.addEventListener("pointerup", up);
    target.addEventListener("pointercancel", up);
  }

  for (const [target, inStrips] of [[pane, false], [stripCanvas, true]]) {
    target.addEventListener("pointermove", (event) => { if (!event.buttons) tell(event, inStrips); });
    target.addEventListener("pointerleave", () => tooltip.hide());
    target.addEventListener("pointerdown", (event) => press(event, inStrips));
    target.addEventListener("dblclick", (event) => {
      const row = inStrips ? -1 : rowAt(event.clientY);
      if (row >= 0 && fit && rowHeight < 8) setRows(false, row);
      axis.zoom(4, valueAt(event.clientX - element.getBoundingClientRect().left));
    });
    target.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        axis.zoom(1.0025 ** -event.deltaY, valueAt(event.clientX - element.getBoundingClientRect().left));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        axis.pan((event.deltaX || event.deltaY) / plot());
      }
      tooltip.hide();
    }, { passive: false });
  }

  function setRows(toFit, row = selected()) {
    fit = toFit;
    layout();
    if (row >= 0) pane.scrollTop = (row + 0.5) * rowHeight - rows.clientHeight / 2;
    select();
  }

  function chooseRow(by) {
    if (!lanes.count) return;
    const row = selected();
    const next = row < 0 ? (by > 0 ? 0 : lanes.count - 1) : Math.max(0, Math.min(lanes.count - 1, row + by));
    cursor.set({ request: lanes.ids[next] });
    revealRow(next);
  }

  pane.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1;
    const page = Math.max(1, Math.floor(pane.clientHeight / rowHeight) - 1);
    const actions = {
      ArrowLeft: () => { cursor.pause(); cursor.move(-far); reveal(); },
      ArrowRight: () => { cursor.pause(); cursor.move(far); reveal(); },
      ArrowUp: () => chooseRow(-far),
      ArrowDown: () => chooseRow(far),
      PageUp: () => chooseRow(-page),
      PageDown: () => chooseRow(page),
      Home: () => { cursor.pause(); cursor.go(0); reveal(); },
      End: () => { cursor.pause(); cursor.go(lanes.steps - 1); reveal(); },
      "+": () => axis.zoom(2, axis.at(lanes, Math.min(cursor.step, lanes.steps - 1))),
      "=": () => axis.zoom(2, axis.at(lanes, Math.min(cursor.step, lanes.steps - 1))),
      "-": () => axis.zoom(0.5, axis.at(lanes, Math.min(cursor.step, lanes.steps - 1))),
      "[": () => axis.pan(-0.25),
      "]": () => axis.pan(0.25),
      0: () => axis.show(0, axis.limit),
      Escape: () => cursor.set({ request: null }),
    };
    if (!(event.key in actions)) return;
    actions[event.key]();
    event.preventDefault();
    event.stopPropagation();
  });
  pane.addEventListener("scroll", () => { tooltip.hide(); draw(); });

  axis.listeners.add(draw);
  const endCursor = cursor.on((_, changed) => {
    if (changed.has("request")) draw();
    else if (changed.has("step")) {
      if (cursor.playing) reveal();
      drawCursor();
    }
  });
  const observer = new ResizeObserver(() => { if (element.clientWidth !== width) layout(); });
  observer.observe(element);
  context.onTheme(draw);
  return {
    element, pane, layout, draw, setRows, reveal, tooltip, xOf, rowAt,
    inSight: (x) => x >= GUTTER - 1 && x <= GUTTER + plot() + 1,
    isFit: () => fit,
    canFold: () => lanes.count * 16 > most,
    destroy() {
      observer.disconnect();
      endCursor();
      axis.listeners.delete(draw);
    },
  };
}

// A letter and a few words for the usual reasons to wait.
const SHORT = {
  "as many requests were running as max_num_seqs allows": ["S", "max_num_seqs"],
  "the token budget of the step was used up": ["T", "token budget"],
  "too few KV blocks were free": ["K", "KV blocks"],
  "a running request had just lost its blocks; nobody is admitted in such a step": ["P", "a preemption"],
  "as many prompts were half done as max_num_partial_prefills allows": ["H", "half-done prompts"],
  "the rest of the budget is too small for the whole prompt, and enable_chunked_prefill is off": ["W", "a whole prompt's budget"],
  "as many adapters were in use as max_loras allows": ["L", "max_loras"],
  "the policy gave it no tokens": ["Y", "the policy"],
};
const shortReason = (words) => SHORT[words] ?? ["?", words];

function factList(rows) {
  return h("dl", { class: "mv-facts" }, rows.filter((row) => row[1] !== null).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function stepFacts(lanes, step, reasons) {
  const [prefill, decode] = [lanes.prefill[step], lanes.decode[step]];
  const wait = reasons.find(([start, end]) => start <= step && step < end);
  return [
    ["tokens", `${prefill + decode}${lanes.budget ? ` of ${lanes.budget}` : ""}: ${prefill} prefill, ${decode} decode`],
    ["queues", `${lanes.running[step]} running, ${lanes.waiting[step]} waiting`],
    ["took", duration(lanes.stepEnd[step] - lanes.time[step])],
    ["adapters", lanes.adaptersAt(step) || null],
    ["first in line", wait ? `${lanes.names[wait[2]]} waits: ${lanes.about.reasons[wait[3]]}` : null],
  ];
}

// The legend of lanes: kinds that occur, and ends.
export function legendItems(all, colour) {
  const order = [PREFILL, DECODE, WAITING, PREEMPTED, SWAPPED, REMOTE, STALLED];
  const bars = order.filter((kind) => all.some((lanes) => lanes.kind.includes(kind))).map((kind) => ({
    label: KINDS[kind], swatch: swatch(24, 14, (pen, w, height) => paintBar(pen, kind, 0, 0, w, height, colour("prefill"), colour)),
  }));
  const marks = [1, 2, 3, 4].filter((end) => all.some((lanes) => lanes.finishKind.includes(end))).map((end) => ({
    label: `finished: ${FINISHES[end]}`, swatch: swatch(12, 14, (pen, w, height) => paintEnd(pen, end, w / 2, height / 2, 8, colour)),
  }));
  const seen = all.some((lanes) => lanes.media.size) ? [{
    label: "tokens of media; filled: encoded", swatch: swatch(12, 14, (pen) => paintDiamond(pen, 6, 7, 3.5, true, colour)),
  }] : [];
  return [...bars, ...seen, ...marks];
}

// What the letters of the lowest strip mean, for those that occur.
export function reasonItems(all, colour) {
  const codes = new Set(all.flatMap((lanes) => lanes.queueReasons().map((row) => lanes.about.reasons[row[3]])));
  return [...codes].map(shortReason).map(([letter, name]) => ({
    label: name,
    swatch: swatch(14, 14, (pen, w, height) => {
      pen.strokeStyle = colour("muted");
      pen.strokeRect(0.5, 0.5, w - 1, height - 1);
      pen.fillStyle = colour("ink");
      pen.font = "10.5px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(letter, w / 2, height / 2 + 0.5);
    }),
  }));
}

// Controls for the axis: steps or seconds, zoom.
export function axisTools(axis, around = () => undefined) {
  const mode = h("select", { class: "mv-select", "aria-label": "horizontal axis", onchange: () => axis.setMode(mode.value) },
    h("option", { value: "step" }, "by step"), h("option", { value: "time" }, "by time"));
  return [
    mode,
    button("zoom out", null, () => axis.zoom(0.5, around()), { title: "zoom out (−)" }),
    button("zoom in", null, () => axis.zoom(2, around()), { title: "zoom in (+), or Ctrl and wheel" }),
    button("show all", null, () => axis.show(0, axis.limit), { title: "show the whole run (0)" }),
  ];
}

// ---- the view

export async function render(card, data, context) {
  const { cursor } = context;
  const lanes = await readLanes(data, data.header.lanes);
  const axis = new Axis([lanes]);
  card.subtitle.textContent = `${count(lanes.count, "request")}, ${count(lanes.steps, "step")}, ${duration(lanes.time[lanes.steps])}, policy ${lanes.about.policy}`;
  const legend = legendItems([lanes], (name) => context.colour(name));
  const waits = reasonItems([lanes], (name) => context.colour(name));
  const repaint = () => [...legend, ...waits].forEach((item) => item.swatch.repaint());
  const detail = h("p", { class: "mv-lanes-detail" });
  const story = h("ol", { class: "mv-lanes-story", "aria-label": "story of the chosen request" });
  const chart = makeLanesChart(card, context, lanes, axis, {
    label: "requests by steps. Left and right: step; up and down: request; plus and minus: zoom; square brackets: pan; 0: whole run; Escape: no request",
    select: () => { if (fold) fold.setAttribute("aria-pressed", String(!chart.isFit())); },
  });
  card.body.append(makeLegend(legend).element, chart.element, detail, story);
  if (waits.length) chart.element.after(h("div", { class: "mv-lanes-waits" }, h("span", { class: "mv-muted" }, "the first in the queue waits for"), makeLegend(waits).element));
  let fold = null;
  if (chart.canFold()) {
    fold = button("tall rows", null, () => chart.setRows(!chart.isFit()), { "aria-pressed": "false", title: "rows tall enough to read, or all rows in sight" });
    card.tools.append(fold);
  }
  card.tools.append(...axisTools(axis, () => axis.at(lanes, cursor.step)));

  function tell() {
    const row = cursor.request === null ? -1 : lanes.ids.lastIndexOf(cursor.request);
    const step = cursor.step;
    const tokens = lanes.prefill[step] + lanes.decode[step];
    tellStory(row, step);
    detail.textContent = row < 0
      ? `Step ${step}: ${tokens}${lanes.budget ? ` of ${lanes.budget}` : ""} tokens (${lanes.prefill[step]} prefill, ${lanes.decode[step]} decode), ${lanes.running[step]} running, ${lanes.waiting[step]} waiting.`
      : `Step ${step}, request ${lanes.names[row]}: ${lanes.describe(row, step)}.`;
    card.say(detail.textContent);
  }

  // What the chosen request did from its arrival to its end; a click goes there.
  let told = null;
  function tellStory(row, step) {
    if (row !== told) {
      const goTo = (at) => () => { cursor.pause(); cursor.go(at); };
      const when = (first, last) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
      const lines = row < 0 ? [] : lanes.story(row);
      story.replaceChildren(...lines.map(([first, last, words]) => h("li", { "data-first": first, "data-last": last },
        h("button", { type: "button", class: "mv-link", onclick: goTo(first) }, when(first, last)), ` ${words}`)));
      if (row < 0) story.append(h("li", { class: "mv-muted" }, "Click a row for the story of its request."));
      told = row;
    }
    for (const line of story.children) line.toggleAttribute("data-now", Number(line.dataset.first) <= step && step <= Number(line.dataset.last));
    const now = story.querySelector("[data-now]");
    if (now) story.scrollTop = now.offsetTop - story.offsetTop - story.clientHeight / 2;
  }

  const end = cursor.on((_, changed) => { if (changed.has("step") || changed.has("request")) tell(); });
  context.onTheme(repaint);
  repaint();
  tell();
  chart.layout();
  card.element.lanes = { lanes, axis, chart }; // for tests and the curious
  return () => {
    end();
    chart.destroy();
  };
}
