"""Record the real run that the home page and README's picture show, with the text of its tokens. The files are stored in `site/runs`.

python site/runs.py
"""

import json
from collections.abc import Sequence
from pathlib import Path

from minivllm.core.config import EngineArgs
from minivllm.core.scheduler import VirtualClock
from minivllm.core.trace import Trace
from minivllm.engine.llm_engine import LLMEngine
from minivllm.sampling.params import SamplingParams
from minivllm.viz.block_map import request_tokens

RUNS = Path(__file__).parent / "runs"
LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 48}
SYSTEM = "You are a helpful assistant who answers in one short sentence. Always be polite, precise and brief. "
# The step in which each request arrives, and its prompt.
PROMPTS = [
    (0, SYSTEM + "What is the capital of France?"),
    (2, SYSTEM + "Why is the sky blue?"),
    (4, "Once upon a time there was a paged cache. It had many blocks, and each block had sixteen tokens. One day"),
    (8, SYSTEM + "Name three colours."),
    (12, "def fibonacci(n):"),
    (16, SYSTEM + "How far away is the moon?"),
    (40, SYSTEM + "What is the capital of France? And of Spain?"),
    (56, "The three laws of robotics are"),
]


class Vocabulary:
    """The texts of the tokens of one run, in place of the model's tokenizer."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.texts[str(token)] for token in token_ids)


def record() -> tuple[Trace, LLMEngine]:
    """Eight requests, five of them with a common beginning, in a pool too small for all. The clock stands still: this is no measurement."""
    args = EngineArgs(model="smollm2", dtype="float32", block_size=4, num_gpu_blocks=96, **LIMITS)
    engine = LLMEngine.from_engine_args(args, clock=VirtualClock())
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    waiting = [(at, str(i), prompt) for i, (at, prompt) in enumerate(PROMPTS)]
    with engine.record() as trace:
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0][0] <= step:
                _, request_id, prompt = waiting.pop(0)
                engine.add_request(request_id, prompt, params)
            engine.step()
            step += 1
    trace.check()
    return trace, engine


def load() -> Trace:
    """The stored run; its tokens can be shown as text."""
    trace = Trace.load(RUNS / "run.jsonl")
    trace.tokenizer = Vocabulary(json.loads((RUNS / "tokens.json").read_text()))
    return trace


def main() -> None:
    trace, engine = record()
    trace.save(RUNS / "run.jsonl")
    used = sorted({token for tokens in request_tokens(trace).values() for token in tokens})
    texts = {str(token): engine.tokenizer.decode([token]) for token in used}
    (RUNS / "tokens.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0) + "\n")
    print(trace)


if __name__ == "__main__":
    main()
