// Draws lanes: one row per request. Kinds differ in height and texture, not in colour alone.
import { DECODE, FINISHES, lastAtMost, PREEMPTED, PREFILL, STALLED, SWAPPED, WAITING } from "./lanes.js";
import { hatch, pixel } from "./theme.js";

export const COLOURS = ["waiting", "preempted", "swapped", "decode", "prefill", "decode"];
const SHAPES_FROM = 5; // pixels: a lower row has room for colours only

// One bar of a kind, `height` being that of the row. Also draws the legend's swatches.
export function paintBar(context, kind, x, y, width, height, colour, patterns = {}) {
  const tone = colour(COLOURS[kind]);
  context.fillStyle = context.strokeStyle = tone;
  const middle = y + height / 2;
  if (kind === WAITING) {
    context.fillRect(x, middle - 1, width, 2);
  } else if (kind === PREFILL) {
    context.fillRect(x, y + 1, width > 2 ? width - 1 : width, height - 2);
  } else if (kind === DECODE) {
    const thick = Math.max(2, Math.round(height * 0.44));
    context.fillRect(x, Math.round(middle - thick / 2), width, thick);
  } else if (kind === PREEMPTED) {
    context.fillStyle = patterns.hatch ??= hatch(context, tone);
    context.fillRect(x, y + 1, width, height - 2);
    context.fillStyle = tone;
    context.fillRect(x, y + 1, Math.min(2, width), height - 2);
    context.fillRect(x + width - Math.min(1, width), y + 1, Math.min(1, width), height - 2);
  } else if (kind === SWAPPED) {
    const thick = Math.max(1, Math.round(height * 0.16));
    context.fillRect(x, y + 1, width, thick);
    context.fillRect(x, y + height - 1 - thick, width, thick);
    context.fillRect(x, y + 1, Math.min(2, width), height - 2);
  } else {
    const thick = Math.max(4, Math.round(height * 0.44));
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, Math.round(middle - thick / 2) + 0.5, Math.max(1, width - 1), thick - 1);
  }
}

// The sign of an end: stop, length, abort, error.
export function paintEnd(context, kind, x, y, size, colour) {
  const half = size / 2;
  context.fillStyle = context.strokeStyle = colour("finished");
  context.beginPath();
  const name = FINISHES[kind];
  if (name === "stop") context.arc(x, y, half, 0, 7);
  else if (name === "length") context.rect(x - half, y - half, size, size);
  else if (name === "error") {
    context.moveTo(x, y - half);
    context.lineTo(x + half, y + half);
    context.lineTo(x - half, y + half);
  } else {
    context.moveTo(x - half, y - half);
    context.lineTo(x + half, y + half);
    context.moveTo(x + half, y - half);
    context.lineTo(x - half, y + half);
    context.lineWidth = 1.8;
    context.stroke();
    return;
  }
  context.fill();
}

// Paint rows from `top` (in pixels down the list) into a canvas of width x height. `xAt(step)` is where a step begins;
// `from`, `to` are the steps in sight.
export function paintLanes(context, lanes, { width, height, top, rowHeight, xAt, from, to, colour }) {
  context.clearRect(0, 0, width, height);
  if (rowHeight < 1) paintDense(context, lanes, { width, height, top, rowHeight, xAt, from, to, colour });
  else paintRows(context, lanes, { height, top, rowHeight, xAt, from, to, colour });
}

function paintRows(context, lanes, { height, top, rowHeight, xAt, from, to, colour }) {
  const firstRow = Math.max(0, Math.floor(top / rowHeight));
  const lastRow = Math.min(lanes.count, Math.ceil((top + height) / rowHeight));
  const patterns = {};
  const shapes = rowHeight >= SHAPES_FROM;
  const bar = Math.min(rowHeight - (rowHeight >= 8 ? 2 : shapes ? 1 : 0), 22);
  for (let row = firstRow; row < lastRow; row++) {
    const y = row * rowHeight - top + (rowHeight - bar) / 2;
    const [low, high] = [lanes.first[row], lanes.first[row + 1]];
    let painted = -1;
    for (let i = Math.max(low, lastAtMost(lanes.start, from, low, high)); i < high && lanes.start[i] <= to; i++) {
      if (lanes.end[i] <= from) continue;
      const x = xAt(lanes.start[i]);
      const end = xAt(lanes.end[i], lanes.start[i + 1] !== lanes.end[i] || i + 1 === high);
      if (end <= painted && lanes.kind[i] === lanes.kind[i - 1]) continue; // nothing that is not there already
      painted = Math.max(end, x + 1);
      if (shapes) {
        paintBar(context, lanes.kind[i], x, y, Math.max(1, end - x), bar, colour, patterns);
        label(context, lanes, i, x, y, end - x, bar, colour);
      } else {
        context.fillStyle = colour(COLOURS[lanes.kind[i]]);
        context.fillRect(x, y, Math.max(1, end - x), bar);
      }
    }
    if (shapes && lanes.finishKind[row] && lanes.finish[row] >= from - 1 && lanes.finish[row] <= to) {
      const size = Math.min(8, bar - 1);
      paintEnd(context, lanes.finishKind[row], xAt(lanes.finish[row] + 1, true), y + bar / 2, size, colour);
    }
  }
}

function label(context, lanes, i, x, y, width, bar, colour) {
  if (lanes.kind[i] !== PREFILL || bar < 12) return;
  const text = String(lanes.tokens[i]);
  context.font = "10.5px system-ui, sans-serif";
  if (context.measureText(text).width > width - 5) return;
  context.fillStyle = colour("panel");
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x + width / 2 - 0.5, y + bar / 2 + 0.5);
}

// More rows than pixels: each pixel shows the rarest of what its requests do, so that nothing that matters drowns.
const RANK = [1, 6, 5, 4, 3, 2];
const BY_RANK = [null, WAITING, DECODE, PREFILL, STALLED, SWAPPED, PREEMPTED];

function paintDense(context, lanes, { width, height, top, rowHeight, xAt, from, to, colour }) {
  const w = Math.ceil(width);
  const h = Math.ceil(height);
  const ranks = new Uint8Array(w * h);
  for (let row = Math.max(0, Math.floor(top / rowHeight)); row < lanes.count; row++) {
    const y = Math.floor(row * rowHeight - top);
    if (y >= h) break;
    const [low, high] = [lanes.first[row], lanes.first[row + 1]];
    for (let i = Math.max(low, lastAtMost(lanes.start, from, low, high)); i < high && lanes.start[i] <= to; i++) {
      const rank = RANK[lanes.kind[i]];
      const x = Math.max(0, Math.floor(xAt(lanes.start[i])));
      const end = Math.min(w, Math.max(x + 1, Math.floor(xAt(lanes.end[i]))));
      for (let at = y * w + x; at < y * w + end; at++) if (ranks[at] < rank) ranks[at] = rank;
    }
  }
  const image = new ImageData(w, h);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = BY_RANK.map((kind) => (kind === null ? 0 : pixel(colour(COLOURS[kind]))));
  for (let i = 0; i < pixels.length; i++) pixels[i] = colours[ranks[i]];
  const canvas = new OffscreenCanvas(w, h);
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0);
}
