// Several views on one page: one player at the top for all of the same trace.
import { cursorFor } from "./cursor.js";
import { mountView } from "./mount.js";
import { watchTheme } from "./theme.js";
import { h, makePlayer, stepKeys } from "./ui.js";

export async function render(place, data, context) {
  const { header, bytes } = data;
  const page = h("div", { class: "mv-page" });
  const ends = [];
  place.append(page);
  ends.push(watchTheme(page, () => {}));
  if (header.trace) {
    const cursor = cursorFor(header.trace.key, header.trace.steps);
    const player = makePlayer(cursor);
    page.append(h("div", { class: "mv-bar" }, player.element));
    stepKeys(page.firstChild, cursor);
    ends.push(player.destroy);
  }
  const grid = h("div", { class: "mv-page-grid" });
  page.append(grid);
  for (const part of header.views) {
    const cell = h("div", { class: part.wide ? "mv-cell mv-cell-wide" : "mv-cell" });
    grid.append(cell);
    ends.push(await mountView(cell, part, bytes, { ...context, player: !header.trace }));
  }
  return () => {
    for (const end of ends) end();
    page.remove();
  };
}
