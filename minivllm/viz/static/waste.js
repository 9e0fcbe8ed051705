// Memory that is set aside and empty: in pages, and if each request had one piece.
import { hatch, sharpen } from "./theme.js";
import { count, h, makeLegend, makeTooltip, swatch } from "./ui.js";

const GUTTER = 74, RIGHT = 14, TOP = [10, 130], SHARE = [172, 104], AXIS = 282, HEIGHT = 304;
const LINES = [["prefill", [], 2.2], ["swapped", [7, 4], 1.6], ["preempted", [7, 3, 2, 3], 1.6], ["ink", [2, 3], 1.8]];

const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %` : "–");

export async function render(card, data, context) {
  const { cursor } = context;
  const { header } = data;
  const steps = cursor.steps;
  const [flat, emptyFlat] = await Promise.all([data.part(header.series), data.part(header.empty)]);
  const row = (i) => {
    const out = new Float64Array(steps);
    for (let s = 0, sum = 0; s < steps; s++) out[s] = sum += flat[i * steps + s];
    return out;
  };
  const [stored, running, ...both] = Array.from({ length: 10 }, (_, i) => row(i));
  const [reserved, wasted] = [both.slice(0, 4), both.slice(4)];
  const size = header.blockSize;
  const empty = new Int32Array(steps * size);
  for (let i = 0; i < empty.length; i++) empty[i] = emptyFlat[i] + (i >= size ? empty[i - size] : 0);
  const share = (k, s) => (reserved[k][s] ? wasted[k][s] / reserved[k][s] : NaN);
  const colour = (name) => context.colour(name);

  const legend = [
    { label: "stored", swatch: swatch(22, 12, (pen, w, height) => { pen.fillStyle = colour("decode"); pen.fillRect(0, 0, w, height); }) },
    { label: "empty in pages", swatch: swatch(22, 12, (pen, w, height) => { pen.fillStyle = hatch(pen, colour("preempted")); pen.fillRect(0, 0, w, height); }) },
    ...header.schemes.map((label, k) => ({ label, swatch: swatch(26, 12, (pen, w, height) => {
      pen.strokeStyle = colour(LINES[k][0]);
      pen.setLineDash(LINES[k][1]);
      pen.lineWidth = LINES[k][2];
      pen.beginPath();
      pen.moveTo(0, height / 2);
      pen.lineTo(w, height / 2);
      pen.stroke();
    }) })),
  ];
  const canvas = h("canvas", { class: "mv-waste-chart", tabindex: 0, role: "application", "aria-roledescription": "chart",
    "aria-label": "memory set aside and empty share by steps. Left and right: step; Home and End: first and last step" });
  const line = h("div", { class: "mv-waste-cursor" });
  const chart = h("div", { class: "mv-waste-left" }, canvas, line);
  const cells = header.schemes.map(() => [h("td"), h("td"), h("td"), h("td")]);
  const caption = h("caption", {}, "");
  const table = h("table", { class: "mv-table mv-waste-table" }, caption,
    h("thead", {}, h("tr", {}, ["at this step", "slots", "empty", "share", "of the cache"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, header.schemes.map((name, k) => h("tr", {}, h("th", { scope: "row" }, name), cells[k]))));
  const bars = h("canvas", { class: "mv-waste-bars", role: "img", "aria-label": "" });
  const mark = h("p", { class: "mv-muted mv-waste-note" });
  const note = h("p", { class: "mv-muted mv-waste-note" });
  const last = h("div", {}, h("p", { class: "mv-waste-head" }, "Empty slots in the last block of each running request"), bars, mark, note);
  const side = h("div", { class: "mv-waste-side" }, h("div", {}, table), last);
  card.body.append(makeLegend(legend).element, h("div", { class: "mv-waste-grid" }, chart, side));
  const tooltip = makeTooltip(card.element);
  const fits = Math.floor(header.capacity / header.longest);
  note.textContent = `One piece of max_model_len for each request: room for ${count(fits, "request")} at a time. Up to ${largest(running)} ran.`;
  card.subtitle.textContent = header.mean[0] === null ? "no request was running at the end of a step"
    : `empty on average: ${percent(header.mean[0])} in pages, ${percent(header.mean[1])} to ${percent(header.mean[3])} in one piece`;

  let width = 0;
  const plot = () => Math.max(50, width - GUTTER - RIGHT);
  const xOf = (step) => GUTTER + (step / steps) * plot();
  let ceiling = header.capacity;
  const highest = largest(reserved.map(largest));
  ceiling = Math.max(ceiling, Math.min(highest, 2.5 * header.capacity));
  ceiling *= 1.04;

  // f(x0, x1, first, last) for about each pixel.
  function stretches(f) {
    const n = Math.min(Math.floor(plot()), steps);
    for (let i = 0; i < n; i++) {
      const from = Math.floor((i / n) * steps);
      const to = Math.max(from + 1, Math.floor(((i + 1) / n) * steps));
      f(Math.round(xOf(from)), Math.round(xOf(to)), from, to - 1);
    }
  }

  function curve(pen, values, level) {
    pen.beginPath();
    let up = false;
    stretches((x, end, first, last) => {
      let most = NaN;
      for (let s = first; s <= last; s++) if (!(values(s) <= most)) most = Number.isNaN(values(s)) ? most : values(s);
      if (Number.isNaN(most)) {
        up = false;
        return;
      }
      if (up) pen.lineTo(x, level(most));
      else pen.moveTo(x, level(most));
      up = true;
      pen.lineTo(end, level(most));
    });
    pen.stroke();
  }

  function draw() {
    if (!width) return;
    const pen = sharpen(canvas, width, HEIGHT);
    pen.font = "11px system-ui, sans-serif";
    const [y, height] = TOP;
    const level = (value) => y + height - Math.min(1.04, value / ceiling) * height;
    const pattern = hatch(pen, colour("preempted"));
    stretches((x, end, first, last) => {
      let most = first;
      for (let s = first; s <= last; s++) if (reserved[0][s] > reserved[0][most]) most = s;
      pen.fillStyle = colour("decode");
      const full = level(reserved[0][most] - wasted[0][most]);
      pen.fillRect(x, full, end - x, y + height - full);
      pen.fillStyle = pattern;
      pen.fillRect(x, level(reserved[0][most]), end - x, full - level(reserved[0][most]));
    });
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, plot(), y + height);
    pen.clip();
    for (const k of [1, 2, 3]) stroke(pen, k, (s) => reserved[k][s] || NaN, level);
    pen.restore();
    rule(pen, level(header.capacity), "the whole cache", header.capacity.toLocaleString("en"));
    frame(pen, y, height, "token slots", null, 0.7);
    if (highest > ceiling) {
      const words = `off this scale: up to ${highest.toLocaleString("en")}`;
      label(pen, words, GUTTER + plot() - pen.measureText(words).width - 4, y + 20);
    }
    const [top, tall] = SHARE;
    const part = (value) => top + tall - value * tall;
    for (const k of [3, 2, 1, 0]) stroke(pen, k, (s) => share(k, s), part);
    frame(pen, top, tall, "empty", "100 %");
    axis(pen);
    bar();
  }

  function stroke(pen, k, values, level) {
    pen.strokeStyle = colour(LINES[k][0]);
    pen.setLineDash(LINES[k][1]);
    pen.lineWidth = LINES[k][2];
    curve(pen, values, level);
    pen.setLineDash([]);
  }

  function frame(pen, y, height, name, top, where = 0.5) {
    pen.fillStyle = colour("line");
    pen.fillRect(GUTTER, y + height, plot(), 1);
    pen.fillStyle = colour("muted");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(name, GUTTER - 10, y + height * where);
    if (top) pen.fillText(top, GUTTER - 10, y + 4);
    pen.fillText("0", GUTTER - 10, y + height - 3);
  }

  function rule(pen, y, name, value) {
    pen.fillStyle = colour("muted");
    pen.fillRect(GUTTER, Math.round(y), plot(), 1);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(value, GUTTER - 10, Math.max(8, y));
    label(pen, name, GUTTER + 4, y - 2);
  }

  // Words that stand in the chart: what they cover is wiped away. x: left, y: bottom.
  function label(pen, words, x, y) {
    pen.textAlign = "left";
    pen.textBaseline = "bottom";
    pen.fillStyle = colour("panel");
    pen.fillRect(x - 2, y - 13, pen.measureText(words).width + 4, 14);
    pen.fillStyle = colour("muted");
    pen.fillText(words, x, y);
  }

  function axis(pen) {
    const rough = steps / Math.max(2, plot() / 90);
    const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const tick = Math.max(1, [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? 1);
    pen.fillStyle = colour("muted");
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (let s = 0; s <= steps && xOf(s) < GUTTER + plot() - 34; s += tick) {
      pen.fillRect(Math.round(xOf(s)), AXIS - 4, 1, 4);
      pen.fillText(s.toLocaleString("en"), Math.max(xOf(s), GUTTER + 4), AXIS + 4);
    }
    pen.textAlign = "right";
    pen.fillText("step", GUTTER + plot(), AXIS + 4);
  }

  function bar() {
    const wide = bars.parentElement.clientWidth;
    const pen = sharpen(bars, wide, 92);
    const s = cursor.step;
    const counts = empty.subarray(s * size, (s + 1) * size);
    const most = Math.max(1, ...counts);
    const each = wide / size;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (let k = 0; k < size; k++) {
      const tall = (counts[k] / most) * 58;
      pen.fillStyle = colour(k ? "preempted" : "decode");
      pen.fillRect(k * each + 1, 74 - tall, Math.max(1, each - 2), tall);
      pen.fillStyle = colour("muted");
      pen.textBaseline = "bottom";
      if (counts[k] && each > 9) pen.fillText(counts[k], (k + 0.5) * each, 73 - tall);
      pen.textBaseline = "top";
      if (k % Math.max(1, Math.ceil(22 / each)) === 0) pen.fillText(k, (k + 0.5) * each, 78);
    }
    pen.fillStyle = colour("line");
    pen.fillRect(0, 74, wide, 1);
    const total = counts.reduce((sum, n, k) => sum + n * k, 0);
    mark.textContent = running[s] ? "" : "no request is running at the end of this step";
    bars.setAttribute("aria-label", `${count(running[s], "running request")} with ${count(total, "empty slot")} in their last blocks`);
  }

  function now() {
    const s = cursor.step;
    const shared = stored[s] - (reserved[0][s] - wasted[0][s]);
    caption.textContent = `Step ${s}: ${count(running[s], "running request")}, ${count(stored[s], "token slot")}${shared ? `, ${shared.toLocaleString("en")} of them saved by sharing` : ""}`;
    cells.forEach((tds, k) => {
      const texts = [reserved[k][s].toLocaleString("en"), wasted[k][s].toLocaleString("en"), percent(share(k, s)),
        reserved[k][s] > header.capacity ? `${(reserved[k][s] / header.capacity).toFixed(1)}×: no room` : percent(reserved[k][s] / header.capacity)];
      tds.forEach((td, i) => { td.textContent = texts[i]; });
    });
    line.style.left = `${xOf(s)}px`;
    line.style.width = `${Math.max(2, plot() / steps)}px`;
    bar();
  }

  const stepAt = (clientX) => Math.max(0, Math.min(steps - 1, Math.floor(((clientX - canvas.getBoundingClientRect().left - GUTTER) / plot()) * steps)));
  canvas.addEventListener("pointerdown", (event) => {
    cursor.pause();
    cursor.go(stepAt(event.clientX));
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const s = stepAt(event.clientX);
    if (event.buttons) cursor.go(s);
    tooltip.show(event.clientX, event.clientY, h("strong", {}, `step ${s}`), h("dl", { class: "mv-facts" },
      header.schemes.flatMap((name, k) => [h("dt", {}, name), h("dd", {}, `${percent(share(k, s))} of ${reserved[k][s].toLocaleString("en")} empty`)])));
  });
  canvas.addEventListener("pointerleave", () => tooltip.hide());
  canvas.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: cursor.step - far, ArrowRight: cursor.step + far, Home: 0, End: steps - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    cursor.pause();
    cursor.go(to);
    card.say(`step ${cursor.step}: ${header.schemes.map((name, k) => `${name} ${percent(share(k, cursor.step))} empty`).join(", ")}`);
    event.preventDefault();
    event.stopPropagation();
  });

  const end = cursor.on((_, changed) => { if (changed.has("step")) now(); });
  const repaint = () => {
    for (const item of legend) item.swatch.repaint();
    draw();
  };
  context.onTheme(repaint);
  const observer = new ResizeObserver(() => {
    if (chart.clientWidth === width) return;
    width = chart.clientWidth;
    draw();
    now();
  });
  observer.observe(chart);
  width = chart.clientWidth;
  repaint();
  now();
  card.element.waste = { stored, reserved, wasted, running, empty, share };
  return () => {
    end();
    observer.disconnect();
  };
}

function largest(values) {
  let most = 0;
  for (const value of values) most = Math.max(most, value);
  return most;
}
