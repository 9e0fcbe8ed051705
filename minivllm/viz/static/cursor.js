// Where in time we look, and at what. All views of one trace on a page share one cursor.

export class Cursor {
  constructor(steps, step = 0) {
    this.steps = steps;
    this.step = step;
    this.moved = false; // whether anybody went to another step
    this.playing = false;
    this.speed = 10; // steps a second
    this.request = null; // id of the request that is looked at
    this.block = null; // { pool: "gpu" | "cpu", id } of the block that is pinned
    this.listeners = new Set();
  }

  // Calls listener(cursor, changed) after every change, `changed` being a Set of "step", "playing", "speed", "request", "block".
  // Returns a function that ends it.
  on(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  set(values) {
    const changed = new Set();
    for (const [name, value] of Object.entries(values)) {
      if (this[name] !== value) {
        this[name] = value;
        changed.add(name);
      }
    }
    if (changed.has("step")) this.moved = true;
    if (changed.size) for (const listener of [...this.listeners]) listener(this, changed);
  }

  // Go to a step; outside the trace means its nearest end.
  go(step) {
    this.set({ step: Math.max(0, Math.min(this.steps - 1, Math.round(step))) });
  }

  move(by) {
    this.go(this.step + by);
  }

  pause() {
    this.set({ playing: false });
  }

  play() {
    if (this.playing || this.steps < 2) return;
    if (this.step === this.steps - 1) this.go(0);
    this.set({ playing: true });
    let last = performance.now();
    let owed = 0;
    const tick = (now) => {
      if (!this.playing) return;
      owed += (Math.min(now - last, 250) / 1000) * this.speed;
      last = now;
      const whole = Math.floor(owed);
      owed -= whole;
      if (whole) this.move(whole);
      if (this.step === this.steps - 1) this.pause();
      else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }
}

// Let two cursors go to the same step, and look at the same request; the shorter run waits at its end. Returns a function that ends it.
export function tie(one, other) {
  if (one.moved || !other.moved) other.go(one.step);
  else one.go(other.step);
  let moving = false;
  const follow = (to) => (from, changed) => {
    if (moving) return;
    moving = true;
    if (changed.has("step")) to.go(from.step);
    if (changed.has("request")) to.set({ request: from.request });
    if (changed.has("playing") && from.playing) to.pause();
    moving = false;
  };
  const ends = [one.on(follow(other)), other.on(follow(one))];
  return () => ends.forEach((end) => end());
}

// The cursor of a trace, which begins at the step `open`. Lives on the page and not in this module: outputs made by two versions of minivllm share it too.
export function cursorFor({ key, steps, open = 0 }) {
  const cursors = (globalThis.minivllmCursors ??= new Map());
  if (!cursors.has(key)) cursors.set(key, new Cursor(steps, open));
  return cursors.get(key);
}
