// What is said about a block: in the tooltip, in the panel of a pinned block, to a screen reader.
import { MADE_UP } from "./schema.js";
import { count, facts, h } from "./ui.js";

// Names, hashes and tokens of a trace, looked up by number.
export class Lexicon {
  constructor(header, words, origins, hashes) {
    this.header = header;
    this.requests = words.requests; // ids
    this.names = words.names; // what they are called
    this.strings = words.strings;
    this.origins = origins;
    this.hashes = hashes;
    this.numbers = new Map(words.requests.map((id, number) => [id, number]));
    this.ids = null; // token ids of all requests, once they have been loaded
    this.texts = null;
    this.media = words.media ?? {}; // by request: first token, token behind the last, and kind of pictures and the like
  }

  // What a block of a request is for, of pictures and the like, in words; "" for nothing.
  mediaOf(request, position) {
    const from = position * this.header.block_size;
    const parts = (this.media[request] ?? []).map(([first, end, kind]) => {
      const [low, high] = [Math.max(first, from), Math.min(end, from + this.header.block_size)];
      return low < high ? `${kind}, ${count(high - low, "token")} of ${end - first}` : "";
    });
    return parts.filter(Boolean).join("; ");
  }

  async loadTokens(data) {
    const { tokens } = this.header;
    if (!tokens) return;
    const flat = await data.part(tokens.ids);
    this.starts = [];
    for (let at = 0; at < flat.length; at += 1 + flat[at]) this.starts.push(at + 1);
    if (tokens.texts !== undefined) this.texts = await data.json(tokens.texts);
    this.ids = flat;
  }

  // The first hex digits of a content hash.
  hash(name) {
    if (name < 0) return "";
    const bytes = this.header.hash_bytes;
    return Array.from(this.hashes.subarray(bytes * name, bytes * (name + 1)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  // The tokens of one block of a request, at most `filled` of them: [ids, or texts if there is a tokenizer].
  tokens(request, position, filled) {
    if (!this.ids || request < 0) return null;
    const size = this.header.block_size;
    const start = this.starts[request];
    const length = this.ids[start - 1];
    const from = position * size;
    const ids = Array.from(this.ids.subarray(start + from, start + Math.min(from + filled, length)));
    return ids.length ? ids : null;
  }

  tokenNode(ids) {
    if (!ids) return null;
    if (ids[0] >= MADE_UP) return h("span", {}, `${ids.length} tokens made up by the lab`);
    if (!this.texts) return h("span", { class: "mv-code" }, ids.join(" "));
    return h("span", { class: "mv-code" }, ids.map((id) => (this.texts[id] ?? `[${id}]`).replaceAll("\n", "⏎")).join(""));
  }
}

// A state is made of all tokens up to the end of its block, or up to the last one computed.
const stateAfter = (size, { position, filled, end }) => `the state after ${count(Math.min(end, filled < size ? end : (position + 1) * size), "token")}`;

// What there is to know about a block now: { state, words, holders: [{ request, position, filled }], name, tokens }.
export function look(fold, lexicon, block) {
  const size = lexicon.header.block_size;
  const name = fold.name[block];
  if (block === 0) return { words: "the null block: never owned, stands for blocks that a window left behind", holders: [], name: -1, tokens: null, media: "" };
  const group = fold.group[block];
  const isState = lexicon.header.states.includes(group);
  const holders = fold.holders(block).filter((request) => fold.requests.has(request)).map((request) => {
    const its = fold.requests.get(request);
    const position = its.tables[group].indexOf(block);
    const last = its.tables[group].length - 1; // a table of a single state says nothing of where its tokens end
    const filled = position === last && isState ? 0 : Math.max(0, Math.min(size, its.computed - position * size));
    return { request, position, filled, end: its.computed };
  });
  let words = "free";
  let tokens = null;
  const media = isState ? "" : mediaIn(fold, lexicon, block);
  if (fold.ref[block] && !holders.length) {
    words = `kept for a copy, after the end of request ${lexicon.names[fold.owner[block]]}`;
  } else if (holders.length) {
    words = holders.length > 1 ? `shared by ${holders.length} requests` : "in use";
    if (isState) words += `, ${stateAfter(size, holders[0])}`;
    else tokens = lexicon.tokens(holders[0].request, holders[0].position, Math.max(...holders.map((its) => its.filled)));
  } else if (name >= 0) {
    words = isState ? `free, a checkpoint: ${stateAfter(size, { position: lexicon.origins.position(name), filled: size, end: Infinity })}` : "free, holds cached tokens";
    if (!isState) tokens = lexicon.tokens(lexicon.origins.request(name), lexicon.origins.position(name), size);
  }
  if (fold.fetched[block] && (fold.ref[block] || name >= 0)) {
    const its = holders.length === 1 ? fold.requests.get(holders[0].request) : null;
    words += its?.status === "WAITING_FOR_REMOTE_KVS" && !its.computed ? ", being fetched from elsewhere" : ", content came from elsewhere";
  }
  return { words, holders, name, tokens, group, isState, media };
}

// What a block is for, of pictures and the like; "" for nothing.
export function mediaIn(fold, lexicon, block) {
  if (fold.ref[block]) {
    const [request] = fold.holders(block);
    return !fold.requests.has(request) ? "" : lexicon.mediaOf(request, fold.requests.get(request).tables[fold.group[block]].indexOf(block));
  }
  const name = fold.name[block];
  return name < 0 ? "" : lexicon.mediaOf(lexicon.origins.request(name), lexicon.origins.position(name));
}

export function describe(fold, lexicon, block) {
  const { words, holders, media } = look(fold, lexicon, block);
  const by = holders.slice(0, 3).map(({ request, position }) => `request ${lexicon.names[request]} at position ${position}`).join(", ");
  return `Block ${block}: ${words}${by ? `, ${by}` : ""}${media ? `, with ${media}` : ""}`;
}

export function describeNodes(fold, lexicon, block) {
  const { words, holders, name, tokens, group, isState, media } = look(fold, lexicon, block);
  const size = lexicon.header.block_size;
  const place = ({ position, filled }) => `position ${position} (tokens ${position * size} to ${position * size + Math.max(filled, 1) - 1}${filled < size ? `, ${filled} of ${size} filled` : ""})`;
  const origin = name >= 0 && !holders.length && lexicon.origins.request(name) >= 0
    ? `${lexicon.names[lexicon.origins.request(name)]}, position ${lexicon.origins.position(name)}` : null;
  const rank = holders.length || block === 0 ? -1 : fold.freeRank(block);
  const at = (its) => (holders.length > 1 || isState ? `position ${its.position}` : place(its));
  const listed = holders.slice(0, 4).map((its) => h("div", {}, h("b", {}, lexicon.names[its.request]), `, ${at(its)}`));
  if (holders.length > 4) listed.push(h("div", { class: "mv-muted" }, `and ${holders.length - 4} more`));
  return [
    h("div", { class: "mv-bm-what" }, h("b", {}, `Block ${block}`), ` · ${words}`),
    facts([
      holders.length ? ["request", h("div", {}, listed)] : null,
      origin ? ["first filled by", origin] : null,
      lexicon.header.groups.length > 1 && (holders.length || name >= 0) ? ["group", String(group)] : null,
      ["ref count", String(fold.ref[block])],
      ["hash", name >= 0 ? h("span", { class: "mv-code" }, lexicon.hash(name)) : "none yet: not full, or not reusable"],
      rank >= 0 ? ["reused", rank ? `after ${count(rank, "other free block")}` : "next of all"] : null,
      media ? ["media", media] : null,
      tokens ? [lexicon.texts ? "text" : "token ids", lexicon.tokenNode(tokens)] : null,
    ].filter((row) => row && !(block === 0))),
  ];
}

// The decision behind one row of a block's history.
export function decision({ kind, request, tokens, why }, lexicon) {
  const name = (number) => `request ${lexicon.names[number]}`;
  const who = request >= 0 ? name(request) : "";
  if (kind === "alloc") {
    const room = `room for ${count(tokens, "token")} in this step`;
    if (why === "WAITING") return `${who} was admitted, with ${room}`;
    if (why === "PREEMPTED") return `${who} was admitted again after its preemption, with ${room}`;
    if (why === "REMOTE") return `${who} waits until it is filled from elsewhere, or is to compute it afterwards`;
    if (why === "SWAPPED") return `${who} came back from the swap pool`;
    return tokens ? `${who} ran on and needed ${room}` : `${who} ran on, and lost the block again in the same step`;
  }
  if (kind === "kv_load") return `a KV connector has these tokens of ${who}: nothing is computed`;
  if (kind === "kv_keep") return `${who} ended, and a KV connector was copying`;
  if (kind === "kv_release") return `the copy for ${who} has ended`;
  if (kind === "hit") return `${who} was admitted and found these tokens cached`;
  if (kind === "cache") return "the block was full: its tokens can be found and reused";
  if (kind === "uncache") return "the step that was to fill it was not run";
  if (kind === "skip") return `no later token of ${who} attends to it`;
  if (kind === "evict") return `${why ? `${name(why.request)} needed a block` : "a block was needed"}, and no empty one was left`;
  if (why?.kind === "finish") return `${who} ended (${lexicon.strings[why.reason]})`;
  if (why?.kind !== "preempt") return `the admission of ${who} was taken back`;
  const cause = { policy_error: "the policy failed", reset_prefix_cache: "the prefix cache was reset", kv_load_failure: "blocks could not be fetched", step_failed: "a step failed" }[lexicon.strings[why.chosen_by]];
  if (cause) return `${who} was preempted (${why.mode}): ${cause}`;
  const needed = why.needed_by === request ? "it needed blocks itself and none were free" : `${name(why.needed_by)} needed blocks and none were free`;
  return `${who} was preempted (${why.mode}, chosen by ${lexicon.strings[why.chosen_by]}): ${needed}`;
}
