// What every view is made of: a card with title, player, legend, tooltip and a live region for screen readers.

// h("div", { class: "x", onclick: f, hidden: true }, "text", node): an element.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (tag === "input" || tag === "select") element.setAttribute("data-lm-suppress-shortcuts", "true"); // JupyterLab has its own use for arrow keys
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function count(n, noun, plural = `${noun}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? noun : plural}`;
}

// A length of time as people write it: `_seconds` in timeline.py.
export function duration(seconds) {
  for (const [least, name, size] of [[3600, "h", 3600], [60, "min", 60], [1, "s", 1], [1e-3, "ms", 1e-3]]) {
    const value = seconds / size;
    if (seconds >= least) return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${name}`;
  }
  return seconds ? `${Math.round(seconds * 1e6)} µs` : "0 s";
}

let serial = 0;
export const uniqueId = (stem) => `mv-${stem}-${++serial}`;

const ICONS = {
  first: "M4 3v10M13 3 6 8l7 5z",
  back: "M11 3 4 8l7 5z",
  play: "M4 2.5 13 8l-9 5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  next: "M5 3l7 5-7 5z",
  last: "M12 3v10M3 3l7 5-7 5z",
};

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function button(label, iconName, onclick, extra = {}) {
  return h("button", { type: "button", class: "mv-button", "aria-label": label, title: label, onclick, ...extra }, iconName ? icon(iconName) : label);
}

const SPEEDS = [1, 2, 5, 10, 30, 100];

// Buttons, slider and speed for a cursor. `describe(step)` gives the slider's words, say "step 12".
export function makePlayer(cursor, describe = (step) => `step ${step}`) {
  const one = cursor.steps < 2;
  const off = one ? { disabled: true } : {};
  const slider = h("input", { type: "range", class: "mv-slider", min: 0, max: Math.max(0, cursor.steps - 1), step: 1, "aria-label": "step", ...off,
    oninput: () => { cursor.pause(); cursor.go(Number(slider.value)); } });
  const playButton = button("play", "play", () => cursor.toggle(), off);
  const readout = h("output", { class: "mv-readout" });
  const speed = h("select", { class: "mv-select", "aria-label": "speed, in steps a second", title: "steps a second", ...off,
    onchange: () => cursor.set({ speed: Number(speed.value) }) }, SPEEDS.map((n) => h("option", { value: n }, `${n}/s`)));
  const bar = h("div", { class: "mv-player", role: "group", "aria-label": "steps" },
    button("first step", "first", () => { cursor.pause(); cursor.go(0); }, off),
    button("step back", "back", () => { cursor.pause(); cursor.move(-1); }, off),
    playButton,
    button("step forward", "next", () => { cursor.pause(); cursor.move(1); }, off),
    button("last step", "last", () => { cursor.pause(); cursor.go(cursor.steps - 1); }, off),
    slider, readout, speed);
  const show = () => {
    slider.value = cursor.step;
    slider.setAttribute("aria-valuetext", describe(cursor.step));
    readout.textContent = `step ${cursor.step} of ${cursor.steps - 1}`;
    playButton.replaceChildren(icon(cursor.playing ? "pause" : "play"));
    playButton.setAttribute("aria-label", cursor.playing ? "pause" : "play");
    playButton.title = cursor.playing ? "pause" : "play";
    if (SPEEDS.includes(cursor.speed)) speed.value = cursor.speed;
  };
  const stop = cursor.on(show);
  show();
  return { element: bar, destroy: stop };
}

// Keys that work anywhere in a card, unless a control has its own use for them.
export function stepKeys(element, cursor) {
  element.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea, [contenteditable]")) return;
    const actions = {
      ",": () => { cursor.pause(); cursor.move(-1); },
      ".": () => { cursor.pause(); cursor.move(1); },
      "<": () => { cursor.pause(); cursor.move(-10); },
      ">": () => { cursor.pause(); cursor.move(10); },
      " ": () => { if (!event.target.closest("button, a, summary")) cursor.toggle(); else return true; },
    };
    if (event.key in actions && !actions[event.key]()) {
      event.preventDefault();
      event.stopPropagation(); // a notebook has its own use for keys
    }
  });
}

// A floating box near the pointer, inside the card, that never leaves it.
export function makeTooltip(card) {
  const box = h("div", { class: "mv-tooltip", role: "tooltip", hidden: true });
  card.append(box);
  return {
    element: box,
    show(clientX, clientY, ...content) {
      box.replaceChildren(...content.flat());
      box.hidden = false;
      const frame = card.getBoundingClientRect();
      const size = box.getBoundingClientRect();
      const x = clientX - frame.left;
      const y = clientY - frame.top;
      const right = x + 16 + size.width > frame.width ? x - size.width - 12 : x + 16;
      const below = clientY + 18 + size.height > innerHeight ? y - size.height - 12 : y + 18;
      box.style.left = `${Math.max(4, Math.min(right, frame.width - size.width - 4))}px`;
      box.style.top = `${Math.max(4, below)}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
}

// rows of [name, value] as a small table, for tooltips and details.
export function facts(rows) {
  return h("dl", { class: "mv-facts" }, rows.filter((row) => row && row[1] !== null && row[1] !== undefined && row[1] !== "")
    .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

// A legend: items are { label, swatch: node (say a small canvas), value: text or null, title }. `update(values)` changes the values.
export function makeLegend(items) {
  const values = items.map(() => h("span", { class: "mv-legend-value" }));
  const element = h("ul", { class: "mv-legend", "aria-label": "legend" }, items.map((item, i) => {
    values[i].textContent = item.value ?? "";
    return h("li", { title: item.title ?? null }, item.swatch, h("span", {}, item.label), values[i]);
  }));
  return { element, update: (texts) => texts.forEach((text, i) => { if (values[i].textContent !== text) values[i].textContent = text; }) };
}

// A legend's swatch: a small canvas that `paint(context, width, height)` fills, again whenever the theme changes.
export function swatch(width, height, paint) {
  const canvas = h("canvas", { class: "mv-swatch", "aria-hidden": "true" });
  const ratio = globalThis.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.repaint = () => {
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    paint(context, width, height);
  };
  return canvas;
}

// The frame around a view. In a page of several views the page has the player, and each card goes without.
export function makeCard(place, header, cursor, { player = true } = {}) {
  const title = h("h2", { class: "mv-title", id: uniqueId("title") }, header.title);
  const subtitle = h("p", { class: "mv-subtitle" }, header.subtitle ?? "");
  const tools = h("div", { class: "mv-tools" });
  const live = h("div", { class: "mv-live", "aria-live": "polite", role: "status" });
  const body = h("div", { class: "mv-body" });
  const card = h("section", { class: `mv-card mv-${header.module.replaceAll("_", "-")}`, "aria-labelledby": title.id });
  card.append(h("header", { class: "mv-head" }, h("div", {}, title, subtitle), tools));
  let stop = () => {};
  if (player && cursor) {
    const bar = makePlayer(cursor);
    stop = bar.destroy;
    card.append(bar.element);
  }
  if (cursor) stepKeys(card, cursor);
  if (header.note) card.append(h("p", { class: "mv-note" }, header.note));
  card.append(body, live);
  place.append(card);
  let pending = null;
  return {
    element: card,
    body,
    tools,
    subtitle,
    // Words for a screen reader, a little later, so that a fast series says only its last.
    say(text) {
      clearTimeout(pending);
      pending = setTimeout(() => { live.textContent = text; }, 250);
    },
    destroy() {
      clearTimeout(pending);
      stop();
      card.remove();
    },
  };
}

// A function that asks for `paint` before the next frame, once however often it is called.
export function onceAFrame(paint) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      paint();
    });
  };
}
