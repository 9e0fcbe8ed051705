// The state of all blocks at any step, folded from the stream that block_map.py writes (its class Op names the operations).

const Op = { ALLOC: 0, HIT: 1, CACHE: 2, FREE: 3, SKIP: 4, EVICT: 5, RESET: 6, SWAP_OUT: 7, FREE_CPU: 8, SCHEDULE: 9, FORGET: 10, RESTART: 11 };
export const Cause = { TAKEN_BACK: 0, FINISH: 1, PREEMPT: 2 };
export const Why = { RUNS: 0, STARTS: 1, STARTS_AGAIN: 2, SWAPPED_IN: 3 };

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

const LOOKS = ["ref", "name", "owner", "group"]; // what a block's look depends on
const ARRAYS = [...LOOKS, "cpuOwner", "before", "after"];
const copied = (map, copy) => new Map(Array.from(map, ([key, value]) => [key, copy(value)]));
const copiedRequest = (its) => ({ ...its, tables: its.tables.map((table) => table.slice()), cpu: its.cpu.slice(), filled: its.filled.slice() });
const copiedList = (list) => list.slice();

// Applies operations to a state. `watch`, if there is one, is told every event of a block:
//   watch(event, block, request, group, position, name, detail)   with the words of to_pandas()["blocks"] for events.
export class Fold {
  constructor(header, watch = null) {
    this.groups = header.groups.length;
    this.watch = watch;
    this.ref = new Uint16Array(header.num_blocks);
    this.name = new Int32Array(header.num_blocks).fill(-1);
    this.owner = new Int32Array(header.num_blocks).fill(-1); // the oldest request that holds the block
    this.group = new Uint8Array(header.num_blocks); // which one last filled it
    this.cpuOwner = new Int32Array(header.num_cpu_blocks + 1).fill(-1);
    this.shared = new Map(); // block -> all its holders, where there are several
    this.requests = new Map(); // number -> { tables, computed, cpu }
    this.scheduled = new Map();
    this.before = new Int32Array(header.num_blocks + 1); // the free list, linked in a circle through a last entry that is no block
    this.after = new Int32Array(header.num_blocks + 1);
    this.end = header.num_blocks;
    this.names = 0; // given so far
    this.changed = []; // blocks that may look different since this was last emptied
    this.all = true; // everything may look different
  }

  // What differences are taken from begins anew with each chunk.
  forgetHabits() {
    this.scheduled.clear();
    for (const its of this.requests.values()) its.filled.fill(0);
  }

  request(r) {
    let its = this.requests.get(r);
    if (its === undefined) {
      its = { tables: Array.from({ length: this.groups }, () => []), computed: 0, cpu: [], filled: new Int32Array(this.groups) };
      this.requests.set(r, its);
    }
    return its;
  }

  // Start from a keyframe that begins at `at`; returns where it ends.
  start(numbers, at, origins) {
    const end = at + 1 + numbers[at];
    let i = at + 1;
    this.ref.fill(0);
    this.name.fill(-1);
    this.owner.fill(-1);
    this.cpuOwner.fill(-1);
    this.shared.clear();
    this.requests.clear();
    this.scheduled.clear();
    for (let block = 0; block <= this.end; block++) this.before[block] = this.after[block] = block;
    const mentioned = []; // held blocks, in the order of the tables
    const list = () => {
      const blocks = new Array(numbers[i++]);
      for (let k = 0, block = 0; k < blocks.length; k++) blocks[k] = block += numbers[i++];
      return blocks;
    };
    this.names = numbers[i++];
    for (let n = numbers[i++]; n > 0; n--) {
      const r = numbers[i++];
      const its = this.request(r);
      its.computed = numbers[i++];
      for (let g = 0; g < this.groups; g++) {
        its.tables[g] = list();
        for (const block of its.tables[g]) {
          if (!block) continue;
          if (this.ref[block] === 0) mentioned.push(block);
          this.take(block, r, g);
        }
      }
      its.cpu = list();
      for (const block of its.cpu) this.cpuOwner[block] = r;
    }
    this.before[this.end] = this.after[this.end] = this.end;
    const free = list();
    for (const block of free) this.link(block, this.before[this.end]);
    let given = 0;
    for (const block of [...mentioned, ...free]) {
      given += numbers[i++];
      this.name[block] = given - 1;
      if (given > 0 && this.ref[block] === 0) this.group[block] = origins.group(given - 1);
    }
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
      names: this.names,
    };
  }

  restore(saved) {
    ARRAYS.forEach((name, i) => this[name].set(saved.arrays[i]));
    this.shared = copied(saved.shared, copiedList);
    this.requests = copied(saved.requests, copiedRequest);
    this.scheduled = new Map(saved.scheduled);
    this.names = saved.names;
  }

  // Remember how blocks look, for `compare`.
  remember() {
    this.looked ??= [...LOOKS, "cpuOwner"].map((name) => this[name].slice());
    [...LOOKS, "cpuOwner"].forEach((name, i) => this.looked[i].set(this[name]));
  }

  // Note which blocks look different from what was remembered.
  compare() {
    const [ref, name, owner, group, cpuOwner] = this.looked;
    this.changed = [];
    for (let id = 0; id < ref.length; id++) {
      if (ref[id] !== this.ref[id] || name[id] !== this.name[id] || owner[id] !== this.owner[id] || group[id] !== this.group[id]) this.changed.push(id);
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

  // The first `n` free blocks that hold content.
  firstCached(n) {
    const blocks = [];
    for (let block = this.after[this.end]; blocks.length < n; block = this.after[block]) if (this.name[block] >= 0) blocks.push(block);
    return blocks;
  }

  // How many free blocks will be taken before this one; -1 if it is not free.
  freeRank(block) {
    for (let at = this.after[this.end], rank = 0; at !== this.end; at = this.after[at], rank++) if (at === block) return rank;
    return -1;
  }

  take(block, r, group) {
    const count = ++this.ref[block];
    if (count === 1) {
      this.unlink(block);
      this.owner[block] = r;
      this.group[block] = group;
    } else {
      if (count === 2) this.shared.set(block, [this.owner[block]]);
      this.shared.get(block).push(r);
      if (r < this.owner[block]) this.owner[block] = r;
    }
    this.changed.push(block);
  }

  release(block, r) {
    const count = --this.ref[block];
    if (count === 0) {
      this.owner[block] = -1;
      this.link(block, this.name[block] < 0 ? this.end : this.before[this.end]);
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

  // Apply the operations from i to end.
  apply(numbers, i, end) {
    const tell = this.watch;
    let r = 0; // the request before
    while (i < end) {
      const op = numbers[i++];
      if (op === Op.ALLOC || op === Op.HIT) {
        r += numbers[i++];
        const g = numbers[i++];
        const why = op === Op.ALLOC ? numbers[i++] : 0;
        const table = this.request(r).tables[g];
        const n = numbers[i++];
        for (let k = 0, block = 0; k < Math.abs(n); k++) {
          block = n < 0 ? this.after[this.end] : block + numbers[i++];
          if (block && tell) tell(op === Op.ALLOC ? "allocated" : "shared", block, r, g, table.length, this.name[block], why);
          table.push(block);
          if (block) this.take(block, r, g);
        }
      } else if (op === Op.CACHE) {
        r += numbers[i++];
        const g = numbers[i++];
        const n = numbers[i++];
        const { filled } = this.request(r);
        const from = n < 0 ? filled[g] + numbers[i++] : 0;
        if (n < 0) filled[g] = from - n;
        for (let k = 0; k < Math.abs(n); k++) {
          const position = n < 0 ? from + k : numbers[i++];
          const block = n < 0 ? this.request(r).tables[g][position] : numbers[i++];
          const name = n < 0 ? this.names : numbers[i++];
          if (name >= this.names) this.names = name + 1;
          if (tell) tell("cached", block, r, g, position, name);
          this.name[block] = name;
          this.changed.push(block);
        }
      } else if (op === Op.FREE) {
        r += numbers[i++];
        const g = numbers[i++];
        const detail = [numbers[i++], numbers[i++], numbers[i++]];
        const its = this.request(r);
        const table = its.tables[g];
        let blocks;
        let n = numbers[i++];
        if (n < 0) {
          blocks = table.filter((block) => block).reverse();
        } else {
          blocks = new Array(n);
          for (let k = 0, block = 0; k < n; k++) blocks[k] = block += numbers[i++];
        }
        for (const block of blocks) {
          if (tell) tell("freed", block, r, g, table.indexOf(block), this.name[block], detail);
          this.release(block, r);
        }
        its.tables[g] = [];
      } else if (op === Op.SKIP) {
        r += numbers[i++];
        const g = numbers[i++];
        const from = numbers[i++];
        const to = numbers[i++];
        const table = this.request(r).tables[g];
        for (let n = numbers[i++], block = 0; n > 0; n--) {
          block += numbers[i++];
          if (tell) tell("left by the window", block, r, g, table.indexOf(block), this.name[block]);
          this.release(block, r);
        }
        table.fill(0, from, to);
      } else if (op === Op.EVICT) {
        r += numbers[i++];
        const n = numbers[i++];
        const blocks = n < 0 ? this.firstCached(-n) : new Array(n);
        for (let k = 0, block = 0; k < n; k++) blocks[k] = block += numbers[i++];
        for (const block of blocks) {
          if (tell) tell("evicted", block, -1, -1, -1, this.name[block], r);
          this.name[block] = -1;
          this.unlink(block);
          this.link(block, this.end);
          this.changed.push(block);
        }
      } else if (op === Op.RESET) {
        this.name.fill(-1);
        this.all = true;
      } else if (op === Op.SWAP_OUT) {
        r += numbers[i++];
        const its = this.request(r);
        its.cpu = [];
        for (let n = numbers[i++]; n > 0; n--, i += 2) {
          its.cpu.push(numbers[i + 1]);
          this.cpuOwner[numbers[i + 1]] = r;
        }
        this.all = true;
      } else if (op === Op.FREE_CPU) {
        this.request((r += numbers[i++])).cpu = [];
        for (let n = numbers[i++], block = 0; n > 0; n--) {
          block += numbers[i++];
          this.cpuOwner[block] = -1;
        }
        this.all = true;
      } else if (op === Op.SCHEDULE) {
        for (let n = numbers[i++]; n > 0; n--) {
          r += numbers[i++];
          const tokens = numbers[i++];
          if (tokens) this.scheduled.set(r, tokens);
          else this.scheduled.delete(r);
        }
        for (const [r, tokens] of this.scheduled) this.request(r).computed += tokens;
      } else if (op === Op.FORGET) {
        this.requests.delete((r += numbers[i++]));
      } else if (op === Op.RESTART) {
        const its = this.request((r += numbers[i++]));
        its.computed = numbers[i++];
      } else {
        throw new Error(`unknown operation ${op}`);
      }
    }
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

  // The history of one block over the whole trace: rows { step, event, request, group, position, name, detail, tokens }.
  async history(block) {
    const rows = [];
    let fresh = 0;
    let step = 0;
    const fold = new Fold(this.data.header, (event, id, request, group, position, name, detail) => {
      if (id === block) rows.push({ step, event, request, group, position, name, detail });
    });
    for (let index = 0; index < this.chunks.length; index++) {
      const numbers = await this.data.part(this.chunks[index][1]);
      let at = 1 + numbers[0];
      if (index === 0) fold.start(numbers, 0, this.origins);
      else fold.forgetHabits();
      while (at < numbers.length) {
        const end = at + 1 + numbers[at];
        fold.apply(numbers, at + 1, end);
        for (; fresh < rows.length; fresh++) rows[fresh].tokens = fold.scheduled.get(rows[fresh].request) ?? 0;
        fold.changed.length = 0;
        at = end;
        step++;
      }
    }
    return rows;
  }
}
