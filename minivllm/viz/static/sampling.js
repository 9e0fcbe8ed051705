// The sampler of minivllm/sampling, once more, for the page: the same stages in the same order, rounded to float32 where
// the Python rounds. `tests/viz/test_sampling_js.py` holds the two against each other.
//
// token:  {logits: Float32Array [V], prompt: [id], output: [id], counter: number of output tokens, bitmask: Uint8Array | null}
//         bitmask: one bit a token, lowest bit first; 1 where the grammar allows the token.
// params: the fields of SamplingParams: temperature, min_p, top_k, top_p, presence_penalty, frequency_penalty,
//         repetition_penalty, logit_bias {id: bias}, allowed_token_ids, bad_words_token_ids [[id]], min_tokens,
//         stop_token_ids [id] (every id that ends an output), seed (a decimal string or an integer).

const GREEDY_BELOW = 1e-5;
const NEVER = -Infinity;
const f32 = Math.fround;

export const isGreedy = (params) => (params.temperature ?? 1) < GREEDY_BELOW;

// ---- the stages: each changes `x` in place, and is skipped where `wanted` says so -----------------------------------

function forbidWhere(x, isForbidden) {
  for (let i = 0; i < x.length; i++) if (isForbidden(i)) x[i] = NEVER;
}

function keepFrom(x, threshold) {
  for (let i = 0; i < x.length; i++) if (!(x[i] >= threshold)) x[i] = NEVER;
}

export function largest(x) {
  let best = NEVER;
  for (let i = 0; i < x.length; i++) if (x[i] > best) best = x[i];
  return best;
}

/** The finite logits, largest first: a Float32Array. */
function descending(x) {
  return x.filter((value) => value > NEVER).sort().reverse();
}

function penalise(x, token, params) {
  const repetition = f32(params.repetition_penalty ?? 1);
  const frequency = f32(params.frequency_penalty ?? 0);
  const presence = f32(params.presence_penalty ?? 0);
  const counts = new Map(token.prompt.map((id) => [id, 0]));
  for (const id of token.output) counts.set(id, (counts.get(id) ?? 0) + 1);
  for (const [id, count] of counts) {
    const repeated = f32(x[id] > 0 ? x[id] / repetition : x[id] * repetition);
    x[id] = f32(repeated - f32(frequency * count)) - (count > 0 ? presence : 0);
  }
}

function topPThreshold(x, topP) {
  const values = descending(x);
  const weights = Array.from(values, (value) => Math.exp(value - values[0]));
  const wanted = topP * weights.reduce((sum, weight) => sum + weight, 0);
  let reached = 0;
  for (let i = 0; i < values.length; i++) {
    reached += weights[i];
    if (reached >= wanted) return values[i];
  }
  return values.length ? values[values.length - 1] : NEVER;
}

const endsWith = (list, tail) => tail.every((id, i) => list[list.length - tail.length + i] === id);

const filters = (params) => !isGreedy(params);

/** In the order of vLLM and of `minivllm.sampling.transforms.standard_stages`. */
export const STAGES = [
  {
    name: "grammar",
    does: "forbids what the grammar does not allow next",
    wanted: (token, params) => token.bitmask && params.grammar !== false,
    apply: (x, token) => forbidWhere(x, (i) => !((token.bitmask[i >> 3] >> (i & 7)) & 1)),
  },
  {
    name: "allowed_token_ids",
    does: "forbids all other tokens",
    wanted: (token, params) => params.allowed_token_ids?.length,
    apply: (x, token, params) => {
      const allowed = new Set(params.allowed_token_ids);
      forbidWhere(x, (i) => !allowed.has(i));
    },
  },
  {
    name: "logit_bias",
    does: "adds a bias to some tokens",
    wanted: (token, params) => Object.keys(params.logit_bias ?? {}).length,
    apply: (x, token, params) => {
      for (const [id, bias] of Object.entries(params.logit_bias)) x[id] = x[id] + f32(bias);
    },
  },
  {
    name: "bad_words",
    does: "forbids the last token of a bad word",
    wanted: (token, params) => params.bad_words_token_ids?.length,
    apply: (x, token, params) => {
      for (const ids of params.bad_words_token_ids) {
        const begun = ids.slice(0, -1);
        if (token.output.length >= begun.length && endsWith(token.output, begun)) x[ids[ids.length - 1]] = NEVER;
      }
    },
  },
  {
    name: "min_tokens",
    does: "forbids an early end",
    wanted: (token, params) => (params.min_tokens ?? 0) > token.counter && params.stop_token_ids?.length,
    apply: (x, token, params) => {
      for (const id of params.stop_token_ids) if (id < x.length) x[id] = NEVER;
    },
  },
  {
    name: "penalties",
    does: "repetition, frequency, presence of tokens that occurred",
    wanted: (token, params) =>
      (params.presence_penalty ?? 0) !== 0 ||
      (params.frequency_penalty ?? 0) !== 0 ||
      (params.repetition_penalty ?? 1) !== 1,
    apply: penalise,
  },
  {
    name: "temperature",
    does: "divides by the temperature",
    wanted: (token, params) => filters(params) && (params.temperature ?? 1) !== 1,
    apply: (x, token, params) => {
      const temperature = f32(params.temperature);
      for (let i = 0; i < x.length; i++) x[i] = x[i] / temperature;
    },
  },
  {
    name: "min_p",
    does: "keeps tokens at least min_p times as likely as the likeliest",
    wanted: (token, params) => filters(params) && (params.min_p ?? 0) > 0,
    apply: (x, token, params) => keepFrom(x, f32(largest(x) + f32(Math.log(f32(params.min_p))))),
  },
  {
    name: "top_k",
    does: "keeps the k likeliest tokens",
    wanted: (token, params) => filters(params) && params.top_k > 0 && params.top_k < token.logits.length,
    apply: (x, token, params) => keepFrom(x, descending(x)[params.top_k - 1] ?? NEVER),
  },
  {
    name: "top_p",
    does: "keeps the likeliest tokens with probability p in all",
    wanted: (token, params) => filters(params) && (params.top_p ?? 1) < 1,
    apply: (x, token, params) => keepFrom(x, topPThreshold(x, params.top_p)),
  },
];

// ---- the draw --------------------------------------------------------------------------------------------------------

const MASK = (1n << 64n) - 1n;
const GAMMA = 0x9e3779b97f4a7c15n;

function mix64(x) {
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

/** The uniform number in [0, 1) of (seed, number of output tokens): the bits of `sampling.random.uniforms`. */
export function uniform(seed, counter) {
  const key = mix64((BigInt.asUintN(64, BigInt(seed)) + GAMMA) & MASK);
  const bits = mix64((key + (BigInt(counter) + 1n) * GAMMA) & MASK);
  return Number(bits >> 11n) * 2 ** -53;
}

/** Probabilities of logits: Float64Array [V], 0 where the logit is minus infinity. */
export function softmax(x) {
  const peak = largest(x);
  const p = new Float64Array(x.length);
  if (peak === NEVER) return p;
  let total = 0;
  for (let i = 0; i < x.length; i++) total += p[i] = Math.exp(x[i] - peak);
  for (let i = 0; i < x.length; i++) p[i] /= total;
  return p;
}

/** Inverse CDF in the order of the token ids: the first token at which the sum of the probabilities exceeds u. */
export function draw(p, u) {
  let total = 0;
  for (let i = 0; i < p.length; i++) total += p[i];
  let reached = 0;
  let last = -1;
  for (let i = 0; i < p.length; i++) {
    if (!(p[i] > 0)) continue;
    reached += p[i];
    last = i;
    if (reached > u * total) return i;
  }
  return last;
}

/**
 * Choose a token. `observe(name, logits)` is called with the logits before the first and after every stage that ran
 * (they are overwritten later: copy what is to be kept). Returns {token_id, u, probabilities, logits}; token_id is -1 when
 * nothing can be drawn, u is null for greedy.
 */
export function sample(token, params, observe = () => {}) {
  const x = Float32Array.from(token.logits);
  observe("model", x);
  for (const stage of STAGES) {
    if (!stage.wanted(token, params)) continue;
    stage.apply(x, token, params);
    observe(stage.name, x);
  }
  const probabilities = softmax(x);
  const broken = x.some((value) => !(value < Infinity)) || largest(x) === NEVER;
  const u = isGreedy(params) ? null : uniform(params.seed ?? 0, token.counter);
  let chosen = -1;
  if (!broken) chosen = u === null ? x.indexOf(largest(x)) : draw(probabilities, u);
  return { token_id: chosen, u, probabilities, logits: x };
}

// ---- what the stages did to one token's odds, in numbers that can be drawn

// Every stage that ran, with its probabilities and how many tokens it left; and the token: see `sample`.
export function explain(token, params) {
  const stages = [];
  const result = sample(token, params, (name, x) => {
    let kept = 0;
    for (let i = 0; i < x.length; i++) if (x[i] > -Infinity) kept++;
    stages.push({ name, probabilities: softmax(x), kept });
  });
  return { ...result, stages };
}

// The ids of the n largest values, largest first; none whose value is 0.
export function topIds(p, n) {
  const best = [];
  for (let i = 0; i < p.length; i++) {
    if (!(p[i] > 0) || (best.length === n && p[i] <= p[best[n - 1]])) continue;
    let at = best.length;
    while (at > 0 && p[best[at - 1]] < p[i]) at--;
    best.splice(at, 0, i);
    if (best.length > n) best.pop();
  }
  return best;
}

// The n tokens to tell one by one: likeliest at the end, likeliest for the model, and the chosen one. Likeliest at the end first.
export function rowsOf(explained, n) {
  const first = explained.stages[0].probabilities;
  const last = explained.stages[explained.stages.length - 1].probabilities;
  const ids = new Set(topIds(last, Math.ceil((2 * n) / 3)));
  if (explained.token_id >= 0) ids.add(explained.token_id);
  for (const id of topIds(first, n)) if (ids.size < n) ids.add(id);
  return [...ids].sort((a, b) => last[b] - last[a] || first[b] - first[a] || a - b);
}

// The interval [0, 1) as the draw sees it, cut by the surviving tokens in the order of their ids. Pieces are {id, start, end}; a run
// of tokens that are not listed is one piece without an id.
export function pieces(probabilities, listed) {
  const wanted = new Set(listed);
  const out = [];
  let at = 0;
  for (let id = 0; id < probabilities.length; id++) {
    const p = probabilities[id];
    if (!(p > 0)) continue;
    const end = at + p;
    const previous = out[out.length - 1];
    if (wanted.has(id)) out.push({ id, start: at, end });
    else if (previous && previous.id === null) previous.end = end;
    else out.push({ id: null, start: at, end });
    at = end;
  }
  return out;
}
