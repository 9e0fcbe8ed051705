// Colours come from the style sheet, whose variables Python writes from one palette. A view is as dark as the page around it.
import { OWNER_COLOURS } from "./schema.js";

function parse(colour) {
  const numbers = colour.match(/[\d.]+/g);
  return numbers ? numbers.map(Number) : [255, 255, 255, 0];
}

// Whether the page behind an element is dark, by the first background that is not see-through.
export function isDark(element) {
  for (let at = element.parentElement; at; at = at.parentElement) {
    const [r, g, b, alpha = 1] = parse(getComputedStyle(at).backgroundColor);
    if (alpha > 0.5) return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
  }
  return getComputedStyle(document.documentElement).colorScheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches;
}

// Keep data-theme of an element right, and call back when it has changed. Returns a function that ends it.
export function watchTheme(element, onChange) {
  const look = () => {
    const theme = isDark(element) ? "dark" : "light";
    if (element.dataset.theme !== theme) {
      element.dataset.theme = theme;
      onChange(theme);
    }
  };
  const query = matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", look);
  const observer = new MutationObserver(look);
  for (const node of [document.documentElement, document.body]) {
    observer.observe(node, { attributes: true, attributeFilter: ["class", "style", "data-theme", "data-jp-theme-light", "data-jp-theme-name"] });
  }
  look();
  return () => {
    query.removeEventListener("change", look);
    observer.disconnect();
  };
}

// A reader of the palette: colour("ink") is "#rrggbb". Make a new one after a change of theme.
export function palette(element) {
  const style = getComputedStyle(element);
  const cache = new Map();
  return (name) => {
    if (!cache.has(name)) {
      const value = style.getPropertyValue(`--mv-${name}`).trim();
      if (!value && !element.isConnected) return "#000000"; // taken off the page
      if (!value) throw new Error(`the palette has no colour ${name}`);
      cache.set(name, value);
    }
    return cache.get(name);
  };
}

// "#rrggbb" as the number that a Uint32Array over image data holds (little-endian: alpha, blue, green, red).
export function pixel(hex, under = null, share = 1) {
  const n = parseInt(hex.slice(1), 16);
  let [r, g, b] = [n >> 16, (n >> 8) & 255, n & 255];
  if (under !== null) {
    const m = parseInt(under.slice(1), 16);
    r = Math.round(r * share + (m >> 16) * (1 - share));
    g = Math.round(g * share + ((m >> 8) & 255) * (1 - share));
    b = Math.round(b * share + (m & 255) * (1 - share));
  }
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// "#rrggbb" with only a share of it left over another colour: the rule of `palette.tint`.
export function tint(hex, share, under) {
  const below = channels(under);
  return `#${channels(hex).map((value, i) => Math.round(value * share + below[i] * (1 - share)).toString(16).padStart(2, "0")).join("")}`;
}

// Black or white, whichever is easier to read on a colour.
export function readable(hex) {
  const [r, g, b] = channels(hex).map((value) => (value / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
}

// Size a canvas in CSS pixels and give its 2D context, scaled for sharp lines on this screen.
export function sharpen(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// The colour name of a request, by its number in order of arrival: neighbours differ, and every view agrees.
export function ownerColour(number) {
  return `owner-${number % OWNER_COLOURS}`;
}

// Slanted lines in a colour, to fill with.
export function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const x of [-6, 0, 6]) {
    pen.moveTo(x - 1, 7);
    pen.lineTo(x + 7, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
