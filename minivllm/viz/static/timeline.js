// Requests by steps or seconds, the token budget and the queues beneath.
import { readLanes } from "./lanes.js";
import { Axis, axisTools, legendItems, makeLanesChart, reasonItems } from "./lanes_chart.js";
import { button, count, h, makeLegend } from "./ui.js";

export async function render(card, data, context) {
  const { cursor } = context;
  const lanes = await readLanes(data, data.header.lanes);
  const axis = new Axis([lanes]);
  card.subtitle.textContent = `${count(lanes.count, "request")}, ${count(lanes.steps, "step")}, ${lanes.time[lanes.steps].toPrecision(3)} s, policy ${lanes.about.policy}`;
  const legend = legendItems([lanes], (name) => context.colour(name));
  const waits = reasonItems([lanes], (name) => context.colour(name));
  const repaint = () => [...legend, ...waits].forEach((item) => item.swatch.repaint());
  const detail = h("p", { class: "mv-lanes-detail" });
  const chart = makeLanesChart(card, context, lanes, axis, {
    label: "requests by steps. Left and right: step; up and down: request; plus and minus: zoom; square brackets: pan; 0: whole run; Escape: no request",
    select: () => { if (fold) fold.setAttribute("aria-pressed", String(!chart.isFit())); },
  });
  card.body.append(makeLegend(legend).element, chart.element, detail);
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
    detail.textContent = row < 0
      ? `Step ${step}: ${tokens}${lanes.budget ? ` of ${lanes.budget}` : ""} tokens (${lanes.prefill[step]} prefill, ${lanes.decode[step]} decode), ${lanes.running[step]} running, ${lanes.waiting[step]} waiting. Click a row for its story.`
      : `Step ${step}, request ${lanes.ids[row]}: ${lanes.describe(row, step)}.`;
    card.say(detail.textContent);
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
