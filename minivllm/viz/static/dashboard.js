// How the engine is, now: six numbers over the last minute. Samples come from a kernel, from a server, or lie in the page.

import { sharpen } from "./theme.js";
import { h } from "./ui.js";

const SECONDS = 60; // shown
const POLL = 250; // milliseconds between two questions to a server
const SAY_EVERY = 10_000; // milliseconds between two announcements to a screen reader

const whole = (value) => Math.round(value).toLocaleString("en");
const share = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
const seconds = (value) => (value < 1 ? `${(1000 * value).toPrecision(3)} ms` : `${value.toPrecision(3)} s`);

// `least`: what the axis reaches at least; `most`: where it always ends.
const PANELS = [
  { field: "running", title: "running", unit: "requests", tell: whole, least: 4, colour: "owner-0" },
  { field: "waiting", title: "waiting", unit: "requests", tell: whole, least: 4, colour: "owner-1" },
  { field: "tokens_per_second", title: "generated", unit: "tokens/s", tell: whole, least: 10, colour: "owner-2" },
  { field: "step_seconds", title: "step time", unit: "", tell: seconds, least: 0.001, colour: "owner-3" },
  { field: "kv_usage", title: "KV blocks in use", unit: "", tell: share, most: 1, colour: "owner-4" },
  { field: "hit_rate", title: "prompt tokens cached", unit: "", tell: share, most: 1, colour: "owner-5" },
];

// The samples of the last minute, as one array a field.
export class History {
  constructor(fields, keep = 2400) {
    this.fields = fields;
    this.keep = keep;
    this.columns = Object.fromEntries(fields.map((name) => [name, []]));
  }

  get length() {
    return this.columns.number.length;
  }

  last(name) {
    return this.columns[name][this.length - 1];
  }

  // Add rows, each at its place; those that are known already are passed over. Returns how many were new. A kernel that is busy
  // sends new samples at once, and the answer to what was missed before them later.
  add(rows) {
    let added = 0;
    for (const row of rows) {
      let at = this.length;
      while (at && this.columns.number[at - 1] > row[0]) at--;
      if (at && this.columns.number[at - 1] === row[0]) continue;
      this.fields.forEach((name, i) => this.columns[name].splice(at, 0, row[i]));
      added++;
    }
    const excess = this.length - this.keep;
    if (excess > 0) for (const column of Object.values(this.columns)) column.splice(0, excess);
    return added;
  }
}

// A round number that is at least `value`: 1, 2 or 5 times a power of ten.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((n) => n * power >= value * 0.999999) * power;
}

export async function render(card, data, context) {
  const { fields } = data.header;
  const history = new History(fields);
  history.add(await data.json(data.header.samples));
  const status = h("span", { class: "mv-status" });
  card.tools.append(status);
  const panels = PANELS.map(makePanel);
  card.body.append(h("div", { class: "mv-panels" }, panels.map((panel) => panel.element)));

  let due = 0;
  let said = 0;
  let timer = null;
  const paint = () => {
    due = 0;
    for (const panel of panels) panel.paint(history, context.colour);
    if (performance.now() - said > SAY_EVERY) {
      said = performance.now();
      card.say(summary(history));
    }
  };
  const schedule = () => {
    if (!due) due = requestAnimationFrame(paint);
  };
  const take = (rows) => {
    if (history.add(rows)) schedule();
    card.element.dataset.samples = history.length;
  };
  const tell = (text, alive) => {
    status.textContent = text;
    status.classList.toggle("mv-alive", alive);
  };

  const ends = [() => cancelAnimationFrame(due), () => clearTimeout(timer)];
  if (context.model) {
    const hear = (message) => {
      if (message.samples) take(message.samples);
      tell(message.ended ?? "live", !message.ended);
    };
    context.model.on("msg:custom", hear);
    ends.push(() => context.model.off("msg:custom", hear));
    context.model.send({ more: history.length ? history.last("number") : -1 });
  } else if (data.header.source) {
    const ask = async () => {
      try {
        const after = history.length ? history.last("number") : -1;
        const answer = await fetch(`${data.header.source}?after=${after}`, { cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        const { samples, ended } = await answer.json();
        take(samples);
        tell(ended ?? "live", !ended);
      } catch {
        tell("no answer from the server", false);
      }
      timer = setTimeout(ask, POLL);
    };
    ask();
  } else {
    tell("a recording", false);
  }
  const resized = new ResizeObserver(schedule);
  resized.observe(card.body);
  context.onTheme(schedule);
  paint();
  return () => {
    resized.disconnect();
    ends.forEach((end) => end());
  };
}

function makePanel(spec) {
  const value = h("span", { class: "mv-panel-value" }, "–");
  const canvas = h("canvas", { class: "mv-panel-chart", role: "img" });
  const element = h("figure", { class: "mv-panel" },
    h("figcaption", {}, h("span", { class: "mv-panel-title" }, spec.title), value, h("span", { class: "mv-panel-unit" }, spec.unit)), canvas);
  return {
    element,
    paint(history, colour) {
      const last = history.length ? history.last(spec.field) : null;
      const text = last === null ? "–" : spec.tell(last);
      if (value.textContent !== text) value.textContent = text;
      drawChart(canvas, history, spec, colour);
    },
  };
}

const HEIGHT = 84;
const TOP = 14;
const BOTTOM = 14;

function drawChart(canvas, history, spec, colour) {
  const width = canvas.parentElement.clientWidth;
  if (!width) return;
  const ctx = sharpen(canvas, width, HEIGHT);
  const times = history.columns.time;
  const values = history.columns[spec.field];
  const now = history.length ? times[times.length - 1] : 0;
  let begin = times.length;
  let most = 0;
  while (begin > 0 && times[begin - 1] >= now - SECONDS) most = Math.max(most, values[--begin] ?? 0);
  const top = spec.most ?? roundUp(Math.max(spec.least, most));
  const x = (time) => width - ((now - time) / SECONDS) * width;
  const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
  drawAxes(ctx, width, y, top, spec, colour);
  ctx.strokeStyle = colour(spec.colour);
  ctx.fillStyle = colour(spec.colour);
  ctx.lineWidth = 1.5;
  ctx.lineJoin = "round";
  for (const [from, to] of runs(values, begin)) {
    ctx.beginPath();
    for (let i = from; i < to; i++) ctx.lineTo(x(times[i]), y(values[i]));
    if (to - from === 1) ctx.arc(x(times[from]), y(values[from]), 1.5, 0, 2 * Math.PI);
    ctx.stroke();
    ctx.lineTo(x(times[to - 1]), y(0));
    ctx.lineTo(x(times[from]), y(0));
    ctx.globalAlpha = 0.14;
    ctx.fill();
    ctx.globalAlpha = 1;
  }
  const reached = history.length ? spec.tell(most) : "nothing";
  canvas.setAttribute("aria-label", `${spec.title}, last ${SECONDS} seconds: at most ${reached}`);
}

function drawAxes(ctx, width, y, top, spec, colour) {
  ctx.font = "10.5px system-ui, sans-serif";
  ctx.fillStyle = colour("muted");
  ctx.strokeStyle = colour("line");
  ctx.lineWidth = 1;
  for (const value of [0, top]) {
    ctx.beginPath();
    ctx.moveTo(0, Math.round(y(value)) + 0.5);
    ctx.lineTo(width, Math.round(y(value)) + 0.5);
    ctx.stroke();
  }
  ctx.textBaseline = "bottom";
  ctx.fillText(spec.tell(top), 0, y(top) - 1);
  ctx.textBaseline = "top";
  ctx.fillText(`${SECONDS} s ago`, 0, y(0) + 3);
  ctx.textAlign = "right";
  ctx.fillText("now", width, y(0) + 3);
  ctx.textAlign = "left";
}

// Stretches of the values from `begin` on that hold no null: [from, to).
export function runs(values, begin) {
  const out = [];
  let from = -1;
  for (let i = begin; i <= values.length; i++) {
    const there = i < values.length && values[i] !== null;
    if (there && from < 0) from = i;
    if (!there && from >= 0) {
      out.push([from, i]);
      from = -1;
    }
  }
  return out;
}

function summary(history) {
  if (!history.length) return "No sample yet.";
  return PANELS.map((panel) => {
    const value = history.last(panel.field);
    return value === null ? null : `${panel.title} ${panel.tell(value)} ${panel.unit}`.trim();
  }).filter(Boolean).join(", ");
}
