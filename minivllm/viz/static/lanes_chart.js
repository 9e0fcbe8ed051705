// A chart of lanes over an axis of steps or of seconds, with strips beneath: tokens of each step, queues, what the first in line waits for.
import { lastAtMost } from "./lanes.js";
import { COLOURS, paintBar, paintEnd, paintLanes } from "./lanes_paint.js";
import { ownerColour, sharpen } from "./theme.js";
import { button, h, makeTooltip, onceAFrame, swatch } from "./ui.js";

export const GUTTER = 92;
const RIGHT = 16;
const TALLEST = 20; // pixels of a row
const STRIP = { tokens: [8, 52], queue: [76, 44], reasons: [136, 16], axis: 160, height: 182 };

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
  let width = 0;
  let rowHeight = TALLEST;
  let fit = true;

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
    const n = Math.max(1, lanes.count);
    rowHeight = fit ? Math.min(TALLEST, most / n) : Math.max(16, Math.min(TALLEST, most / n));
    if (rowHeight > 1 && fit) rowHeight = Math.min(TALLEST, Math.floor(rowHeight * 2) / 2);
    const paneHeight = Math.max(20, Math.min(most, Math.ceil(n * rowHeight)));
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
      if ((row % every && row !== chosen) || y < -6 || y > height + 6) continue;
      if (row !== chosen && chosen >= 0 && Math.abs(row - chosen) * rowHeight < 12) continue; // its label has priority
      pen.font = `${row === chosen ? "600 " : ""}11.5px system-ui, sans-serif`;
      pen.fillStyle = colour(row === chosen ? "ink" : "muted");
      pen.fillText(elide(pen, lanes.ids[row], GUTTER - 16), GUTTER - 12, Math.max(7, Math.min(height - 7, y)));
    }
  }

  function drawStrips() {
    const pen = sharpen(stripCanvas, width, STRIP.height);
    pen.clearRect(0, 0, width, STRIP.height);
    pen.font = "11px system-ui, sans-serif";
    drawTokens(pen);
    drawQueue(pen);
    drawReasons(pen);
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

  function drawAxis(pen) {
    const { colour } = context;
    const y = STRIP.axis;
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
    const when = `step ${step}, ${lanes.time[step].toPrecision(4)} s`;
    if (row >= 0) tooltip.show(event.clientX, event.clientY, h("strong", {}, lanes.ids[row]), ` at ${when}`, factList(lanes.facts(row, step)));
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
    ["took", `${((lanes.stepEnd[step] - lanes.time[step]) * 1e3).toPrecision(3)} ms`],
    ["first in line", wait ? `${lanes.ids[wait[2]]} waits: ${lanes.about.reasons[wait[3]]}` : null],
  ];
}

// The legend of lanes: kinds that occur, and ends.
export function legendItems(all, colour) {
  const names = ["waiting", "preempted", "swapped out", "running, no tokens", "prefill chunk", "decode"];
  const order = [4, 5, 0, 1, 2, 3];
  const bars = order.filter((kind) => all.some((lanes) => lanes.kind.includes(kind))).map((kind) => ({
    label: names[kind], swatch: swatch(24, 14, (pen, w, height) => paintBar(pen, kind, 0, 0, w, height, colour)), kind: COLOURS[kind],
  }));
  const ends = ["stop", "length", "abort", "error"];
  const marks = [1, 2, 3, 4].filter((end) => all.some((lanes) => lanes.finishKind.includes(end))).map((end) => ({
    label: `finished: ${ends[end - 1]}`, swatch: swatch(12, 14, (pen, w, height) => paintEnd(pen, end, w / 2, height / 2, 8, colour)),
  }));
  return [...bars, ...marks];
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

