"""The page's sampler against the Python sampler: every stage, the probabilities and the token, on the same cases."""

import base64
import json
import math
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling_batches import make_batch, spread

import minivllm.viz
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.random import as_seed, uniforms
from minivllm.sampling.sampler import Sampler

MODULE = Path(minivllm.viz.__file__).parent / "static/sampling.js"
NODE = shutil.which("node")

# `answers(requests)` in JavaScript: what the tests below ask of the module.
ANSWERS = """
const floats = (text) => new Float32Array(bytes(text).buffer);
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const text = (array) => {
  const raw = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  let out = "";
  for (let i = 0; i < raw.length; i += 8192) out += String.fromCharCode(...raw.subarray(i, i + 8192));
  return btoa(out);
};
const answers = (requests) => requests.map(({logits, bitmask, params, ...token}) => {
  token.logits = floats(logits);
  token.bitmask = bitmask === null ? null : bytes(bitmask);
  const stages = [];
  const result = sample(token, params, (name, x) => stages.push([name, text(x)]));
  const {token_id, u, probabilities} = result;
  return {token_id, u, probabilities: text(probabilities), stages, same: text(token.logits) === logits};
});
"""


class Allowing:
    """A grammar that allows the same tokens at every place."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def fill(self, bitmask_row: np.ndarray) -> None:
        bits = np.zeros(32 * len(bitmask_row), np.uint8)
        bits[self.allowed] = 1
        bitmask_row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        return True


@dataclass
class Case:
    params: SamplingParams
    logits: torch.Tensor
    prompt: list[int] = field(default_factory=lambda: [3, 5, 5, 8])
    output: list[int] = field(default_factory=lambda: [2, 5, 2, 2, 9])
    allowed: list[int] | None = None

    def request(self) -> dict[str, Any]:
        """As the page would hold it."""
        bitmask = None
        if self.allowed is not None:
            row = np.zeros(-(-len(self.logits) // 32), np.int32)
            Allowing(self.allowed).fill(row)
            bitmask = base64.b64encode(row.tobytes()).decode()
        p = self.params
        names = ("temperature", "min_p", "top_k", "top_p", "presence_penalty", "frequency_penalty")
        more = ("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words_token_ids", "min_tokens")
        params = {name: getattr(p, name) for name in names + more}
        params |= {"seed": str(p.seed), "stop_token_ids": sorted(p.all_stop_token_ids)}
        place = {"prompt": self.prompt, "output": self.output, "counter": len(self.output)}
        floats = base64.b64encode(self.logits.numpy().tobytes()).decode()
        return {"logits": floats, "bitmask": bitmask, "params": params} | place

    def answer(self) -> dict[str, Any]:
        """Of the Python sampler."""
        stages: list[tuple[str, np.ndarray]] = []
        matchers = None if self.allowed is None else [Allowing(self.allowed)]
        batch = make_batch([self.params], len(self.logits), [self.prompt], [self.output], matchers=matchers)
        output = Sampler()(self.logits.clone()[None], batch, lambda name, x: stages.append((name, x[0].numpy().copy())))
        return {"token_id": int(output.token_ids[0]), "stages": stages}


def with_words(words: list[list[int]], **params: Any) -> SamplingParams:
    made = SamplingParams(bad_words=["w"] * len(words), **params)
    made.bad_words_token_ids = words
    return made


STRUCTURED = {"structured_outputs": {"regex": "a"}}
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 50.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.9},
    "top k": {"top_k": 7},
    "top k of one": {"top_k": 1},
    "top k of all": {"top_k": 1000},
    "top p": {"top_p": 0.9},
    "top p of nearly all": {"top_p": 0.99999},
    "top p of nearly nothing": {"top_p": 1e-6},
    "min p": {"min_p": 0.1},
    "min p of one": {"min_p": 1.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.3},
    "all penalties": {"repetition_penalty": 0.8, "frequency_penalty": 0.4, "presence_penalty": -2.0},
    "bias": {"logit_bias": {0: 5.5, 7: -100.0, 999: 100.0}},
    "allowed": {"allowed_token_ids": [1, 2, 3, 500]},
    "early end": {"min_tokens": 6, "stop_token_ids": [0, 11, 400]},
    "an end that may be": {"min_tokens": 5, "stop_token_ids": [0, 11, 400]},
    "everything": {
        "temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "logit_bias": {4: 3.0, 5: 2.25}, "min_tokens": 9,
        "stop_token_ids": [17],
    },
}  # fmt: skip


SEEDS = [0, 1, 2, -5, 2**64 - 3]


def cases() -> dict[str, Case]:
    """Logits of many sizes under all wishes, each with seeds that reach different tokens."""
    made: dict[str, Case] = {}
    for number, (name, wish) in enumerate(WISHES.items()):
        for seed in range(5):
            logits = spread(1, 1000, seed=100 * number + seed, scale=1.0 + seed)[0]
            made[f"{name}, seed {seed}"] = Case(SamplingParams(seed=SEEDS[seed], **wish), logits)
    words = with_words([[7], [2, 9, 4], [2, 8, 6], [1, 2, 5, 2, 2, 9, 3]], seed=1)
    made["bad words"] = Case(words, spread(1, 1000)[0])
    ties = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.5, -math.inf, -3.0, 1.0])
    made["top k among equals"] = Case(SamplingParams(top_k=2, seed=5), ties, [0], [1])
    made["top p among equals"] = Case(SamplingParams(top_p=0.3, seed=5), ties, [0], [1])
    made["likeliest of equals"] = Case(SamplingParams(temperature=0), ties, [0], [1])
    some = list(range(3, 1000, 17))
    made["grammar"] = Case(SamplingParams(seed=8, **STRUCTURED), spread(1, 1000)[0], allowed=some)
    everything = SamplingParams(seed=9, **(WISHES["everything"] | STRUCTURED))
    made["grammar and everything"] = Case(everything, spread(1, 1000)[0], allowed=some)
    made["no token left"] = Case(SamplingParams(seed=1, allowed_token_ids=[4], **STRUCTURED), ties, [0], [1], [2, 3])
    made["not a number"] = Case(SamplingParams(seed=1), torch.tensor([0.0, math.nan, 1.0]), [0], [1])
    made["infinity"] = Case(SamplingParams(seed=1), torch.tensor([0.0, math.inf, 1.0]), [0], [1])
    made["a whole vocabulary"] = Case(SamplingParams(seed=3, **WISHES["everything"]), spread(1, 49152)[0])
    made["a whole vocabulary, flat"] = Case(SamplingParams(seed=3, temperature=2.0, top_p=0.9), spread(1, 49152)[0])
    return made


CASES = cases()


def in_node(requests: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    assert NODE is not None
    (folder / "sampling.mjs").write_text(MODULE.read_text())
    read = "import {readFileSync} from 'node:fs'; import {sample} from './sampling.mjs';"
    write = "process.stdout.write(JSON.stringify(answers(JSON.parse(readFileSync(0, 'utf8')))));"
    (folder / "run.mjs").write_text(f"{read}\n{ANSWERS}\n{write}")
    done = subprocess.run(
        [NODE, folder / "run.mjs"], input=json.dumps(requests), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_browser(requests: list[dict[str, Any]], page: Any) -> list[dict[str, Any]]:
    module = base64.b64encode(MODULE.read_bytes()).decode()
    load = f"const {{sample}} = await import('data:text/javascript;base64,{module}');"
    return page.evaluate(f"async (requests) => {{ {load} {ANSWERS} return answers(requests); }}", requests)


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the page computes for every case: in node where there is one, else in a browser."""
    requests = [case.request() for case in CASES.values()]
    if NODE:
        got = in_node(requests, tmp_path_factory.mktemp("js"))
    else:
        got = in_browser(requests, request.getfixturevalue("page"))
    return dict(zip(CASES, got, strict=True))


def array(text: str, kind: type = np.float32) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


@pytest.mark.parametrize("name", CASES)
def test_every_stage_and_the_token_are_those_of_the_python_sampler(name, answers):
    expected, got = CASES[name].answer(), answers[name]
    assert got["same"], "the model's logits were overwritten"
    assert [stage for stage, _ in got["stages"]] == [stage for stage, _ in expected["stages"]]
    for (stage, theirs), (_, ours) in zip(got["stages"], expected["stages"], strict=True):
        np.testing.assert_array_equal(np.isneginf(array(theirs)), np.isneginf(ours), err_msg=f"{stage}: survivors")
        np.testing.assert_allclose(array(theirs), ours, rtol=1e-6, atol=1e-6, err_msg=stage)
    assert got["token_id"] == expected["token_id"]
    last = expected["stages"][-1][1].astype(np.float64)
    if np.isfinite(last).any() and not (np.isnan(last).any() or np.isposinf(last).any()):
        reference = np.exp(last - last.max()) / np.exp(last - last.max()).sum()
        np.testing.assert_allclose(array(got["probabilities"], np.float64), reference, rtol=1e-6, atol=1e-12)


def test_uniform_numbers_are_the_same_bits(answers):
    for name, case in CASES.items():
        seed = np.array([as_seed(case.params.seed or 0)])
        expected = None if case.params.is_greedy else uniforms(seed, np.array([len(case.output)]))[0]
        assert answers[name]["u"] == expected


def test_the_cases_reach_every_stage_and_many_tokens(answers):
    ran = {stage for answer in answers.values() for stage, _ in answer["stages"]}
    assert ran == {"model", *(stage.name for stage in Sampler().stages)}
    assert len({answer["token_id"] for answer in answers.values()}) > 40
