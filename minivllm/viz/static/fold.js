// The state of all blocks and queues at any step, rebuilt from the events of a trace: the twin of `Fold` in core/events.py. schema.js says what
// the events are; `BlockStream` in block_map.py writes them as numbers.
import { KINDS, MODES, STATUSES, WIRE } from "./schema.js";

// Which request filled each content first, and where: from runs of (request, group, position, length), as BlockStream.packed_origins writes them.
export class Origins {
  constructor(packed) {
    const count = packed.length / 4;
    const ends = new Map();
    this.runs = new Int32Array(packed.length);
    this.starts = new Int32Array(count);
    for (let i = 0, name = 0, request = 0; i < count; i++) {
      request += packed[i];
      const group = packed[count + i];
      const position = packed[2 * count + i] + (ends.get(`${request} ${group}`) ?? 0);
      const length = packed[3 * count + i];
      ends.set(`${request} ${group}`, position + length);
      this.runs.set([request, group, position, length], 4 * i);
      this.starts[i] = name;
      name += length;
    }
  }

  find(name) {
    let low = 0;
    for (let high = this.starts.length; high - low > 1; ) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= name) low = middle;
      else high = middle;
    }
    return low;
  }

  request(name) {
    return this.runs[4 * this.find(name)];
  }

  group(name) {
    return this.runs[4 * this.find(name) + 1];
  }

  position(name) {
    const run = this.find(name);
    return this.runs[4 * run + 2] + name - this.starts[run];
  }
}

// How each field of an event is read; the others are plain numbers. A list of `-n` blocks is what was to be expected.
const READ = {
  request: (fold) => (fold.last += fold.next()),
  mode: (fold) => MODES[fold.next()],
  blocks: (fold, event) => fold.list(event),
  block(fold) {
    const block = fold.next();
    return block < 0 ? fold.freeAt(fold.numFree - fold.numCachedFree) : block;
  },
  positions(fold, event) {
    const { tables, filled } = fold.request(event.request);
    const n = fold.next();
    const [positions, blocks, hashes] = [[], [], []];
    if (n < 0) {
      const from = filled[event.group] + fold.next();
      filled[event.group] = from - n;
      for (let k = 0; k < -n; k++) {
        positions.push(from + k);
        blocks.push(tables[event.group][from + k]);
        hashes.push(fold.names + k);
      }
    }
    for (let k = 0; k < n; k++) {
      positions.push(fold.next());
      blocks.push(fold.next());
      hashes.push(fold.next());
    }
    Object.assign(event, { blocks, hashes });
    return positions;
  },
  pairs: (fold) => Array.from({ length: fold.next() }, () => [fold.next(), fold.next()]),
  num_rejected: (fold) => Array.from({ length: fold.next() }, () => [fold.next(), fold.next()]),
  num_scheduled(fold) {
    for (let n = fold.next(); n > 0; n--) {
      const r = (fold.last += fold.next());
      const tokens = fold.next();
      if (tokens) fold.scheduled.set(r, tokens);
      else fold.scheduled.delete(r);
    }
    return fold.scheduled;
  },
};

const LOOKS = ["ref", "name", "owner", "group", "fetched"]; // what a block's look depends on
const ARRAYS = [...LOOKS, "cpuOwner", "before", "after"];
const VALUES = ["names", "numFree", "numCachedFree"];
const copied = (map, copy) => new Map(Array.from(map, ([key, value]) => [key, copy(value)]));
const copiedRequest = (its) => ({ ...its, tables: its.tables.map((table) => table.slice()), cpu: its.cpu.slice(), filled: its.filled.slice() });
const copiedList = (list) => list.slice();
const without = (list, value) => list.splice(list.indexOf(value), 1);

// Applies events to a state, one method for each kind. `watch(event)`, if there is one, is called before an event is applied.
export class Fold {
  constructor(header, watch = null) {
    this.groups = header.groups.length;
    this.watch = watch;
    this.ref = new Uint16Array(header.num_blocks);
    this.name = new Int32Array(header.num_blocks).fill(-1);
    this.owner = new Int32Array(header.num_blocks).fill(-1); // the oldest request that holds the block
    this.group = new Uint8Array(header.num_blocks); // which one last filled it
    this.fetched = new Uint8Array(header.num_blocks); // 1: a KV connector has brought what it holds, or is bringing it
    this.size = header.block_size;
    this.cpuOwner = new Int32Array(header.num_cpu_blocks + 1).fill(-1);
    this.shared = new Map(); // block -> all its holders, where there are several
    this.requests = new Map(); // number -> { status, tables, computed, cpu }
    this.waiting = [];
    this.running = [];
    this.remote = []; // requests that wait for blocks which are being filled
    this.scheduled = new Map();
    this.before = new Int32Array(header.num_blocks + 1); // the free list, linked in a circle through a last entry that is no block
    this.after = new Int32Array(header.num_blocks + 1);
    this.end = header.num_blocks;
    this.names = 0; // given so far
    this.numFree = this.numCachedFree = 0;
    this.changed = []; // blocks that may look different since this was last emptied
    this.all = true; // everything may look different
  }

  // What differences are taken from begins anew with each chunk.
  forgetHabits() {
    this.scheduled.clear();
    for (const its of this.requests.values()) its.filled.fill(0);
  }

  request(r) {
    return this.requests.get(r);
  }

  open(r, status) {
    const its = { status, tables: Array.from({ length: this.groups }, () => []), computed: 0, cpu: [], filled: new Int32Array(this.groups) };
    this.requests.set(r, its);
    return its;
  }

  // ---- reading

  next() {
    return this.numbers[this.at++];
  }

  // A list of blocks: its length, the first, then differences; or -n for the n that were to be expected.
  list(event = null) {
    const n = this.next();
    if (n < 0) return event.kind === "free" ? this.request(event.request).tables[event.group].filter((block) => block).reverse() : this.firstFree(-n);
    const blocks = new Array(n);
    for (let k = 0, block = 0; k < n; k++) blocks[k] = block += this.next();
    return blocks;
  }

  // Apply the events that the numbers from i to end tell.
  apply(numbers, i, end) {
    Object.assign(this, { numbers, at: i, last: 0 }); // last: the request before
    while (this.at < end) {
      const kind = KINDS[this.next()];
      const event = { kind };
      for (const field of WIRE[kind]) event[field] = field in READ ? READ[field](this, event) : this.next();
      if (this.watch) this.watch(event);
      this[kind](event);
    }
  }

  // Start from a keyframe that begins at `at`; returns where it ends.
  start(numbers, at, origins) {
    const end = at + 1 + numbers[at];
    Object.assign(this, { numbers, at: at + 1, last: 0 });
    this.ref.fill(0);
    this.name.fill(-1);
    this.owner.fill(-1);
    this.fetched.fill(0);
    this.cpuOwner.fill(-1);
    this.shared.clear();
    this.requests.clear();
    this.scheduled.clear();
    for (let block = 0; block <= this.end; block++) this.before[block] = this.after[block] = block;
    this.numFree = this.numCachedFree = 0;
    const mentioned = []; // held blocks, in the order of the tables
    this.names = this.next();
    for (let n = this.next(); n > 0; n--) {
      const r = this.next();
      const its = this.open(r, STATUSES[this.next()]);
      its.computed = this.next();
      for (let g = 0; g < this.groups; g++) {
        its.tables[g] = this.list();
        for (const block of its.tables[g]) {
          if (!block) continue;
          if (this.ref[block] === 0) mentioned.push(block);
          this.hold(block, r, g);
        }
      }
      its.cpu = this.list();
      for (const block of its.cpu) this.cpuOwner[block] = r;
    }
    this.waiting = this.list();
    this.running = this.list();
    this.remote = this.list();
    for (let n = this.next(); n > 0; n--) {
      const r = this.next();
      for (const block of this.list()) {
        if (this.ref[block] === 0) mentioned.push(block);
        this.hold(block, r, 0);
      }
    }
    for (const block of this.list()) this.fetched[block] = 1;
    const free = this.list();
    for (const block of free) this.link(block, this.before[this.end]);
    let given = 0;
    for (const block of [...mentioned, ...free]) {
      given += this.next();
      this.name[block] = given - 1;
      if (given > 0 && this.ref[block] === 0) {
        this.group[block] = origins.group(given - 1);
        this.numCachedFree++;
      }
    }
    this.numFree = free.length;
    this.all = true;
    return end;
  }

  // A copy of the whole state, to go back to.
  save() {
    return {
      arrays: ARRAYS.map((name) => this[name].slice()),
      shared: copied(this.shared, copiedList),
      requests: copied(this.requests, copiedRequest),
      scheduled: new Map(this.scheduled),
      queues: [this.waiting.slice(), this.running.slice(), this.remote.slice()],
      values: VALUES.map((name) => this[name]),
    };
  }

  restore(saved) {
    ARRAYS.forEach((name, i) => this[name].set(saved.arrays[i]));
    this.shared = copied(saved.shared, copiedList);
    this.requests = copied(saved.requests, copiedRequest);
    this.scheduled = new Map(saved.scheduled);
    [this.waiting, this.running, this.remote] = saved.queues.map(copiedList);
    VALUES.forEach((name, i) => { this[name] = saved.values[i]; });
  }

  // Remember how blocks look, for `compare`.
  remember() {
    this.looked ??= [...LOOKS, "cpuOwner"].map((name) => this[name].slice());
    [...LOOKS, "cpuOwner"].forEach((name, i) => this.looked[i].set(this[name]));
  }

  // Note which blocks look different from what was remembered.
  compare() {
    const [ref, name, owner, group, fetched, cpuOwner] = this.looked;
    this.changed = [];
    for (let id = 0; id < ref.length; id++) {
      if (ref[id] !== this.ref[id] || name[id] !== this.name[id] || owner[id] !== this.owner[id] || group[id] !== this.group[id] || fetched[id] !== this.fetched[id]) this.changed.push(id);
    }
    this.all = cpuOwner.some((r, id) => r !== this.cpuOwner[id]);
  }

  // Put a block into the free list after another (after `end`: first in the list).
  link(block, previous) {
    const next = this.after[previous];
    this.before[block] = previous;
    this.after[block] = next;
    this.after[previous] = this.before[next] = block;
  }

  unlink(block) {
    this.after[this.before[block]] = this.after[block];
    this.before[this.after[block]] = this.before[block];
  }

  // How many free blocks will be taken before this one; -1 if it is not free.
  freeRank(block) {
    for (let at = this.after[this.end], rank = 0; at !== this.end; at = this.after[at], rank++) if (at === block) return rank;
    return -1;
  }

  // The first n free blocks, and the one at a place of the free list.
  firstFree(n) {
    const blocks = new Array(n);
    for (let k = 0, block = this.end; k < n; k++) blocks[k] = block = this.after[block];
    return blocks;
  }

  freeAt(place) {
    let block = this.after[this.end];
    for (; place > 0; place--) block = this.after[block];
    return block;
  }

  // One more request holds a block.
  take(block, r, group) {
    if (this.ref[block] === 0) {
      this.unlink(block);
      this.numFree--;
      if (this.name[block] >= 0) this.numCachedFree--;
    }
    this.hold(block, r, group);
  }

  hold(block, r, group) {
    const count = ++this.ref[block];
    if (count === 1) {
      this.owner[block] = r;
      this.group[block] = group;
    } else {
      if (count === 2) this.shared.set(block, [this.owner[block]]);
      this.shared.get(block).push(r);
      if (r < this.owner[block]) this.owner[block] = r;
    }
    this.changed.push(block);
  }

  // Blocks without content go to the front of the free list, in this order; those with content to its end.
  releaseAll(blocks, r) {
    let front = this.end;
    for (const block of blocks) {
      this.release(block, r, front);
      if (this.ref[block] === 0 && this.name[block] < 0) front = block;
    }
  }

  release(block, r, front) {
    const count = --this.ref[block];
    if (count === 0) {
      this.owner[block] = -1;
      this.link(block, this.name[block] < 0 ? front : this.before[this.end]);
      this.numFree++;
      if (this.name[block] >= 0) this.numCachedFree++;
    } else {
      const holders = this.shared.get(block);
      holders.splice(holders.indexOf(r), 1);
      this.owner[block] = Math.min(...holders);
      if (count === 1) this.shared.delete(block);
    }
    this.changed.push(block);
  }

  // All requests that hold a block, the oldest first.
  holders(block) {
    if (this.ref[block] > 1) return [...this.shared.get(block)].sort((a, b) => a - b);
    return this.ref[block] === 1 ? [this.owner[block]] : [];
  }

  // ---- the events

  add({ request }) {
    this.open(request, "WAITING");
    this.waiting.push(request);
  }

  // The list in which requests of a status stand.
  queue(status) {
    return { RUNNING: this.running, WAITING_FOR_REMOTE_KVS: this.remote }[status] ?? this.waiting;
  }

  admit({ request, num_computed }) {
    without(this.queue(this.request(request).status), request);
    this.running.push(request);
    Object.assign(this.request(request), { status: "RUNNING", computed: num_computed });
  }

  preempt({ request, mode }) {
    const its = this.request(request);
    if (this.queue(its.status) !== this.waiting) {
      without(this.queue(its.status), request);
      this.waiting.unshift(request);
    }
    its.status = mode === "swap" ? "SWAPPED" : "PREEMPTED";
    if (mode !== "swap") its.computed = 0;
  }

  alloc({ request, group, blocks }) {
    const table = this.request(request).tables[group];
    for (const block of blocks) {
      table.push(block);
      this.fetched[block] = 0;
      if (block) this.take(block, request, group);
    }
  }

  hit({ request, group, blocks }) {
    const table = this.request(request).tables[group];
    for (const block of blocks) {
      table.push(block);
      if (block) this.take(block, request, group);
    }
  }

  kv_load({ blocks }) {
    for (const block of blocks) this.fetched[block] = 1;
    this.changed.push(...blocks);
  }

  kv_wait({ request }) {
    without(this.waiting, request);
    this.remote.push(request);
    this.request(request).status = "WAITING_FOR_REMOTE_KVS";
  }

  kv_arrive({ request, num_computed }) {
    const its = this.request(request);
    its.computed = num_computed;
    for (const block of its.tables.flatMap((table) => table.slice(Math.floor(num_computed / this.size)))) {
      this.fetched[block] = 0;
      this.changed.push(block);
    }
  }

  // The request ends, and its blocks stay until a copy of them, or into them, has ended.
  kv_keep({ request }) {
    const its = this.request(request);
    its.tables = its.tables.map(() => []);
  }

  kv_release({ owner, blocks }) {
    this.releaseAll(blocks, owner);
  }

  cache({ blocks, hashes }) {
    blocks.forEach((block, k) => {
      this.name[block] = hashes[k];
      if (hashes[k] >= this.names) this.names = hashes[k] + 1;
      this.changed.push(block);
    });
  }

  free({ request, group, blocks }) {
    this.releaseAll(blocks, request);
    this.request(request).tables[group] = [];
  }

  skip({ request, group, start, end, blocks }) {
    this.request(request).tables[group].fill(0, start, end);
    this.releaseAll(blocks, request);
  }

  uncache({ blocks }) {
    for (const block of blocks) this.name[block] = -1;
    this.changed.push(...blocks);
  }

  evict({ block }) {
    this.name[block] = -1;
    this.numCachedFree--;
    this.unlink(block);
    this.link(block, this.end);
    this.changed.push(block);
  }

  reset() {
    this.name.fill(-1);
    this.numCachedFree = 0;
    this.all = true;
  }

  swap_out({ request, pairs }) {
    const its = this.request(request);
    its.cpu = pairs.map(([, cpu]) => cpu);
    for (const cpu of its.cpu) this.cpuOwner[cpu] = request;
    this.all = true;
  }

  free_cpu({ request, blocks }) {
    this.request(request).cpu = [];
    for (const block of blocks) this.cpuOwner[block] = -1;
    this.all = true;
  }

  schedule() {
    for (const [r, tokens] of this.scheduled) this.request(r).computed += tokens;
  }

  rollback({ num_rejected }) {
    for (const [r, tokens] of num_rejected) this.request(r).computed -= tokens;
  }

  finish({ request }) {
    without(this.queue(this.request(request).status), request);
    this.requests.delete(request);
  }
}

const APART = 16384; // numbers between two checkpoints: folding them takes a few milliseconds at most
const MEMORY = 64e6; // bytes of checkpoints

// Goes to any step of a trace, forwards or backwards. Steps within a chunk that is in memory take no waiting.
export class Frames {
  constructor(data, origins) {
    this.data = data;
    this.origins = origins;
    this.chunks = data.header.chunks;
    this.steps = data.header.trace.steps;
    this.fold = new Fold(data.header);
    this.step = -1;
    this.loaded = new Map(); // chunk -> { numbers, starts }: starts[k] is where step k of the chunk begins
    this.checkpoints = new Map(); // step -> state after it, the oldest first
    this.mostCheckpoints = Math.max(8, Math.floor(MEMORY / (26 * data.header.num_blocks)));
    this.preparing = -1; // chunk of which checkpoints are being made
  }

  chunkOf(step) {
    let low = 0;
    for (let high = this.chunks.length; high - low > 1; ) {
      const middle = (low + high) >> 1;
      if (this.chunks[middle][0] <= step) low = middle;
      else high = middle;
    }
    return low;
  }

  async load(chunk) {
    const known = this.loaded.get(chunk);
    if (known) return known;
    const numbers = await this.data.part(this.chunks[chunk][1]);
    const starts = [1 + numbers[0]];
    while (starts.at(-1) < numbers.length) starts.push(starts.at(-1) + 1 + numbers[starts.at(-1)]);
    const value = { numbers, starts };
    if (this.loaded.size >= 8) this.loaded.delete(this.loaded.keys().next().value);
    this.loaded.set(chunk, value);
    return value;
  }

  // Apply one step of a chunk, and keep a checkpoint now and then.
  apply(fold, { numbers, starts }, first, step) {
    const [from, to] = [starts[step - first], starts[step - first + 1]];
    fold.apply(numbers, from + 1, to);
    if (Math.floor(from / APART) === Math.floor(to / APART) || this.checkpoints.has(step)) return;
    if (this.checkpoints.size >= this.mostCheckpoints) this.checkpoints.delete(this.checkpoints.keys().next().value);
    this.checkpoints.set(step, fold.save());
  }

  // The last checkpoint from `first` to `step`, or -1.
  checkpoint(first, step) {
    let best = -1;
    for (const at of this.checkpoints.keys()) if (at >= first && at <= step && at > best) best = at;
    return best;
  }

  // Move the fold to a step. True if done; false if its chunk must be loaded first (await load(chunkOf(step)), then again).
  seek(step) {
    const index = this.chunkOf(step);
    const chunk = this.loaded.get(index);
    if (!chunk) return false;
    const { fold } = this;
    const first = this.chunks[index][0];
    const known = this.checkpoint(first, step);
    const ahead = this.step >= Math.max(first - 1, known) && this.step <= step && this.step >= 0;
    const compared = !ahead && !fold.all;
    if (compared) fold.remember();
    if (ahead && this.step < first) fold.forgetHabits(); // from the chunk before: no need of the keyframe
    let at = ahead ? this.step : this.begin(fold, chunk, first, known);
    while (at < step) this.apply(fold, chunk, first, ++at);
    if (compared) fold.compare();
    this.step = step;
    if (index + 1 < this.chunks.length && !this.loaded.has(index + 1)) this.load(index + 1); // before play arrives there
    this.prepare(Math.max(first, this.checkpoint(first, step)) - 1);
    return true;
  }

  // Set a fold to a checkpoint of the chunk that begins at step `first`, or to its keyframe (known = -1); returns the step where it is.
  begin(fold, chunk, first, known) {
    if (known >= 0) {
      fold.restore(this.checkpoints.get(known));
      return known;
    }
    fold.start(chunk.numbers, 0, this.origins);
    return first - 1;
  }

  // Make the checkpoints before a step, a few at a time, before somebody steps back to it.
  async prepare(last) {
    if (last < 0 || this.preparing === last) return;
    const index = this.chunkOf(last);
    const first = this.chunks[index][0];
    const chunk = await this.load(index);
    const known = this.checkpoint(first, last);
    const far = (step) => chunk.starts[step - first + 1] - (known < 0 ? 0 : chunk.starts[known - first + 1]);
    if (far(last) < 2 * APART) return;
    this.preparing = last;
    const fold = new Fold(this.data.header);
    let at = this.begin(fold, chunk, first, known);
    for (let rested = 0; at < last && this.preparing === last; ) {
      this.apply(fold, chunk, first, ++at);
      fold.changed.length = 0;
      if (far(at) - rested > APART) {
        rested = far(at);
        await new Promise((rest) => setTimeout(rest, 10));
      }
    }
    if (this.preparing === last) this.preparing = -1;
  }

  // The history of one block over the whole trace: rows { step, event, request, group, position, name, why, tokens }. `why` is what decided it: the
  // status of a request that took a block; the end or the preemption for which it gave it back; who needed one that was evicted.
  async history(block) {
    const rows = [];
    const [open, fold] = [[], new Fold(this.data.header)];
    let step = 0;
    fold.watch = (event) => {
      explain(open, event);
      const at = event.kind === "evict" ? (event.block === block ? 0 : -1) : (event.blocks?.indexOf(block) ?? -1);
      if (at < 0 || !(event.kind in HISTORY)) return;
      const table = fold.request(event.request)?.tables[event.group];
      const name = event.kind === "cache" ? event.hashes[at] : fold.name[block];
      const position = { alloc: () => table.length + at, hit: () => table.length + at, cache: () => event.positions[at], evict: () => -1, kv_keep: () => -1, kv_release: () => -1 }[event.kind]?.() ?? table.indexOf(block);
      const why = event.kind === "alloc" ? fold.request(event.request).status : null;
      const row = { step, kind: event.kind, event: HISTORY[event.kind], request: event.request ?? event.owner ?? -1, group: event.group ?? -1, position, name, why };
      rows.push(row);
      if (["free", "evict", "alloc"].includes(event.kind)) open.push(row);
    };
    let fresh = 0;
    for (let index = 0; index < this.chunks.length; index++) {
      const numbers = await this.data.part(this.chunks[index][1]);
      let at = 1 + numbers[0];
      if (index === 0) fold.start(numbers, 0, this.origins);
      else fold.forgetHabits();
      while (at < numbers.length) {
        const end = at + 1 + numbers[at];
        fold.apply(numbers, at + 1, end);
        for (; fresh < rows.length; fresh++) rows[fresh].tokens = fold.scheduled.get(rows[fresh].request) ?? 0;
        fold.changed.length = open.length = 0;
        at = end;
        step++;
      }
    }
    return rows;
  }
}

const HISTORY = { alloc: "allocated", hit: "shared", cache: "cached", uncache: "not filled after all", free: "freed", skip: "left by the window", evict: "evicted", kv_load: "fetched",
  kv_keep: "kept", kv_release: "freed" };

// A request gives its blocks back just before the event that says why; a block is evicted just before a request takes it.
function explain(open, event) {
  for (const row of open) {
    if (row.kind === "free" && (event.kind === "finish" || event.kind === "preempt") && event.request === row.request) row.why ??= event;
    if (row.kind === "evict" && event.kind === "alloc") row.why ??= event;
    if (row.kind === "alloc" && event.kind === "kv_wait" && event.request === row.request) row.why = "REMOTE";
  }
  const passes = { free: ["free", "free_cpu", "cache"], evict: ["evict", "hit"], alloc: ["alloc"] };
  for (let i = open.length - 1; i >= 0; i--) if (!passes[open[i].kind].includes(event.kind)) open.splice(i, 1);
}
