"""Datasets, arrivals, figures and reports of the benchmark, by hand and against a live server."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer, live_server
from tiny_models import tiny_model_path

from minivllm.bench import main, make_parser
from minivllm.bench.datasets import Sample, prefix_repetition_samples, random_samples, samples_for
from minivllm.bench.report import Measured, make_report, parse_goodput
from minivllm.bench.serve import arrival_times
from minivllm.core.config import EngineArgs
from minivllm.lab.readers import read_workload
from minivllm.serving.app import ServerOptions

__all__ = ["tiny_model_path"]

TOKENS = np.arange(10, 60)


@pytest.fixture(scope="module")
def args(tiny_model_path: Any) -> EngineArgs:
    return EngineArgs(model=str(tiny_model_path("llama")), dtype="float32", num_gpu_blocks=128, max_num_seqs=16)


@pytest.fixture(scope="module")
def server(args: EngineArgs) -> Iterator[LiveServer]:
    with live_server(args, ServerOptions(served_model_name=["tiny"], api_key=["k"])) as live:
        yield live


def test_arrivals():
    samples = [Sample([1], 1, float(i)) for i in range(400)]
    assert arrival_times(samples, None) == [float(i) for i in range(400)]
    assert arrival_times(samples, float("inf")) == [0.0] * 400
    gaps = {b: np.diff(arrival_times(samples, 8.0, b)) for b in (0.2, 1.0, 50.0)}
    for burstiness, found in gaps.items():
        assert found.min() >= 0 and abs(found.std() * 8 - burstiness**-0.5) < 0.35 * burstiness**-0.5
    assert arrival_times(samples, 8.0)[-1] == pytest.approx(50.0)
    assert (
        arrival_times(samples, 8.0, seed=3)
        == arrival_times(samples, 8.0, seed=3)
        != arrival_times(samples, 8.0, seed=4)
    )
    with pytest.raises(ValueError, match="above 0, got 0"):
        arrival_times(samples, 0.0)
    with pytest.raises(ValueError, match="burstiness must be above 0, got None and 0"):
        arrival_times(samples, None, 0.0)


def test_made_up_datasets():
    made = random_samples(TOKENS, 200, 20, 10, range_ratio=0.5, prefix_len=3, seed=1)
    lengths = [len(sample.prompt_token_ids) for sample in made]
    assert min(lengths) == 13 and max(lengths) == 33 and {s.output_len for s in made} == set(range(5, 16))
    assert len({tuple(sample.prompt_token_ids[:3]) for sample in made}) == 1
    assert {token for sample in made for token in sample.prompt_token_ids} <= set(TOKENS.tolist())
    assert made == random_samples(TOKENS, 200, 20, 10, range_ratio=0.5, prefix_len=3, seed=1)
    repeated = prefix_repetition_samples(TOKENS, 20, 8, 2, 4, 5)
    assert len({tuple(sample.prompt_token_ids[:8]) for sample in repeated}) == 4 and len(repeated) == 20
    with pytest.raises(ValueError, match="range_ratio"):
        random_samples(TOKENS, 1, 1, 1, range_ratio=1.0)


class Words:
    """A tokenizer of words."""

    all_special_ids = (0,)

    def __len__(self) -> int:
        return 50

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1 + len(word) for word in text.split()]


def test_files(tmp_path: Path):
    talk = [{"conversations": [{"from": "human", "value": "a bb ccc"}, {"from": "gpt", "value": "dddd e"}]}]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,5,3\n2023-11-16 18:00:01.5,900,3\n"
    (tmp_path / "azure.csv").write_text(csv)
    flags = ["serve", "--dataset-path"]
    talked = make_parser().parse_args([*flags, str(tmp_path / "talk.json"), "--dataset-name", "sharegpt"])
    said = io.StringIO()
    assert samples_for(talked, Words(), 100, said) == [Sample([2, 3, 4], 2)] and not said.getvalue()
    azure = make_parser().parse_args([*flags, str(tmp_path / "azure.csv"), "--dataset-name", "workload"])
    (only,) = samples_for(azure, Words(), 100, said)
    assert said.getvalue().startswith("1 request")
    assert (len(only.prompt_token_ids), only.output_len, only.arrival_time) == (5, 3, 0.0)
    assert all(0 < token < 50 for token in only.prompt_token_ids)
    with pytest.raises(ValueError, match="--dataset-path is needed"):
        samples_for(make_parser().parse_args(["serve", "--dataset-name", "sharegpt"]), Words(), 100, said)


def test_figures_by_hand():
    requests = [
        Measured(10, 0.0, True, 1.0, 0.2, [0.4, 0.4], 3, "abc"),
        Measured(20, 0.5, True, 0.1, 0.1, [], 1, "a"),
        Measured(30, 0.6, False, error="OSError: no"),
    ]
    report = make_report(requests, 2.0, percentiles=[50, 99], goals=parse_goodput(["ttft:150", "tpot:500"]))
    expected = {
        "completed": 2, "failed": 1, "total_input_tokens": 30, "total_output_tokens": 4, "request_throughput": 1.0,
        "output_throughput": 2.0, "total_token_throughput": 17.0, "request_goodput": 0.5, "max_concurrent_requests": 2,
        "mean_ttft_ms": 150.0, "median_ttft_ms": 150.0, "mean_tpot_ms": 400.0, "mean_itl_ms": 400.0, "p50_e2el_ms": 550.0,
        "max_output_tokens_per_s": 3,
    }  # fmt: skip
    assert {name: report[name] for name in expected} == pytest.approx(expected)
    assert report["p99_ttft_ms"] == pytest.approx(float(np.percentile([200, 100], 99)))
    for wrong in ("ttft", "itl:5", "tpot:-1"):
        with pytest.raises(ValueError, match="a goal is"):
            parse_goodput([wrong])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_live_server(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str):
    flags = [
        "serve",
        "--base-url",
        server.url,
        "--api-key",
        "k",
        "--backend",
        backend,
        "--num-prompts",
        "6",
        "--ignore-eos",
    ]
    flags += ["--random-input-len", "9", "--random-output-len", "5", "--request-rate", "200", "--goodput", "e2el:60000"]
    flags += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "out.json"]
    if backend == "openai-chat":
        flags += ["--extra-body", '{"add_generation_prompt": true}', "--max-concurrency", "2"]
    assert main(flags) == 0
    assert "Successful requests:" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["model_id"] == "tiny" and result["request_rate"] == 200.0 and result["errors"] == [""] * 6
    assert all(result["ttfts"]) and result["mean_ttft_ms"] <= result["mean_e2el_ms"] and result["p99_itl_ms"] > 0
    if backend == "openai":
        assert result["input_lens"] == [9] * 6
        workload = list(read_workload(tmp_path / "out.json"))
        assert [(r.num_prompt_tokens, r.num_output_tokens) for r in workload] == [(9, 5)] * 6
    else:
        assert result["max_concurrent_requests"] <= 2


def test_what_is_wrong_is_said(server: LiveServer):
    url = ["serve", "--base-url", server.url]
    with pytest.raises(RuntimeError, match="answered 401: the API key"):
        main(url)
    with pytest.raises(ValueError, match="--model other: the server has tiny"):
        main([*url, "--api-key", "k", "--model", "other"])
    with pytest.raises(ValueError, match="percentile-metrics takes"):
        main([*url, "--api-key", "k", "--percentile-metrics", "speed"])
    for wrong in (
        ["--max-concurrency", "0"],
        ["--num-warmups", "-1"],
        ["--metric-percentiles", "200"],
        ["--metric-percentiles", "x"],
    ):
        with pytest.raises(
            ValueError, match=rf"{wrong[0]} .*, got .*{wrong[1]}|{wrong[0]} takes numbers .*; got {wrong[1]}"
        ):
            main([*url, "--api-key", "k", *wrong])
    with pytest.raises(ValueError, match="no request of the dataset fits"):
        main([*url, "--api-key", "k", "--random-input-len", "100000"])
    with pytest.raises(OSError):
        main(["serve", "--base-url", "http://127.0.0.1:9"])


def test_errors_are_counted(server: LiveServer, capsys: pytest.CaptureFixture[str]):
    flags = ["serve", "--base-url", server.url, "--api-key", "k", "--num-prompts", "3", "--random-input-len", "4"]
    assert main([*flags, "--random-output-len", "3", "--temperature", "9"]) == 1
    out = capsys.readouterr().out
    assert "Failed requests:" in out and "ServerError: the server answered 400: temperature" in out


def test_offline(args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "engine.yaml"
    config.write_text(
        f"model: {args.model}\ndtype: float32\nnum_gpu_blocks: 64\nnum-prompts: 5\nenable_prefix_caching: false\n"
    )
    path = tmp_path / "out.json"
    common = ["--config", str(config), "--input-len", "8", "--output-len", "4", "--output-json", str(path)]
    assert main(["throughput", *common, "--num-prompts", "3"]) == 0
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (3, 36)
    common[1] = str(tmp_path / "latency.yaml")
    (tmp_path / "latency.yaml").write_text(config.read_text().replace("num-prompts: 5\n", ""))
    assert main(["latency", *common, "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "0"]) == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3 and set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert "Throughput:" in (out := capsys.readouterr().out) and "Avg latency:" in out
