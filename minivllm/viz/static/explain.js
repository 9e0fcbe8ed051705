// What the stages of the sampler did to one token's odds, in numbers that can be drawn.

import { sample, softmax } from "./sampling.js";

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
