// A grid of blocks on a canvas. Each look is a stamp of whole pixels, so a step costs only the blocks that changed.
import { pixel } from "./theme.js";

export const Look = { FREE: 0, USED: 1, SHARED: 2, CACHED: 3, NULL: 4, ELSEWHERE: 5, STATE: 6 };
const GHOST = 0.28; // how much is left of the colour of blocks that are not looked at
const LOOKS = Object.keys(Look).length;

// Which pixels of a square of `n` have the look's colour: used is full, shared has a hole, cached is an outline,
// free is a dot, the null block a cross, a block of another group two corners, a state a disc. With tokens of pictures and
// the like (`media`) the lower right corner is missing; the upper left one, if the content came from elsewhere (`fetched`).
export function mask(look, n, media = false, fetched = false) {
  const bits = new Uint8Array(n * n);
  const set = (inside) => {
    for (let y = 0; y < n; y++) for (let x = 0; x < n; x++) if (inside(x, y)) bits[y * n + x] = 1;
  };
  const dot = Math.max(1, Math.round(n / 5) + ((n - Math.round(n / 5)) % 2));
  const hole = Math.max(1, Math.round(n * 0.38) + ((n - Math.round(n * 0.38)) % 2));
  const line = Math.max(1, Math.round(n / 11));
  const centred = (size) => (x, y) => x >= (n - size) / 2 && x < (n + size) / 2 && y >= (n - size) / 2 && y < (n + size) / 2;
  if (look === Look.USED) set(() => true);
  else if (look === Look.SHARED) set((x, y) => !centred(hole)(x, y));
  else if (look === Look.CACHED) set((x, y) => x < line || y < line || x >= n - line || y >= n - line);
  else if (look === Look.FREE) set(centred(dot));
  else if (look === Look.NULL) set((x, y) => Math.abs(x - y) < line || Math.abs(n - 1 - x - y) < line);
  else if (look === Look.STATE) set((x, y) => (2 * x + 1 - n) ** 2 + (2 * y + 1 - n) ** 2 <= n * n);
  else if (look === Look.ELSEWHERE) set((x, y) => (x < line || y < line) && x + y < n / 2);
  if (media) for (let y = 0; y < n; y++) for (let x = 0; x < n; x++) if (x + y > 1.45 * n) bits[y * n + x] = 0;
  if (fetched) for (let y = 0; y < n; y++) for (let x = 0; x < n; x++) if (x + y < 0.42 * n) bits[y * n + x] = 0;
  return bits;
}

export class Grid {
  // The blocks of the list `shown` in `columns`, each `cell` CSS pixels wide, of a pool of `total`.
  constructor(canvas, shown, total, columns, cell) {
    this.canvas = canvas;
    this.shown = shown;
    this.count = shown.length;
    this.place = new Int32Array(total).fill(-1); // block -> where it stands in the list
    shown.forEach((block, i) => { this.place[block] = i; });
    const { count } = this;
    this.columns = columns;
    this.cell = cell;
    this.rows = Math.ceil(count / columns);
    const ratio = globalThis.devicePixelRatio || 1;
    this.pitch = Math.max(3, Math.round(cell * ratio));
    this.inner = this.pitch - Math.max(1, Math.round((cell >= 9 ? 2 : 1) * Math.min(ratio, cell / 3)));
    canvas.width = this.columns * this.pitch;
    canvas.height = this.rows * this.pitch;
    canvas.style.width = `${canvas.width / ratio}px`;
    canvas.style.height = `${canvas.height / ratio}px`;
    this.cell = this.pitch / ratio;
    this.context = canvas.getContext("2d");
    this.image = this.context.createImageData(canvas.width, canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    const marks = [[false, false], [true, false], [false, true], [true, true]];
    this.masks = marks.flatMap(([media, fetched]) => Object.values(Look).map((look) => mask(look, this.inner, media, fetched)));
    this.stamps = new Map();
  }

  // Forget the colours of the theme before.
  setColours(colour) {
    this.colour = colour;
    this.paper = pixel(colour("panel"));
    this.stamps.clear();
    this.pixels.fill(this.paper);
  }

  stamp(look, name, ghost) {
    const key = `${look} ${name} ${ghost}`;
    let stamp = this.stamps.get(key);
    if (!stamp) {
      const ink = ghost ? pixel(this.colour(name), this.colour("panel"), GHOST) : pixel(this.colour(name));
      stamp = Uint32Array.from(this.masks[look], (bit) => (bit ? ink : this.paper));
      this.stamps.set(key, stamp);
    }
    return stamp;
  }

  // Paint one block into the image; `show` puts it on the screen. media, fetched: see `mask`.
  paint(block, look, name, ghost, media = false, fetched = false) {
    const place = this.place[block];
    if (place < 0) return;
    const stamp = this.stamp(look + LOOKS * (media + 2 * fetched), name, ghost);
    const { inner, pitch } = this;
    const width = this.columns * pitch;
    let to = Math.floor(place / this.columns) * pitch * width + (place % this.columns) * pitch;
    for (let y = 0, from = 0; y < inner; y++, to += width, from += inner) {
      for (let x = 0; x < inner; x++) this.pixels[to + x] = stamp[from + x];
    }
  }

  // Put rows of blocks on the screen.
  show(firstRow = 0, lastRow = this.rows - 1) {
    const { pitch } = this;
    this.context.putImageData(this.image, 0, 0, 0, firstRow * pitch, this.canvas.width, (lastRow - firstRow + 1) * pitch);
  }

  // Put some blocks on the screen: one by one where they are few, else the rows that they lie in.
  showBlocks(blocks) {
    const { pitch, columns } = this;
    const places = blocks.map((block) => this.place[block]).filter((place) => place >= 0);
    if (places.length <= 200) {
      for (const block of places) {
        this.context.putImageData(this.image, 0, 0, (block % columns) * pitch, Math.floor(block / columns) * pitch, pitch, pitch);
      }
      return;
    }
    let first = this.count;
    let last = 0;
    for (const block of places) {
      if (block < first) first = block;
      if (block > last) last = block;
    }
    this.show(Math.floor(first / columns), Math.floor(last / columns));
  }

  // The block at a point of the canvas in CSS pixels, or -1.
  at(x, y) {
    const column = Math.floor(x / this.cell);
    const row = Math.floor(y / this.cell);
    if (column < 0 || column >= this.columns || row < 0) return -1;
    return this.shown[row * this.columns + column] ?? -1;
  }

  // The middle of a block in CSS pixels.
  centre(block) {
    const half = this.inner / this.pitch / 2;
    const place = this.place[block];
    return [((place % this.columns) + half) * this.cell, (Math.floor(place / this.columns) + half) * this.cell];
  }
}

// Columns and cell size so that `count` blocks fill a width and, if they can, stay within a height.
export function layout(count, width, height, largest = 26) {
  for (let cell = largest; cell > 3; cell--) {
    const columns = niceColumns(Math.floor(width / cell), count);
    if (Math.ceil(count / columns) * cell <= height) return { columns, cell };
  }
  return { columns: niceColumns(Math.floor(width / 3), count), cell: 3 };
}

function niceColumns(most, count) {
  const step = most >= 64 ? 16 : most >= 16 ? 8 : most >= 8 ? 4 : 1;
  const columns = Math.max(1, Math.floor(most / step) * step);
  return Math.min(columns, Math.max(1, count));
}
