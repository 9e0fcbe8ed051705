"""Load generator for an OpenAI-compatible server: arrival process, concurrency, measurement."""

# Generated from nbs/bench/serve.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm.auto import tqdm

from minivllm.bench.datasets import Sample, add_dataset_arguments, samples_for
from minivllm.bench.report import DETAILS, METRICS, Measured, make_report, parse_goodput, render_report
from minivllm.serving.client import bearer, get_json, read_events, request

__all__ = ["add_serve_arguments", "arrival_times", "run_serve"]


def arrival_times(samples: Sequence[Sample], rate: float | None, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """When to send each request, in seconds from the start.

    ``rate``: requests a second, ``inf`` for all at once, None for the dataset's own times (all at once if it has none). The gaps are gamma distributed with
    shape ``burstiness``: 1 is Poisson, smaller comes in bursts, larger is more even. As in vLLM, they are stretched so that the last request comes after exactly n / rate seconds.

    Raises:
        ValueError: a rate or burstiness that is not above 0.
    """
    if rate is None:
        return [sample.arrival_time or 0.0 for sample in samples]
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"request rate and burstiness must be above 0, got {rate} and {burstiness}")
    if rate == float("inf"):
        return [0.0] * len(samples)
    moments = np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), len(samples)))
    return [float(moment) for moment in moments * (len(samples) / rate / moments[-1])]


@dataclass(frozen=True)
class Target:
    """Where requests go, and in which form.

    Attributes:
        backend: "openai" sends token ids to /v1/completions, "openai-chat" text to /v1/chat/completions.
        endpoint: another path. headers, extra_body: of every request.
        decode: from token ids to text, for "openai-chat".
    """

    base_url: str
    model: str
    backend: str = "openai"
    endpoint: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    insecure: bool = False
    decode: Callable[[list[int]], str] = str

    @property
    def url(self) -> str:
        path = "/v1/chat/completions" if self.backend == "openai-chat" else "/v1/completions"
        return self.base_url.rstrip("/") + (self.endpoint or path)

    def body(self, sample: Sample) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.backend == "openai-chat":
            body["messages"] = [{"role": "user", "content": self.decode(sample.prompt_token_ids)}]
            body["max_completion_tokens"] = sample.output_len
        else:
            body |= {"prompt": sample.prompt_token_ids, "max_tokens": sample.output_len}
        return body | self.extra_body

    async def measure(self, sample: Sample, clock: Callable[[], float]) -> Measured:
        """Send a request and note when its tokens come. An error is noted, not raised."""
        found = Measured(len(sample.prompt_token_ids), start=clock())
        last = found.start
        try:
            async with request("POST", self.url, self.body(sample), self.headers, self.insecure) as response:
                async for event in read_events(response.aiter_lines()):
                    now = clock()
                    for choice in event["choices"]:
                        chat = self.backend == "openai-chat"
                        piece = (choice.get("delta") or {}).get("content") if chat else choice["text"]
                        if not piece and choice.get("finish_reason") is None:
                            continue
                        if found.ttft == 0.0:
                            found.ttft = now - found.start
                        else:
                            found.itl.append(now - last)
                        last = now
                        found.text += piece or ""
                    if usage := event.get("usage"):
                        found.output_len, found.prompt_len = usage["completion_tokens"], usage["prompt_tokens"]
            found.latency = last - found.start
            found.success = found.output_len > 0
            found.error = "" if found.success else "no token, or no usage, came"
        except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
            found.error = f"{type(error).__name__}: {error}"
        return found


async def run_load(
    target: Target, samples: Sequence[Sample], moments: Sequence[float], *,
    max_concurrency: int | None = None, progress: Callable[[int], Any] = lambda done: None,
) -> tuple[list[Measured], float]:  # fmt: skip
    """Send every request at its moment. Returns what each met, and the seconds that it all took."""
    gate = asyncio.Semaphore(max_concurrency or len(samples))
    begin = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - begin

    async def one(sample: Sample, moment: float) -> Measured:
        await asyncio.sleep(moment - clock())
        async with gate:
            found = await target.measure(sample, clock)
        progress(1)
        return found

    found = await asyncio.gather(*(one(sample, moment) for sample, moment in zip(samples, moments, strict=True)))
    return list(found), clock()


_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags of `bench serve`."""
    backends = ["openai", "openai-chat"]
    parser.add_argument("--backend", choices=backends, default="openai", help="completions or chat (default: openai)")
    parser.add_argument("--base-url", metavar="URL", help="http://host:port; default: from --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    parser.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions")
    parser.add_argument("--api-key", help="sent as Authorization: Bearer")
    parser.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="further headers")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    parser.add_argument("--model", help="name in the requests; default: the first that the server has")
    parser.add_argument("--tokenizer", help="alias, folder or hub id; default: what the server says its model is")
    rate = "requests a second, or inf; default: the dataset's own times"
    parser.add_argument("--request-rate", type=float, help=rate)
    parser.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson, smaller is burstier (default: 1)")
    parser.add_argument("--max-concurrency", type=int, help="most open requests")
    parser.add_argument("--num-warmups", type=int, default=0, help="requests before, that do not count (default: 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="answers are as long as the dataset says")
    parser.add_argument("--extra-body", type=json.loads, metavar="JSON", help="merged into every request")
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="of every request")
    parser.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="(default: all: ttft,tpot,itl,e2el)")
    parser.add_argument("--metric-percentiles", default="99", help="such as 25,50,99 (default: 99)")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="goals for ttft, tpot, e2el, in ms")
    parser.add_argument("--save-result", action="store_true", help="write a JSON file")
    parser.add_argument("--save-detailed", action="store_true", help="with one entry for each request")
    parser.add_argument("--result-dir", default=".", help="(default: here)")
    parser.add_argument("--result-filename", help="default: from rate, model and time")
    parser.add_argument("--label", help="kept in the result")
    parser.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="kept in the result")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_dataset_arguments(parser)


def _pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    found = dict(word.partition("=")[::2] for word in words)
    if not all("=" in word for word in words):
        raise ValueError(f"{flag} takes NAME=VALUE, got {' '.join(words)!r}")
    return found


def run_serve(args: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """`bench serve`: load a server and report. Returns 1 if no request succeeded.

    Raises:
        ValueError: a bad flag. OSError, ServerError: the server does not answer.
    """
    from minivllm.models.hub import resolve_model
    from minivllm.models.tokenizer import get_tokenizer

    metrics = args.percentile_metrics.split(",")
    if unknown := set(metrics) - set(METRICS):
        raise ValueError(f"--percentile-metrics takes {', '.join(METRICS)}; got {', '.join(sorted(unknown))}")
    goals, percentiles = parse_goodput(args.goodput), [float(p) for p in args.metric_percentiles.split(",")]
    base = args.base_url or f"http://{args.host}:{args.port}"
    headers = bearer(args.api_key) | _pairs(args.header, "--header")
    cards = asyncio.run(get_json(base.rstrip("/") + "/v1/models", headers, args.insecure))["data"]
    card = next((card for card in cards if args.model in (None, card["id"])), None)
    if card is None:
        raise ValueError(f"--model {args.model}: the server has {', '.join(card['id'] for card in cards)}")
    tokenizer_id = args.tokenizer or card.get("root") or card["id"]
    tokenizer = get_tokenizer(resolve_model(tokenizer_id))
    samples = samples_for(args, tokenizer, card.get("max_model_len") or 1 << 30, out)
    more = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    more |= ({"ignore_eos": True} if args.ignore_eos else {}) | (args.extra_body or {})
    target = Target(
        base, card["id"], args.backend, args.endpoint, headers, more, args.insecure,
        decode=lambda ids: str(tokenizer.decode(ids)),
    )  # fmt: skip
    moments = arrival_times(samples, args.request_rate, args.burstiness, args.seed)
    with tqdm(total=len(samples), disable=args.disable_tqdm or not sys.stderr.isatty()) as bar:

        async def everything() -> tuple[list[Measured], float]:
            if args.num_warmups:
                warm = [samples[i % len(samples)] for i in range(args.num_warmups)]
                await run_load(target, warm, [0.0] * len(warm), max_concurrency=args.max_concurrency)
            return await run_load(target, samples, moments, max_concurrency=args.max_concurrency, progress=bar.update)

        found, duration = asyncio.run(everything())
    report = make_report(found, duration, percentiles=percentiles, metrics=metrics, goals=goals)
    print(render_report(report, metrics), file=out)
    for text in sorted({measured.error for measured in found if measured.error})[:3]:
        print("an error:", text, file=out)
    if args.save_result or args.save_detailed:
        print("result:", _save(args, report, card["id"], tokenizer_id), file=out)
    return 0 if report["completed"] else 1


def _save(args: argparse.Namespace, report: dict[str, Any], model: str, tokenizer: str) -> Path:
    now, rate = time.strftime("%Y%m%d-%H%M%S"), args.request_rate
    rate = "inf" if rate in (None, float("inf")) else rate
    facts = {
        "date": now, "endpoint_type": args.backend, "backend": args.backend, "label": args.label,
        "model_id": model, "tokenizer_id": tokenizer,
        "num_prompts": args.num_prompts, **_pairs(args.metadata, "--metadata"), "request_rate": rate, "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }  # fmt: skip
    name = f"{args.label or args.backend}-{rate}qps-{Path(model).name}-{now}.json"
    path = Path(args.result_dir) / (args.result_filename or name)
    kept = {name: value for name, value in report.items() if args.save_detailed or name not in DETAILS}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts | kept), encoding="utf-8")
    return path
