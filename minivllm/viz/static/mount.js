// Puts a view on the page: from the text of a saved page, or from a live widget.
import { cursorFor, tie } from "./cursor.js";
import { Data, fromBase64 } from "./data.js";
import { palette, watchTheme } from "./theme.js";
import { h, makeCard, makePlayer, stepKeys } from "./ui.js";

// A message in place of a view: an empty trace, a broken file.
function showProblem(place, header) {
  place.append(h("section", { class: "mv-card mv-problem", role: "note", "aria-label": header.title },
    h("h2", { class: "mv-title" }, header.title), h("p", {}, header.problem)));
}

// Show the view of `header` inside `place`. Returns a function that takes it away.
//   context.load(name)   a promise of another module of the page
//   context.model        the anywidget model, or null in a page without a kernel
//   context.player       false where the page around has a player
export async function mountView(place, header, bytes, context) {
  if (header.problem) {
    showProblem(place, header);
    return () => place.replaceChildren();
  }
  if (header.views) return renderPage(place, new Data(header, bytes), context);
  const cursor = header.trace ? cursorFor(header.trace) : null;
  const ties = (header.trace?.of ?? []).map((trace) => tie(cursor, cursorFor(trace)));
  const card = makeCard(place, header, cursor, context);
  const themed = new Set();
  const inner = {
    ...context,
    cursor,
    colour: palette(card.element), // colour("ink") is "#rrggbb", of the theme of the moment
    onTheme: (listener) => themed.add(listener), // called after a change of theme: paint again
  };
  const endTheme = watchTheme(card.element, () => {
    inner.colour = palette(card.element);
    for (const listener of themed) listener();
  });
  inner.colour = palette(card.element);
  const module = await context.load(header.module);
  const end = await module.render(card, new Data(header, bytes), inner);
  card.element.dataset.ready = "";
  return () => {
    if (typeof end === "function") end();
    endTheme();
    for (const untie of ties) untie();
    card.destroy();
  };
}

// Several views, each with a card of its own: one player at the top for all of the same trace.
async function renderPage(place, data, context) {
  const { header, bytes } = data;
  const page = h("div", { class: "mv-page" });
  const ends = [];
  place.append(page);
  ends.push(watchTheme(page, () => {}));
  if (header.trace) {
    const cursor = cursorFor(header.trace);
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

// A view whose header and bytes stand in script elements of the page.
export async function mountPage(place, load) {
  const header = JSON.parse(place.querySelector("script.mv-header").textContent);
  const bytes = fromBase64(place.querySelector("script.mv-bytes").textContent);
  place.querySelector(".mv-text")?.remove();
  await mountView(place, header, bytes, { load, model: null, player: true });
}

// A view of a live kernel. Its step, request and block follow the cursor, both ways; new data is shown when it comes.
export async function mountWidget(model, element, load) {
  element.classList.add("mv");
  let end = () => {};
  let unlink = () => {};
  let gone = false; // perhaps while a view is still being made
  const leave = () => {
    gone = true;
    end();
    unlink();
    end = unlink = () => {};
  };
  const show = async () => {
    end();
    unlink();
    const header = JSON.parse(model.get("header"));
    const raw = model.get("payload");
    end = await mountView(element, header, new Uint8Array(raw.buffer, raw.byteOffset, raw.byteLength), { load, model, player: true });
    if (gone) return leave();
    unlink = header.trace && !header.problem ? link(model, cursorFor(header.trace)) : () => {};
  };
  model.on("change:header", show);
  model.on("destroy", leave); // the kernel closed it: its cell has run again
  await show();
  return () => {
    model.off("change:header", show);
    model.off("destroy", leave);
    leave();
  };
}

function link(model, cursor) {
  let timer = null;
  const tell = () => {
    timer = null;
    model.set("step", cursor.step);
    model.set("request", cursor.request ?? "");
    model.set("block", cursor.block === null || cursor.block.pool !== "gpu" ? -1 : cursor.block.id);
    model.save_changes();
  };
  const hear = () => {
    if (timer === null) cursor.go(model.get("step"));
  };
  const hearRequest = () => {
    if (timer === null) cursor.set({ request: model.get("request") || null });
  };
  const hearBlock = () => {
    const id = model.get("block");
    if (timer === null && (cursor.block?.id ?? -1) !== id) cursor.set({ block: id < 0 ? null : { pool: "gpu", id } });
  };
  if (cursor.moved) tell();
  else hear();
  const stop = cursor.on((_, changed) => {
    if (timer === null && (changed.has("step") || changed.has("request") || changed.has("block"))) timer = setTimeout(tell, 100);
  });
  model.on("change:step", hear);
  model.on("change:request", hearRequest);
  model.on("change:block", hearBlock);
  return () => {
    clearTimeout(timer);
    stop();
    model.off("change:step", hear);
    model.off("change:request", hearRequest);
    model.off("change:block", hearBlock);
  };
}
