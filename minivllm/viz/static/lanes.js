// What happened to each request in each step: the spans that `timeline_data.py` made, and the words for them.

export const WAITING = 0, PREEMPTED = 1, SWAPPED = 2, STALLED = 3, PREFILL = 4, DECODE = 5;
export const KINDS = ["waiting", "preempted", "swapped out", "running, no tokens", "prefill chunk", "decode"];
export const FINISHES = ["unfinished", "stop", "length", "abort", "error"];

function sums(deltas, from, count) {
  const out = new Float64Array(count);
  let sum = 0;
  for (let i = 0; i < count; i++) out[i] = sum += deltas[from + i];
  return out;
}

// The last index whose value is at most x, in an ascending array from `low` to `high` (exclusive); low - 1 if there is none.
export function lastAtMost(values, x, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export class Lanes {
  constructor(about, ids, parts) {
    this.about = about;
    this.ids = ids;
    this.steps = about.steps;
    this.count = about.requests;
    this.budget = about.budget;
    this.readSpans(parts.spans, parts.chunks);
    const n = this.count;
    [this.prompt, this.output, this.finish, this.finishKind] = [0, 1, 2, 3].map((i) => parts.requests.subarray(i * n, (i + 1) * n));
    this.preemptions = this.events(parts.preemptions);
    this.admissions = this.events(parts.admissions);
    const waits = parts.waits.length / 3;
    this.waits = { step: sums(parts.waits, 0, waits), request: parts.waits.subarray(waits, 2 * waits), reason: parts.waits.subarray(2 * waits) };
    const s = this.steps;
    this.time = new Float64Array(s + 1);
    for (let i = 0; i < s; i++) this.time[i + 1] = this.time[i] + parts.time[i] * about.unit;
    this.stepEnd = Float64Array.from({ length: s }, (_, i) => this.time[i] + parts.time[s + i] * about.unit);
    [this.prefill, this.decode, this.running, this.waiting] = [0, 1, 2, 3].map((i) => sums(parts.strips, i * s, s));
  }

  readSpans(raw, chunks) {
    const n = this.count;
    const total = (raw.length - n) / 3;
    this.first = new Int32Array(n + 1);
    this.start = new Int32Array(total);
    this.end = new Int32Array(total);
    this.kind = new Uint8Array(total);
    this.reason = new Uint8Array(total);
    this.tokens = new Int32Array(total);
    this.wanted = new Int32Array(total);
    const prefills = chunks.length / 2;
    let at = 0;
    let chunk = 0;
    for (let r = 0; r < n; r++) {
      let end = 0;
      for (let left = raw[r]; left > 0; left--, at++) {
        this.start[at] = end + raw[n + at];
        end = this.end[at] = this.start[at] + raw[n + total + at];
        const code = raw[n + 2 * total + at];
        this.kind[at] = code & 7;
        this.reason[at] = code >> 3;
        if (this.kind[at] === PREFILL) {
          this.tokens[at] = chunks[chunk];
          this.wanted[at] = chunks[chunk] + chunks[prefills + chunk];
          chunk++;
        }
      }
      this.first[r + 1] = at;
    }
  }

  // Rows of step, request, two numbers: as lists by request.
  events(flat) {
    const n = flat.length / 4;
    const steps = sums(flat, 0, n);
    const byRequest = new Map();
    for (let i = 0; i < n; i++) {
      const row = [steps[i], flat[n + i], flat[2 * n + i], flat[3 * n + i]];
      if (!byRequest.has(row[1])) byRequest.set(row[1], []);
      byRequest.get(row[1]).push(row);
    }
    return byRequest;
  }

  // The span of a request that a step falls into, or -1.
  span(request, step) {
    const i = lastAtMost(this.start, step, this.first[request], this.first[request + 1]);
    return i >= this.first[request] && step < this.end[i] ? i : -1;
  }

  // What happened to a request in a step, and why, in one line: the words of `TimelineData.describe`.
  describe(request, step) {
    const i = this.span(request, step);
    if (i < 0) return step <= this.finish[request] ? "not there yet" : `finished: ${FINISHES[this.finishKind[request]]}`;
    const reason = this.about.reasons[this.reason[i]];
    if (this.kind[i] === DECODE) return "decode";
    if (this.kind[i] === PREFILL) {
      const n = this.tokens[i];
      return `prefill, ${n} token${n === 1 ? "" : "s"}${reason ? ` of the ${this.wanted[i]} that it wanted: ${reason}` : ""}`;
    }
    if (this.kind[i] === STALLED) return "running, but got no tokens";
    const why = this.whyWaiting(request, step, reason);
    return ["waiting", "preempted", "swapped out"][this.kind[i]] + (why ? `: ${why}` : "");
  }

  whyWaiting(request, step, reason) {
    if (reason) return reason;
    const head = lastAtMost(this.waits.step, step);
    if (head < 0) return "";
    const first = this.waits.request[head];
    const i = this.span(first, step);
    if (first === request || i < 0 || this.kind[i] > SWAPPED) return "";
    return `behind ${this.ids[first]} (${this.about.reasons[this.waits.reason[head]]})`;
  }

  // Tokens of a request computed up to the end of a step, or null while it holds none.
  computed(request, step) {
    const i = this.span(request, step);
    if (i < 0 || this.kind[i] === WAITING || this.kind[i] === PREEMPTED) return null;
    const admission = (this.admissions.get(request) ?? []).filter((row) => row[0] <= step).at(-1);
    let at = Math.max(this.first[request], admission ? lastAtMost(this.start, admission[0], this.first[request], i + 1) : 0);
    let done = admission ? admission[2] : null;
    if (done === null) return null;
    for (; at <= i; at++) {
      if (this.kind[at] === PREFILL) done += this.tokens[at];
      else if (this.kind[at] === DECODE) done += Math.min(step + 1, this.end[at]) - this.start[at];
    }
    return done;
  }

  // When the first in the queue waited, and for what: [start, end, request, reason].
  queueReasons() {
    const out = [];
    for (let i = 0; i < this.waits.step.length; i++) {
      const [start, request] = [this.waits.step[i], this.waits.request[i]];
      const span = this.span(request, start);
      if (span < 0) continue;
      let last = span;
      while (last + 1 < this.first[request + 1] && this.start[last + 1] === this.end[last] && this.kind[last + 1] <= SWAPPED) last++;
      out.push([start, Math.min(this.end[last], this.waits.step[i + 1] ?? this.steps), request, this.waits.reason[i]]);
    }
    return out.filter(([start, end]) => end > start);
  }

  // What a tooltip tells about a request in a step, as rows of name and value.
  facts(request, step) {
    const done = this.computed(request, step);
    const preempted = (this.preemptions.get(request) ?? []).filter((row) => row[0] <= step);
    const cached = (this.admissions.get(request) ?? []).find((row) => row[0] <= step)?.[3];
    const last = preempted.at(-1);
    const ended = this.finish[request] <= step && this.finishKind[request];
    return [
      ["this step", this.describe(request, step)],
      ["tokens", `${this.prompt[request]} prompt${cached ? `, ${cached} of them cached` : ""}${done === null ? "" : `; ${done} computed`}`],
      ["preempted", last ? `${preempted.length === 1 ? "once" : `${preempted.length} times`}, last in step ${last[0]} for ${this.ids[last[2]]}${last[3] ? " (swapped)" : ""}` : null],
      ["ended", ended ? `in step ${this.finish[request]}: ${FINISHES[this.finishKind[request]]}` : null],
    ];
  }
}

// The lanes that a header's description names, read from its parts.
export async function readLanes(data, about) {
  const names = Object.keys(about.parts);
  const [ids, ...parts] = await Promise.all([data.json(about.ids), ...names.map((name) => data.part(about.parts[name]))]);
  return new Lanes(about, ids, Object.fromEntries(names.map((name, i) => [name, parts[i]])));
}
