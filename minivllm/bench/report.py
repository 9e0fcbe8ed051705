"""Benchmark metrics and report: TTFT, TPOT, ITL, percentiles, goodput."""

# Generated from nbs/bench/report.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["DETAILS", "METRICS", "Measured", "make_report", "meets", "parse_goodput", "render_report"]

METRICS = ("ttft", "tpot", "itl", "e2el")
_TITLES = {
    "ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)", "itl": "Inter-token Latency", "e2el": "End-to-end Latency",
}  # fmt: skip


@dataclass(slots=True)
class Measured:
    """What one request met. Seconds; ``start``: on the benchmark's clock. ``itl``: gaps between the events that carried tokens."""

    prompt_len: int
    start: float = 0.0
    success: bool = False
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


def values_of(metric: str, done: Sequence[Measured]) -> list[float]:
    """All values of a metric, in seconds."""
    if metric == "itl":
        return [gap for request in done for gap in request.itl]
    if metric == "tpot":
        return [request.tpot for request in done if request.tpot is not None]
    return [request.ttft if metric == "ttft" else request.latency for request in done]


def statistics(metric: str, done: Sequence[Measured], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds, under vLLM's names; zeros if there is no value."""
    values = np.array(values_of(metric, done) or [0.0]) * 1000
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{p:g}": np.percentile(values, p) for p in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in found.items()}


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` -> seconds of each goal. Raises ValueError that says what is allowed."""
    goals: dict[str, float] = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            seconds = float(limit) / 1000
        except ValueError:
            seconds = -1.0
        if name not in ("ttft", "tpot", "e2el") or seconds <= 0:
            raise ValueError(f"a goal is ttft, tpot or e2el, a colon, and milliseconds above 0; got {word!r}")
        goals[name] = seconds
    return goals


def meets(request: Measured, goals: dict[str, float]) -> bool:
    """Whether a request met every goal. An answer of one token has no TPOT to miss."""
    found = {"ttft": request.ttft, "tpot": request.tpot or 0.0, "e2el": request.latency}
    return all(found[name] <= limit for name, limit in goals.items())


def peak_concurrency(done: Sequence[Measured]) -> int:
    """The most requests that were open at the same time."""
    changes = sorted([(r.start, 1) for r in done] + [(r.start + r.latency, -1) for r in done])
    return int(np.cumsum([change for _, change in changes]).max(initial=0)) if changes else 0


def peak_tokens_per_second(done: Sequence[Measured]) -> int:
    """The most tokens that came in one second, counted in seconds from the first start."""
    if not done:
        return 0
    first = min(request.start for request in done)
    moments = [r.start - first + r.ttft + np.cumsum([0.0, *r.itl]) for r in done]
    return int(np.bincount(np.concatenate(moments).astype(int)).max())


DETAILS = {
    "input_lens": "prompt_len", "output_lens": "output_len", "start_times": "start", "ttfts": "ttft", "itls": "itl",
    "generated_texts": "text", "errors": "error",
}  # fmt: skip
"""What only ``--save-detailed`` writes, one entry for each request: name of the list -> field of `Measured`."""


def make_report(
    requests: Sequence[Measured], duration: float, *, percentiles: Sequence[float] = (99,),
    metrics: Sequence[str] = METRICS, goals: dict[str, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All figures of a run of ``duration`` seconds. Times are in milliseconds, but for the lists of single values (seconds)."""
    done = [request for request in requests if request.success]
    inputs, outputs = sum(r.prompt_len for r in done), sum(r.output_len for r in done)
    report: dict[str, Any] = {
        "duration": duration, "completed": len(done), "failed": len(requests) - len(done),
        "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(meets(r, goals) for r in done) / duration if goals else None,
        "output_throughput": outputs / duration, "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(done), "max_concurrent_requests": peak_concurrency(done),
    }  # fmt: skip
    for metric in metrics:
        report |= statistics(metric, done, percentiles)
    return report | {name: [getattr(r, kept) for r in requests] for name, kept in DETAILS.items()}


def render_report(report: dict[str, Any], metrics: Sequence[str], title: str = "Serving Benchmark Result") -> str:
    """The figures as a table."""
    rows = [
        ("Successful requests", "completed"), ("Failed requests", "failed"), ("Benchmark duration (s)", "duration"),
        ("Total input tokens", "total_input_tokens"), ("Total generated tokens", "total_output_tokens"),
        ("Request throughput (req/s)", "request_throughput"), ("Request goodput (req/s)", "request_goodput"),
        ("Output token throughput (tok/s)", "output_throughput"), ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
        ("Peak concurrent requests", "max_concurrent_requests"), ("Total token throughput (tok/s)", "total_token_throughput"),
    ]  # fmt: skip
    lines = [f"{f' {title} ':=^60}"]
    for text, name in rows:
        value = report[name]
        if value is not None:
            lines.append(f"{text + ':':<45}" + (f"{value:>15.2f}" if isinstance(value, float) else f"{value:>15}"))
    for metric in metrics:
        lines.append(f"{_TITLES[metric]:-^60}")
        for name, value in report.items():
            if name.endswith(f"_{metric}_ms"):
                which = name.removesuffix(f"_{metric}_ms")
                label = which.upper() if which[0] == "p" else which.capitalize()
                lines.append(f"{f'{label} {metric.upper()} (ms):':<45}{value:>15.2f}")
    return "\n".join([*lines, "=" * 60])
