"""Prometheus metrics under vLLM's names."""

# Generated from nbs/serving/metrics.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.outputs import FinishedRequest

_ACCEPTED = "spec_decode_num_accepted_tokens"
_OURS = {"spec_decode_proposer_failed", "weight_version", "num_kv_load_failures"}  # vLLM has no such metrics
_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to be admitted.",
    "kv_cache_usage_perc": "Share of KV blocks in use, 1 is all.",
    "weight_version": "Version of the weights; 0 for those of the start.",
    "spec_decode_proposer_failed": "1 if the proposer of draft tokens has failed and is not called again.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Prompt tokens looked up by the KV connector.",
    "external_prefix_cache_hits": "Prompt tokens that the KV connector had.",
    "num_kv_load_failures": "Steps in which blocks of the KV connector could not be loaded.",
    "num_preemptions": "Preemptions.",
    "prompt_tokens": "Prompt tokens of accepted requests.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Drafts that were verified.",
    "spec_decode_num_draft_tokens": "Tokens of these drafts.",
    _ACCEPTED: "Draft tokens that were accepted.",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_LABELS = ("model_name", "engine")
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between tokens of a request.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
}


class _EngineCollector:
    """Reads the engines' own counters when they are asked for."""

    def __init__(self, llm: Callable[[], AsyncLLM], model_name: str) -> None:
        self.llm, self.model_name = llm, model_name

    def collect(self) -> Iterator[Any]:
        engines = self.llm().get_engine_metrics()
        for kind, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name in filter(engines[0].__contains__, names):
                family = kind(f"{'minivllm' if name in _OURS else 'vllm'}:{name}", names[name], labels=_LABELS)
                for engine, now in enumerate(engines):
                    family.add_metric([self.model_name, str(engine)], now[name])
                yield family
        text = "Draft tokens that were accepted, by place in the draft, from 0."
        family = CounterMetricFamily(f"vllm:{_ACCEPTED}_per_pos", text, labels=[*_LABELS, "position"])
        for engine, now in enumerate(engines):
            for name in [name for name in now if name.startswith(_ACCEPTED + "_per_pos:")]:
                family.add_metric([self.model_name, str(engine), name.rpartition(":")[2]], now[name])
        if family.samples:
            yield family


class Metrics:
    """All metrics of one server, in a separate registry. ``llm``: returns the engine, which may be restarted."""

    def __init__(self, llm: Callable[[], AsyncLLM], model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.registry.register(_EngineCollector(llm, model_name))
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        for engine in range(len(llm().get_engine_metrics())):  # so that they are shown before a request ends
            for histogram in self._histograms.values():
                histogram.labels(model_name, str(engine))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def observe(self, finished: FinishedRequest) -> None:
        """Count a request that has ended, whatever the reason."""
        labels = self.model_name, str(finished.engine)
        for reason in finished.finish_reasons:
            self._success.labels(*labels, reason).inc()
        times, generated = finished.metrics, finished.num_generation_tokens
        values: dict[str, float] = {
            "request_prompt_tokens": finished.num_prompt_tokens, "request_generation_tokens": generated
        }  # fmt: skip
        if times.finished_time is not None:
            values["e2e_request_latency_seconds"] = times.finished_time - times.arrival_time
        if times.first_token_time is not None and times.last_token_time is not None:
            values["time_to_first_token_seconds"] = times.first_token_time - times.arrival_time
            if generated > 1:
                decoding = times.last_token_time - times.first_token_time
                values["request_time_per_output_token_seconds"] = decoding / (generated - 1)
        for name, value in values.items():
            self._histograms[name].labels(*labels).observe(value)
