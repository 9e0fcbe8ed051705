// The state of all blocks at any step, folded from the stream that block_map.py writes (its class Op names the operations).

const Op = { ALLOC: 0, HIT: 1, CACHE: 2, FREE: 3, SKIP: 4, EVICT: 5, RESET: 6, SWAP_OUT: 7, FREE_CPU: 8, SCHEDULE: 9, FORGET: 10, RESTART: 11 };
export const Cause = { TAKEN_BACK: 0, FINISH: 1, PREEMPT: 2 };
export const Why = { RUNS: 0, STARTS: 1, STARTS_AGAIN: 2, SWAPPED_IN: 3 };

// Which request filled each content first, and where: from runs of (request, group, position, length).
export class Origins {
  constructor(runs) {
    this.runs = runs;
    this.starts = [];
    for (let i = 0, name = 0; i < runs.length; i += 4) {
      this.starts.push(name);
      name += runs[i + 3];
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

  request(r) {
    let its = this.requests.get(r);
    if (its === undefined) {
      its = { tables: Array.from({ length: this.groups }, () => []), computed: 0, cpu: [] };
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

  // The first free block that holds content.
  firstCached() {
    let block = this.after[this.end];
    while (this.name[block] < 0) block = this.after[block];
    return block;
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
    while (i < end) {
      const op = numbers[i++];
      if (op === Op.ALLOC || op === Op.HIT) {
        const r = numbers[i++];
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
        const r = numbers[i++];
        const g = numbers[i++];
        const n = numbers[i++];
        const from = n < 0 ? numbers[i++] : 0;
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
        const r = numbers[i++];
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
        const r = numbers[i++];
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
        const given = numbers[i++];
        const block = given < 0 ? this.firstCached() : given;
        const by = numbers[i++];
        if (tell) tell("evicted", block, -1, -1, -1, this.name[block], by);
        this.name[block] = -1;
        this.unlink(block);
        this.link(block, this.end);
        this.changed.push(block);
      } else if (op === Op.RESET) {
        this.name.fill(-1);
        this.all = true;
      } else if (op === Op.SWAP_OUT) {
        const r = numbers[i++];
        const its = this.request(r);
        its.cpu = [];
        for (let n = numbers[i++]; n > 0; n--, i += 2) {
          its.cpu.push(numbers[i + 1]);
          this.cpuOwner[numbers[i + 1]] = r;
        }
        this.all = true;
      } else if (op === Op.FREE_CPU) {
        this.request(numbers[i++]).cpu = [];
        for (let n = numbers[i++], block = 0; n > 0; n--) {
          block += numbers[i++];
          this.cpuOwner[block] = -1;
        }
        this.all = true;
      } else if (op === Op.SCHEDULE) {
        for (let n = numbers[i++]; n > 0; n--) {
          const r = numbers[i++];
          const tokens = numbers[i++];
          if (tokens) this.scheduled.set(r, tokens);
          else this.scheduled.delete(r);
        }
        for (const [r, tokens] of this.scheduled) this.request(r).computed += tokens;
      } else if (op === Op.FORGET) {
        this.requests.delete(numbers[i++]);
      } else if (op === Op.RESTART) {
        const its = this.request(numbers[i++]);
        its.computed = numbers[i++];
      } else {
        throw new Error(`unknown operation ${op}`);
      }
    }
  }
}

// Goes to any step of a trace. Steps within a chunk that is in memory take no waiting.
export class Frames {
  constructor(data, origins) {
    this.data = data;
    this.origins = origins;
    this.chunks = data.header.chunks;
    this.steps = data.header.trace.steps;
    this.fold = new Fold(data.header);
    this.step = -1;
    this.loaded = new Map(); // chunk -> { numbers, starts }: starts[k] is where step k of the chunk begins
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

  // Move the fold to a step. True if done; false if its chunk must be loaded first (await load(chunkOf(step)), then again).
  seek(step) {
    const index = this.chunkOf(step);
    const chunk = this.loaded.get(index);
    if (!chunk) return false;
    const first = this.chunks[index][0];
    let at = this.step + 1;
    if (this.step > step || this.step < first) {
      this.fold.start(chunk.numbers, 0, this.origins);
      at = first;
    }
    for (; at <= step; at++) this.fold.apply(chunk.numbers, chunk.starts[at - first] + 1, chunk.starts[at - first + 1]);
    this.step = step;
    if (index + 1 < this.chunks.length && !this.loaded.has(index + 1)) this.load(index + 1); // before play arrives there
    return true;
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
      else fold.scheduled.clear(); // the first step of a chunk lists all
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
