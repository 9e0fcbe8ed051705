// Two runs of the same requests on one cursor, and the first step in which they decided differently.
import { Axis, axisTools, legendItems, makeLanesChart, readLanes, reasonItems } from "./timeline.js";
import { button, count, duration, h, makeLegend } from "./ui.js";

export async function render(card, data, context) {
  const { cursor } = context;
  const { header } = data;
  const runs = await Promise.all(header.lanes.map((about) => readLanes(data, about)));
  const axis = new Axis(runs);
  const colour = (name) => context.colour(name);
  const legend = legendItems(runs, colour);
  const waits = reasonItems(runs, colour);
  const repaint = () => [...legend, ...waits].forEach((item) => item.swatch.repaint());
  const first = header.difference;
  card.subtitle.textContent = first ? `first different decision in step ${first.step}` : "all decisions are the same";
  card.body.append(makeLegend(legend).element);

  const charts = runs.map((lanes, i) => makeLanesChart(card, context, lanes, axis, {
    most: 300,
    label: `${header.names[i]}: requests by steps. Left and right: step; up and down: request; plus and minus: zoom; square brackets: pan; 0: whole run`,
  }));
  const marks = charts.map(() => h("div", { class: "mv-compare-mark", hidden: true }, h("span", {}, "first difference")));
  const details = charts.map(() => h("p", { class: "mv-lanes-detail" }));
  const pair = h("div", { class: "mv-compare-pair" }, charts.map((chart, i) => {
    chart.element.append(marks[i]);
    const lanes = runs[i];
    return h("div", { class: "mv-compare-run" },
      h("p", { class: "mv-compare-name" }, h("strong", {}, header.names[i]), h("span", { class: "mv-muted" }, ` ${count(lanes.steps, "step")}, ${duration(lanes.time[lanes.steps])}`)),
      chart.element, details[i]);
  }));
  const words = explain();
  card.body.append(words, pair);
  if (waits.length) card.body.append(h("div", { class: "mv-lanes-waits" }, h("span", { class: "mv-muted" }, "the first in the queue waits for"), makeLegend(waits).element));
  const differing = h("p", { class: "mv-lanes-detail mv-muted" });
  card.body.append(differing);
  card.tools.append(...axisTools(axis, () => axis.at(runs[0], Math.min(cursor.step, runs[0].steps - 1))));

  function goThere() {
    cursor.pause();
    cursor.go(first.step);
    const name = first.reasons[0]?.[0];
    if (name !== undefined) cursor.set({ request: name });
    charts.forEach((chart) => chart.reveal());
  }

  // The first difference in words.
  function explain() {
    if (!first) return h("p", { class: "mv-note" }, "The two runs decided the same in every step.");
    const box = h("div", { class: "mv-compare-words" },
      h("p", {}, h("strong", {}, `First different decision: step ${first.step}. `),
        first.over[0] || first.over[1] ? `${header.names[first.over[0] ? 0 : 1]} was over by then. ` : "",
        first.orders ? "The same tokens, in another order: who comes first keeps its blocks longest. " : "",
        button("go there", null, goThere)));
    if (first.reasons.length) {
      box.append(h("table", { class: "mv-table" },
        h("thead", {}, h("tr", {}, ["request", ...header.names].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, first.reasons.map(([name, a, b]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, a), h("td", {}, b))))));
    } else if (first.orders) {
      box.append(h("p", { class: "mv-muted" }, header.names.map((name, i) => `${name}: ${first.orders[i].join(", ")}`).join("  |  ")));
    }
    return box;
  }

  function place() {
    if (!first) return;
    marks.forEach((mark, i) => {
      const x = charts[i].xOf(axis.at(runs[i], Math.min(first.step, runs[i].steps)));
      const seen = charts[i].inSight(x);
      mark.hidden = !seen;
      mark.style.left = `${x}px`;
      mark.classList.toggle("mv-compare-left", x > charts[i].element.clientWidth - 110);
    });
  }

  function differ(step) {
    const names = [];
    for (let row = 0; row < runs[0].count; row++) {
      const kinds = runs.map((lanes) => {
        const i = step < lanes.steps ? lanes.span(row, step) : -1;
        return i < 0 ? -1 : lanes.kind[i] * 1e6 + (lanes.tokens[i] ?? 0);
      });
      if (kinds[0] !== kinds[1]) names.push(runs[0].names[row]);
    }
    return names;
  }

  function tell() {
    const row = cursor.request === null ? -1 : runs[0].ids.lastIndexOf(cursor.request);
    runs.forEach((lanes, i) => {
      const step = cursor.step;
      if (step >= lanes.steps) details[i].textContent = `Step ${step}: this run was over after step ${lanes.steps - 1}.`;
      else if (row >= 0) details[i].textContent = `Step ${step}, request ${lanes.names[row]}: ${lanes.describe(row, step)}.`;
      else details[i].textContent = `Step ${step}: ${lanes.prefill[step] + lanes.decode[step]} tokens, ${lanes.running[step]} running, ${lanes.waiting[step]} waiting.`;
    });
    const names = differ(cursor.step);
    differing.textContent = names.length === 0 ? `In step ${cursor.step} every request stands the same in both runs.`
      : `In step ${cursor.step}, ${count(names.length, "request")} ${names.length === 1 ? "stands" : "stand"} differently: ${names.slice(0, 8).join(", ")}${names.length > 8 ? ", …" : "."}`;
    card.say([...details.map((p, i) => `${header.names[i]}. ${p.textContent}`), differing.textContent].join(" "));
  }

  charts.forEach((chart, i) => chart.pane.addEventListener("scroll", () => {
    const other = charts[1 - i].pane;
    if (other.scrollTop !== chart.pane.scrollTop) other.scrollTop = chart.pane.scrollTop;
  }));
  const end = cursor.on((_, changed) => { if (changed.has("step") || changed.has("request")) tell(); });
  axis.listeners.add(place);
  const observer = new ResizeObserver(place);
  charts.forEach((chart) => observer.observe(chart.element));
  context.onTheme(repaint);
  repaint();
  tell();
  charts.forEach((chart) => chart.layout());
  place();
  card.element.compare = { runs, axis, charts, differ };
  return () => {
    end();
    observer.disconnect();
    charts.forEach((chart) => chart.destroy());
  };
}
