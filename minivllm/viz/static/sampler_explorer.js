// Why this token: the stages of one sampled token under live sliders. All arithmetic is in sampling.js, on all logits.

import { explain, pieces, rowsOf } from "./sampling.js";
import { ownerColour } from "./theme.js";
import { count, h, uniqueId } from "./ui.js";

const ROWS = 12; // tokens told one by one; the others are summed up

const two = (value) => value.toFixed(2);
const SLIDERS = [
  { name: "temperature", from: 0, to: 2, step: 0.01, off: 1, tell: (v) => (v < 1e-5 ? "greedy" : two(v)) },
  { name: "repetition_penalty", from: 0.5, to: 2, step: 0.01, off: 1, tell: two },
  { name: "frequency_penalty", from: -2, to: 2, step: 0.05, off: 0, tell: two },
  { name: "presence_penalty", from: -2, to: 2, step: 0.05, off: 0, tell: two },
  { name: "min_p", from: 0, to: 1, step: 0.005, off: 0, tell: (v) => v.toFixed(3) },
  { name: "top_k", from: 0, to: 200, step: 1, off: 0, tell: String },
  { name: "top_p", from: 0.01, to: 1, step: 0.01, off: 1, tell: two },
];

export function percent(p) {
  if (p === 0) return "0%";
  if (p < 0.0001) return "< 0.01%";
  return `${(100 * p).toFixed(p < 0.1 ? 2 : 1)}%`;
}

// The token of the page, from its parts: logits, grammar mask, texts.
async function readToken(data) {
  const { token } = data.header;
  const planes = await data.part(token.logits);
  const output = Array.from(await data.part(token.output));
  return {
    logits: joinPlanes(planes, token.precision),
    bitmask: token.bitmask === null ? null : await data.part(token.bitmask),
    texts: await data.json(token.texts),
    prompt: Array.from(await data.part(token.prompt)),
    output,
    counter: output.length,
  };
}

// Floats whose first bytes stand together, then their second bytes, and so on: that is how they deflate best.
export function joinPlanes(planes, precision) {
  const width = precision === "float32" ? 4 : 2;
  const n = planes.length / width;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < width; plane++) {
    for (let i = 0; i < n; i++) bytes[i * width + plane] = planes[plane * n + i];
  }
  return width === 4 ? new Float32Array(bytes.buffer) : Float32Array.from(new Uint16Array(bytes.buffer), halfToFloat);
}

function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}

export async function render(card, data, context) {
  const token = await readToken(data);
  const { recorded } = data.header;
  let params = structuredClone(recorded);
  const name = (id) => nameOf(token.texts, id);

  const controls = makeControls(recorded, token.bitmask !== null, (changes) => {
    params = { ...params, ...changes };
    schedule();
  }, () => {
    params = structuredClone(recorded);
    controls.show(params);
    schedule();
  });
  const table = h("div", { class: "mv-odds-scroll", tabindex: 0, role: "region", "aria-label": "probabilities after each stage" });
  const strip = h("div", { class: "mv-draw" });
  const verdict = h("p", { class: "mv-verdict" });
  const { pictures } = data.header;
  const shown = pictures.map((src, i) => h("img", { src, alt: pictures.length > 1 ? `picture ${i + 1} of the prompt` : "the picture of the prompt" }));
  const seen = shown.length ? h("div", { class: "mv-pictures" }, shown) : null;
  card.body.append(h("div", { class: "mv-explorer" }, controls.element, h("div", { class: "mv-explained" }, seen, verdict, table, strip)));

  let due = 0;
  const schedule = () => {
    if (!due) due = requestAnimationFrame(show);
  };
  const show = () => {
    due = 0;
    const explained = explain(token, params);
    const rows = rowsOf(explained, ROWS);
    verdict.replaceChildren(...tellVerdict(explained, name));
    const colours = new Map(rows.map((id, i) => [id, context.colour(ownerColour(i))]));
    table.replaceChildren(makeTable(explained, rows, name, colours));
    strip.replaceChildren(...makeStrip(explained, colours, name, strip.clientWidth || 600));
    card.say(summary(explained, name));
    card.element.dataset.token = explained.token_id; // for tests and style sheets
  };
  controls.show(params);
  show();
  context.onTheme(show);
  return () => cancelAnimationFrame(due);
}

function nameOf(texts, id) {
  const text = texts[id];
  return text === undefined || text === "" ? `#${id}` : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// ---- sliders ---------------------------------------------------------------------------------------------------------

function makeControls(recorded, hasGrammar, change, reset) {
  const shows = [];
  const rows = SLIDERS.map((spec) => {
    const id = uniqueId(spec.name);
    const to = Math.max(spec.to, recorded[spec.name] ?? 0);
    const input = h("input", { id, type: "range", class: "mv-slider", min: Math.min(spec.from, recorded[spec.name]), max: to, step: spec.step,
      oninput: () => { change({ [spec.name]: Number(input.value) }); tell(Number(input.value)); } });
    const value = h("output", { for: id, class: "mv-knob-value" });
    const row = h("div", { class: "mv-knob" }, h("label", { for: id }, spec.name), value, input);
    const tell = (number) => {
      const off = number === spec.off;
      value.textContent = off ? "off" : spec.tell(number);
      input.setAttribute("aria-valuetext", value.textContent);
      row.classList.toggle("mv-off", off);
    };
    shows.push((params) => { input.value = params[spec.name]; tell(params[spec.name]); });
    return row;
  });
  if (hasGrammar) {
    const id = uniqueId("grammar");
    const box = h("input", { id, type: "checkbox", onchange: () => change({ grammar: box.checked }) });
    shows.push((params) => { box.checked = params.grammar !== false; });
    rows.unshift(h("div", { class: "mv-knob mv-knob-check" }, box, h("label", { for: id }, "grammar")));
  }
  const id = uniqueId("seed");
  const seed = h("input", { id, type: "text", inputmode: "numeric", class: "mv-seed", spellcheck: "false", size: 21,
    oninput: () => {
      const good = /^-?\d{1,20}$/.test(seed.value.trim());
      seed.setAttribute("aria-invalid", good ? "false" : "true");
      if (good) change({ seed: seed.value.trim() });
    } });
  shows.push((params) => { seed.value = params.seed; seed.setAttribute("aria-invalid", "false"); });
  const again = () => {
    const next = String(BigInt.asUintN(64, BigInt(seed.value.trim().match(/^-?\d+$/) ? seed.value.trim() : 0) + 1n));
    seed.value = next;
    change({ seed: next });
  };
  const element = h("div", { class: "mv-knobs", role: "group", "aria-label": "sampling parameters" }, ...rows,
    h("div", { class: "mv-knob mv-seed-row" }, h("label", { for: id }, "seed"), seed),
    h("div", { class: "mv-knob-buttons" },
      h("button", { type: "button", class: "mv-button", onclick: again, title: "the next seed" }, "draw again"),
      h("button", { type: "button", class: "mv-button", onclick: reset, title: "the parameters that the token was sampled with" }, "as recorded")));
  return { element, show: (params) => shows.forEach((each) => each(params)) };
}

// ---- the table: a row a token, a column a stage -----------------------------------------------------------------------

function makeTable(explained, rows, name, colours) {
  const { stages } = explained;
  const scale = stages.map((stage) => Math.max(...rows.map((id) => stage.probabilities[id]), 1e-12));
  const head = h("tr", {}, h("th", { scope: "col" }, "token"), stages.map((stage) => h("th", { scope: "col" }, stage.name,
    h("span", { class: "mv-kept" }, count(stage.kept, "token")))));
  const body = rows.map((id) => {
    const out = stages.findIndex((stage) => stage.probabilities[id] === 0);
    const cells = stages.map((stage, at) => cell(stage.probabilities[id], scale[at], out >= 0 && at >= out, at === out));
    const chosen = id === explained.token_id;
    return h("tr", { class: chosen ? "mv-chosen" : out >= 0 ? "mv-out" : null },
      h("th", { scope: "row", title: `token ${id}` }, h("span", { class: "mv-dot", style: out >= 0 ? null : `background:${colours.get(id)}`, "aria-hidden": "true" }),
        chosen ? h("span", {}, "▶\u00a0", h("span", { class: "mv-live" }, "chosen: ")) : null, name(id)), cells);
  });
  const others = stages.map((stage) => rows.reduce((rest, id) => rest - stage.probabilities[id], 1));
  const listed = stages.map((stage) => rows.filter((id) => stage.probabilities[id] > 0).length);
  const rest = h("tr", { class: "mv-rest" }, h("th", { scope: "row" }, "all others"), stages.map((stage, at) => {
    const n = stage.kept - listed[at];
    return h("td", { title: count(n, "token") }, n > 0 ? percent(Math.max(0, others[at])) : "–");
  }));
  return h("table", { class: "mv-odds" }, h("thead", {}, head), h("tbody", {}, body, rest));
}

function cell(p, most, out, first) {
  if (out) return h("td", { class: "mv-gone" }, first ? [h("span", { "aria-hidden": "true" }, "✕"), h("span", { class: "mv-live" }, "removed")] : "");
  return h("td", {}, h("span", { class: "mv-odds-bar", style: `width:${((100 * p) / most).toFixed(2)}%`, "aria-hidden": "true" }), h("span", {}, percent(p)));
}

// ---- the draw --------------------------------------------------------------------------------------------------------

const LETTER = 7.5; // pixels that a letter of a label takes, at most

function makeStrip(explained, colours, name, width) {
  if (explained.token_id < 0 || explained.u === null) return [];
  const bars = pieces(explained.probabilities, [...colours.keys()]).map(({ id, start, end }) => {
    const label = id === null ? "others" : name(id);
    const chosen = id !== null && id === explained.token_id;
    return h("span", { class: `mv-piece${chosen ? " mv-chosen" : ""}${id === null ? " mv-other" : ""}`, title: `${label}: ${percent(end - start)}`,
      style: `left:${100 * start}%;width:${100 * (end - start)}%;${id === null ? "" : `background:${colours.get(id)}`}` },
    (end - start) * width > LETTER * label.length + 18 ? h("span", {}, label) : null);
  });
  const at = 100 * explained.u;
  const side = at > 60 ? "mv-left" : "";
  return [
    h("p", { class: "mv-draw-title" }, "The draw: every surviving token has a piece of [0, 1), in the order of the token ids; a random number picks one."),
    h("div", { class: "mv-draw-line", role: "img", "aria-label": `u = ${explained.u.toFixed(4)} falls on ${name(explained.token_id)}` }, h("span", { class: "mv-pieces" }, bars),
      h("span", { class: `mv-needle ${side}`, style: `left:${at}%` }, h("span", {}, `u = ${explained.u.toFixed(4)}`))),
    h("div", { class: "mv-scale", "aria-hidden": "true" }, h("span", {}, "0"), h("span", {}, "1")),
  ];
}

// ---- words -----------------------------------------------------------------------------------------------------------

function tellVerdict(explained, name) {
  if (explained.token_id < 0) return ["No token can be drawn: every logit is −∞, or one is not a number."];
  const last = explained.stages[explained.stages.length - 1];
  const p = explained.probabilities[explained.token_id];
  const how = explained.u === null ? "the likeliest of" : `drawn with ${percent(p)} from`;
  return [h("strong", { class: "mv-token" }, name(explained.token_id)), ` is ${how} ${count(last.kept, "token")}`];
}

function summary(explained, name) {
  if (explained.token_id < 0) return "No token can be drawn.";
  const kept = explained.stages.map((stage) => `${stage.name} ${stage.kept}`).join(", ");
  return `Tokens left after each stage: ${kept}. Chosen: ${name(explained.token_id)}, ${percent(explained.probabilities[explained.token_id])}.`;
}
