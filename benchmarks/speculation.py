"""What does speculative decoding gain? Tokens per second with n-gram and suffix drafts over those without, in one run.

    python benchmarks/speculation.py [--batches 1 16] [--prompts edit chat] [--tokens 96] [--drafts 4] [--rounds 5] [--json FILE]

Three prompts: a letter to be edited, whose answer repeats most of it; code to be edited, which this small model does badly; and a chat,
whose answer is new. Greedy. The last column says whether the answers are those without drafts: a step of another size rounds differently, unless
the backend is batch-invariant, and that can decide between two tokens that are nearly equally likely.
Each round runs all engines in turn, so that what else the machine does meets all alike; a ratio is taken within a round, and the
table shows the median of the rounds. Every request of a batch has its own prompt.

The suffix proposer would know the answers of the rounds before, which are the same: its engine remembers none, but in the row
`suffix, seen`, which shows what a repeated question gains.

With `--train N` heads are trained first, on N answers of the model to questions of the chat's kind about other things, and get a row.

    python benchmarks/speculation.py --verify [--batches 1 16] [--drafts 4] [--rounds 40] [--json FILE]

What does a step cost that verifies 1 + k tokens of each request, against one of a single token? One engine, whose steps carry 0, 1, ... draft tokens
in turn, all of them wrong: neighbours in time, so that what else the machine does meets all alike. The table shows the median of the ratios
of neighbours, and of the milliseconds.

    python benchmarks/speculation.py --gpu [--tokens 512] [--drafts 4] [--acceptance 0.7] [--rounds 5] [--json FILE]

One stream on a GPU: random weights in Qwen3-0.6B's shape, draft tokens that are accepted by chance, against none. Both engines replay
CUDA graphs, and handle outputs while the next step runs; with drafts once without that, too (`async_scheduling=False`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minivllm import LLM, SamplingParams
from minivllm.spec_decode.training import StateCollector, save_medusa, train_medusa

NAMES = (
    "Ada",
    "Ben",
    "Cora",
    "Dan",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Ida",
    "Jack",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ora",
    "Paul",
)
CODE = """class {name}Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""
LETTER = """Dear Mr. Brown,

thank you for your order of the third of May. We are sorry to tell you that the blue chairs are out of stock until the end of June. The
two tables and the lamp will leave our house on Monday and should reach you within four days. If you do not want to wait for the chairs,
we will gladly send you the green ones at the same price, or pay back what you have paid for them. Please let us know which you prefer.

Kind regards,
{name} Miller"""
PROMPTS = {
    "edit": "Rewrite this letter with the name Brown changed to Green:\n\n" + LETTER,
    "code": "Copy this Python code and rename `amount` to `value`. Answer with the code only.\n\n" + CODE,
    "chat": "My friend {name} wants to learn to swim at the age of forty. What would you tell {name}?",
}
OFF: dict[str, Any] | None = None


THINGS = (
    "play the piano", "cook", "draw", "speak Italian", "ride a horse", "write poems", "knit", "garden", "dance", "sing", "ski", "sail",
    "bake bread", "play chess", "juggle", "drive a car", "sew", "paint", "climb", "surf", "fish", "read music", "take photos", "run",
    "skate", "program", "meditate", "box", "row", "fence", "do yoga", "lift weights",
)  # fmt: skip


def trained_heads(model: str, dtype: str, count: int, heads: int, folder: Path) -> Path:
    """Medusa heads from `count` answers of the model, none of which is asked for later."""
    texts = [
        f"My friend {NAMES[i % len(NAMES)]} wants to learn to {THINGS[i % len(THINGS)]} at the age of {20 + i % 50}. What would you tell"
        f" {NAMES[i % len(NAMES)]}?"
        for i in range(count)
    ]
    collector, start = StateCollector(), time.perf_counter()
    config = {"method": collector, "num_speculative_tokens": 1, "dynamic_length": False}
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    with LLM(model, dtype=dtype, max_model_len=512, enable_prefix_caching=False, speculative_config=config) as llm:
        llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=False)
        output = llm.llm_engine.core.executor.runner.model.embedding.float()
    said, last = time.perf_counter(), params.max_tokens or 0
    answers = [(states[-last:], ids[-last - 1 :]) for states, ids in collector.texts()]
    tensors = train_medusa(answers, heads, output, epochs=8, batch_size=256, learning_rate=1e-3)
    tokens, known = sum(len(ids) for _, ids in answers), len(tensors["token_map"])
    print(
        f"{heads} heads, trained on {tokens} tokens, {known} different ones: {said - start:.0f} s to write them,"
        f" {time.perf_counter() - said:.0f} s to train"
    )
    return save_medusa(folder, tensors)


METHODS = ("n-gram", "suffix", "suffix, seen", "medusa")


def engines(model: str, drafts: int, dtype: str, heads: Path | None, methods: Sequence[str]) -> dict[str, LLM]:
    """One engine for each row of the table."""
    suffix = {"method": "suffix", "num_speculative_tokens": drafts}
    configs = {
        "off": OFF,
        "n-gram": {"method": "ngram", "num_speculative_tokens": drafts},
        "suffix": suffix | {"suffix_decoding_max_cached_requests": 0},
        "suffix, seen": suffix,
    }
    if heads is not None:
        configs["medusa"] = {"method": "medusa", "model": str(heads), "num_speculative_tokens": drafts}
    sizes: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 1024,
        "num_gpu_blocks": 2000,
        "enable_prefix_caching": False,
    }
    wanted = {name: config for name, config in configs.items() if name in ("off", *methods)}
    return {name: LLM(model, speculative_config=config, **sizes) for name, config in wanted.items()}


def measure(
    llm: LLM, conversations: list[list[dict[str, str]]], tokens: int
) -> tuple[float, list[list[int]], list[float]]:
    """Seconds, answers, and drafts, draft tokens and accepted tokens of one batch."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    names = [f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    before = llm.get_metrics()
    start = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, llm.get_metrics()
    counts = [after.get(name, 0) - before.get(name, 0) for name in names]
    return seconds, [list(output.outputs[0].token_ids) for output in outputs], counts


class Cycle:
    """Drafts of 0, 1, ... tokens in turn, which are hardly ever right."""

    def __init__(self, most: int) -> None:
        self.most, self.calls = most, 0

    def propose(self, requests: Any, view: Any) -> list[list[int]]:
        n, self.calls = self.calls % (self.most + 1), self.calls + 1
        return [[(int(request.token_ids[-1]) * 7 + 11) % 20_000] * n for request in requests]


def verify_cost(args: argparse.Namespace) -> None:
    """Steps of 1 to `args.drafts` + 1 tokens a request, in turn."""
    rows = []
    for batch in args.batches:
        config = {"method": Cycle(args.drafts), "num_speculative_tokens": args.drafts, "dynamic_length": False}
        limits = {"max_model_len": 1024, "num_gpu_blocks": 1600, "enable_prefix_caching": False}
        params = SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)
        with LLM(args.model, dtype=args.dtype, speculative_config=config, **limits) as llm:
            engine, stats = llm.llm_engine, llm.llm_engine.core.scheduler.spec_stats
            for i in range(batch):
                prompt = {"prompt_token_ids": [(131 * i + 17 * j) % 20_000 + 100 for j in range(200)]}
                engine.add_request(str(i), prompt, params)
            seconds: dict[int, list[float]] = {n: [] for n in range(args.drafts + 1)}
            for _ in range((args.rounds + 3) * (args.drafts + 1)):  # the first prefill and compile
                before, start = stats.num_draft_tokens, time.perf_counter()
                engine.step()
                took = time.perf_counter() - start
                seconds[(stats.num_draft_tokens - before) // batch].append(took)
        of = {n: times[-args.rounds :] for n, times in seconds.items()}
        for n, times in of.items():
            ratio = statistics.median(own / one for own, one in zip(times, of[0], strict=True))
            rows.append({
                "batch": batch, "tokens": n + 1, "ms": round(1e3 * statistics.median(times), 3), "ratio": round(ratio, 3),
                "lowest_ms": round(1e3 * min(times), 3), "lowest_ratio": round(min(times) / min(of[0]), 3),
            })  # fmt: skip
    about = (
        f"{args.model}, {torch.get_num_threads()} threads; steps with 1 to {args.drafts + 1} tokens a request in turn"
    )
    print(f"{about}, {args.rounds} of each, medians (and the lowest)")
    print("batch  tokens  ms a step          over 1 token")
    for row in rows:
        print(
            f"{row['batch']:5}  {row['tokens']:6}  {row['ms']:7.2f} ({row['lowest_ms']:7.2f})  {row['ratio']:5.2f} ({row['lowest_ratio']:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")


def on_gpu(args: argparse.Namespace) -> None:
    """One stream with synthetic acceptance against none, in turns."""
    from engine_gpu import model_folder

    card, few = torch.cuda.get_device_name(), {"num_gpu_blocks": 256, "max_num_seqs": 8, "max_model_len": 2048}
    config = {
        "method": "synthetic",
        "num_speculative_tokens": args.drafts,
        "synthetic_acceptance_rate": args.acceptance,
    }
    engines = {"off": (None, None), "drafts": (config, None), "drafts, waits": (config, False)}
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    prompt = {"prompt_token_ids": [i % 251 for i in range(200)]}
    with tempfile.TemporaryDirectory() as name:
        folder = str(model_folder(Path(name)))
        llms = {
            name: LLM(
                folder, load_format="dummy", dtype="bfloat16", device="cuda", enable_prefix_caching=False,
                speculative_config=drafts, async_scheduling=overlaps, **few,
            )
            for name, (drafts, overlaps) in engines.items()
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in llms}
        steps, per_step = {}, {}
        for turn in range(args.rounds + 1):  # the first compiles kernels and captures graphs
            for name, llm in llms.items():
                core = llm.llm_engine.core
                before, start = core.scheduler.step, time.perf_counter()
                [out] = llm.generate(prompt, params, use_tqdm=False)
                if turn:
                    seconds[name].append(time.perf_counter() - start)
                assert len(out.outputs[0].token_ids) == args.tokens
                steps[name] = core.scheduler.step - before
                per_step[name] = core.scheduler.spec_stats.mean_acceptance_length or 1.0
    rows = []
    for name, took in seconds.items():
        ratios = [off / own for off, own in zip(seconds["off"], took, strict=True)]
        rows.append({
            "drafts": name, "tokens_per_second": round(args.tokens / statistics.median(took), 1), "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios], "ms_per_step": round(1e3 * statistics.median(took) / steps[name], 3),
            "tokens_per_step": round(per_step[name], 3), "graphs": len(llms[name].llm_engine.core.executor.runner.graphs or ()),
        })  # fmt: skip
    about = f"{card}, Qwen3-0.6B's shape, one stream, {args.drafts} drafts, accepted with a chance of {args.acceptance}"
    print(f"{about}; {args.tokens} tokens, medians of {args.rounds} rounds")
    print("drafts         tokens/s  over off  ms a step  tokens a step  graphs")
    for row in rows:
        print(
            f"{row['drafts']:13}  {row['tokens_per_second']:8.1f}  {row['ratio']:8.2f}  {row['ms_per_step']:9.3f}"
            f"  {row['tokens_per_step']:13.2f}  {row['graphs']:6}"
        )
    if args.json:
        result = {"about": about, "rounds": args.rounds, "tokens": args.tokens, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="one stream with synthetic acceptance on a GPU")
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="with --gpu: the chance that a draft token is accepted"
    )
    parser.add_argument("--verify", action="store_true", help="what steps of more tokens cost")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="rows of the table besides `off`; all by default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=PROMPTS)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--train", type=int, default=0, metavar="N", help="train Medusa heads on N answers first")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.gpu:
        if not torch.cuda.is_available():
            print("not run: torch sees no NVIDIA GPU here")
            return
        on_gpu(args)
        return
    if args.verify:
        verify_cost(args)
        return
    with tempfile.TemporaryDirectory() as name:
        heads = None
        if args.train:
            heads = trained_heads(args.model, args.dtype, args.train, args.drafts, Path(name))
        llms = engines(args.model, args.drafts, args.dtype, heads, args.methods or METHODS)
    rows = []
    for batch in args.batches:
        for kind, text in ((kind, PROMPTS[kind]) for kind in args.prompts):
            asked = [[{"role": "user", "content": text.format(name=NAMES[i % len(NAMES)])}] for i in range(batch)]
            ratios: dict[str, list[float]] = {name: [] for name in llms}
            rates, counts, same = {name: [] for name in llms}, {}, dict.fromkeys(llms, True)
            for turn in range(
                args.rounds + 2
            ):  # the first two compile kernels, and time steps for the choice of lengths
                results = {name: measure(llm, asked, args.tokens) for name, llm in llms.items()}
                for name, (seconds, answers, counted) in results.items():
                    same[name] &= answers == results["off"][1]
                    if turn > 1:
                        ratios[name].append(results["off"][0] / seconds)
                        rates[name].append(batch * args.tokens / seconds)
                        counts[name] = [a + b for a, b in zip(counts.get(name, [0, 0, 0]), counted, strict=True)]
            for name in llms:
                _, drafted, accepted = counts[name]
                rows.append({
                    "batch": batch, "prompt": kind, "drafts": name, "same_answers": same[name],
                    "tokens_per_second": round(statistics.median(rates[name]), 1),
                    "ratio": round(statistics.median(ratios[name]), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios[name]],
                    "acceptance": round(accepted / drafted, 3) if drafted else None,
                    "accepted_share": round(accepted / (batch * args.tokens * args.rounds), 3),
                })  # fmt: skip
    about = f"{args.model}, {llms['off'].llm_engine.config.dtype}, {torch.get_num_threads()} threads, drafts of at most {args.drafts}"
    print(f"{about}; {args.tokens} tokens a request, medians of {args.rounds} rounds")
    print("batch  prompt  drafts        tokens/s  over off (of all rounds)  accepted  of all tokens  same answers")
    for row in rows:
        spread = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        accepted = "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
        print(
            f"{row['batch']:5}  {row['prompt']:6}  {row['drafts']:12}  {row['tokens_per_second']:8.1f}  {spread:24}  {accepted:>8}"
            f"  {row['accepted_share']:13.0%}  {'yes' if row['same_answers'] else 'no'}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"about": about, "rounds": args.rounds, "tokens": args.tokens, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
