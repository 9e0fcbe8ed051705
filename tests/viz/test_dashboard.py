"""The monitor looks at an engine from beside, and the dashboard shows what it saw: saved, live in a server."""

import asyncio
import json
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import live_server
from tiny_models import tiny_model_path

import minivllm.viz
from minivllm import LLM, SamplingParams
from minivllm.core.config import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.serving.app import ServerOptions
from minivllm.viz import Dashboard, EngineMonitor

__all__ = ["tiny_model_path"]


class FakeEngine:
    """Counters that a test sets."""

    def __init__(self, **metrics):
        self.metrics = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0}
        names = ("num_steps", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
        self.metrics |= dict.fromkeys(names, 0) | metrics
        self.now = 100.0

    def get_metrics(self):
        return self.metrics

    def move(self, seconds, **metrics):
        self.now += seconds
        self.metrics = self.metrics | metrics


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine(num_requests_running=2, num_steps=10, generation_tokens=500, prefix_cache_queries=64)
    monkeypatch.setattr("minivllm.viz.monitor.time.monotonic", lambda: engine.now)
    return engine


def test_rates_are_over_the_last_second_and_counters_from_the_start(engine):
    monitor = EngineMonitor(engine)
    first = monitor.look()
    assert first[:6] == (0, 0.0, 2, 0, 0.0, None) and first[6:] == (0.0, None, 0, 0)
    engine.move(
        0.5, num_steps=20, generation_tokens=520, prefix_cache_queries=164, prefix_cache_hits=25, num_preemptions=1
    )
    second = monitor.look()
    assert (second.tokens_per_second, second.step_seconds, second.hit_rate) == (40.0, 0.05, 0.25)
    assert (second.steps, second.preemptions, second.time) == (10, 1, 0.5)
    for _ in range(4):
        engine.move(
            0.5, generation_tokens=engine.metrics["generation_tokens"] + 5, num_steps=engine.metrics["num_steps"] + 1
        )
        last = monitor.look()
    assert (last.tokens_per_second, last.step_seconds, last.hit_rate) == (10.0, 0.5, 0.25)


def test_an_idle_engine_has_no_slow_step(engine):
    monitor = EngineMonitor(engine)
    monitor.look()
    engine.move(0.1, num_steps=11, num_requests_running=0)
    assert monitor.look().step_seconds is None  # it ended some time within
    engine.move(5)
    assert (monitor.look().step_seconds, monitor.samples[-1].tokens_per_second) == (None, 0.0)
    engine.move(0.1, num_requests_running=1)
    monitor.look()
    engine.move(0.2, num_steps=15)
    assert monitor.look().step_seconds == pytest.approx(0.05)


def test_a_step_longer_than_a_second_has_a_rate(engine):
    """Eight requests in steps of two and a half seconds, looked at twenty times a second."""
    engine.move(0, num_requests_running=8)
    monitor = EngineMonitor(engine)
    seen = []
    for look in range(200):
        done = look // 50  # steps that have ended
        engine.move(0.05, num_steps=10 + done, generation_tokens=500 + 8 * done)
        seen.append(monitor.look())
    later = seen[60:]
    assert all(sample.step_seconds is not None and sample.tokens_per_second > 0 for sample in later)
    assert all(1.5 < sample.tokens_per_second < 9 for sample in later)
    engine.move(2, num_requests_running=0)
    monitor.look()
    engine.move(2)
    assert monitor.look().tokens_per_second == 0.0, "an idle engine has none"


def test_samples_are_remembered_up_to_a_length(engine):
    monitor = EngineMonitor(engine, keep=3)
    for _ in range(5):
        engine.move(0.05)
        monitor.look()
    assert [sample.number for sample in monitor.samples] == [2, 3, 4]
    assert [sample.number for sample in monitor.since(2)] == [3, 4] and monitor.since(4) == []
    assert list(monitor.to_pandas().index) == [2, 3, 4]


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="needs an LLM, LLMEngine or AsyncLLM, got str"):
        EngineMonitor("llm")
    with pytest.raises(ValueError, match=r"rate must be in \(0, 100\] looks a second, got 0"):
        Dashboard(FakeEngine(), rate=0)
    with pytest.raises(ValueError, match="keep must be at least 2"):
        EngineMonitor(FakeEngine(), keep=1)


def monitors():
    return [thread for thread in threading.enumerate() if thread.name == "minivllm-monitor"]


def test_it_starts_stops_and_goes_on():
    heard: list = []
    monitor = EngineMonitor(FakeEngine(), rate=100, on_sample=heard.append, on_end=heard.append)
    with monitor:
        assert monitor.start() is monitor and len(monitors()) == 1
        while len(heard) < 5:
            time.sleep(0.005)
    assert monitors() == [] and not monitor.running and heard[-1] == monitor.ended == "stopped"
    assert heard[:-1] == list(monitor.samples)
    monitor.stop()
    monitor.start()
    while len(heard) < 12:
        time.sleep(0.005)
    monitor.stop()
    assert [sample.number for sample in monitor.samples] == list(range(len(monitor.samples)))


def test_an_engine_that_breaks_ends_the_monitor_and_nothing_else():
    engine = FakeEngine()
    monitor = EngineMonitor(engine, rate=100).start()
    engine.metrics = {}
    while not monitor.ended:
        time.sleep(0.005)
    assert monitor.ended == "KeyError: 'num_requests_running'" and not monitor.running


@pytest.fixture(scope="module")
def path(tiny_model_path):
    return str(tiny_model_path("llama"))


LONG = SamplingParams(max_tokens=240, ignore_eos=True)


def saw_the_run(monitor):
    """Busy in the middle, at rest at the end, all steps counted."""
    until = time.monotonic() + 5
    while monitor.samples[-1].running and time.monotonic() < until:  # the last look may be older than the end
        time.sleep(0.02)
    samples = list(monitor.samples)
    assert max(sample.running for sample in samples) > 1 and max(sample.kv_usage for sample in samples) > 0
    assert (samples[-1].running, samples[-1].waiting, samples[-1].kv_usage) == (0, 0, 0)
    assert samples[-1].steps >= 240
    assert any(sample.step_seconds for sample in samples) and max(sample.tokens_per_second for sample in samples) > 0


def test_an_llm_that_another_thread_steps(path):
    with LLM(path, dtype="float32", num_gpu_blocks=128) as llm:
        with Dashboard(llm, rate=50) as dashboard:
            thread = threading.Thread(target=lambda: llm.generate(["a", "b", "c"], LONG, use_tqdm=False))
            thread.start()
            thread.join()
        saw_the_run(dashboard.monitor)
        assert "running" in dashboard.summary() and "tokens/s" in dashboard.summary()
        assert dashboard.to_png()[:4] == b"\x89PNG"
        again = Dashboard(llm, rate=50).start()
    while not again.monitor.ended:
        time.sleep(0.01)
    assert again.monitor.ended == "the engine was closed"


@pytest.mark.parametrize("engine_in", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_an_async_llm(path, engine_in):
    async def one(llm, i):
        async for _ in llm.generate(f"{i}", LONG):
            pass

    async def run(llm):
        await asyncio.gather(*(one(llm, i) for i in range(4)))

    llm = AsyncLLM.from_engine_args(EngineArgs(model=path, dtype="float32", num_gpu_blocks=128), engine_in=engine_in)
    try:
        # a thread, apart from the event loop that a browser keeps running in this one
        with EngineMonitor(llm, rate=50) as monitor, ThreadPoolExecutor(1) as apart:
            apart.submit(asyncio.run, run(llm)).result()
        saw_the_run(monitor)
    finally:
        llm.shutdown()


def test_a_saved_page_shows_what_was_seen(engine, open_page, tmp_path):
    dashboard = Dashboard(engine)
    empty = open_page(dashboard.save(tmp_path / "empty.html"))
    assert empty.locator(".mv-panel-value").all_inner_texts() == ["–"] * 6
    for i in range(40):
        engine.move(
            0.05, num_steps=10 + i, generation_tokens=500 + 50 * i, num_requests_waiting=3, kv_cache_usage_perc=0.5
        )
        dashboard.monitor.look()
    page = open_page(dashboard.save(tmp_path / "x.html"))
    assert page.locator(".mv-panel-value").all_inner_texts() == ["2", "3", "1,000", "50.0 ms", "50%", "–"]
    assert page.locator(".mv-status").inner_text() == "a recording"
    labels = page.locator(".mv-panel canvas").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert labels[0] == "running, last 60 seconds: at most 2"
    ink = (
        "(c) => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size > 8"
    )
    assert page.locator(".mv-panel canvas").evaluate_all(f"all => all.slice(0, 5).every({ink})")


def test_a_server_shows_it_live(path, browser):
    args = EngineArgs(model=path, dtype="float32", num_gpu_blocks=128)
    with live_server(args, ServerOptions(dashboard=True, api_key=["secret"])) as server:
        assert monitors() == []  # no one looks yet
        signed_in = browser.new_context(http_credentials={"username": "any", "password": "secret"})
        page, errors = signed_in.new_page(), []
        # the first answer is 401, then the browser signs in
        page.on("console", lambda message: None if "401" in message.text else errors.append(message.text))
        page.on(
            "request",
            lambda request: (
                errors.append(request.url) if not request.url.startswith((server.url, "blob:", "data:")) else None
            ),
        )
        page.goto(f"{server.url}/dashboard")
        page.wait_for_function("document.querySelector('.mv-card')?.dataset.samples > 3")
        assert page.locator(".mv-status").inner_text() == "live"
        body = {"model": server.model, "prompt": "x", "max_tokens": 200, "ignore_eos": True}
        thread = threading.Thread(target=server.post, args=("/v1/completions", body))
        thread.start()
        page.wait_for_function("document.querySelector('.mv-panel-value').textContent === '1'")
        thread.join()
        page.wait_for_function("document.querySelector('.mv-panel-value').textContent === '0'")
        assert errors == []
        assert server.get("/dashboard/samples?after=x").status_code == 400
        server.llm.shutdown()
        page.wait_for_function("document.querySelector('.mv-status').textContent === 'the engine was closed'")
        signed_in.close()
    assert monitors() == []


def test_a_server_without_it_has_no_such_page(path):
    with live_server(EngineArgs(model=path, dtype="float32", num_gpu_blocks=128)) as server:
        assert server.get("/dashboard").status_code == server.get("/dashboard/samples").status_code == 404


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_what_was_missed_is_put_before_what_came_meanwhile(tmp_path):
    shutil.copytree(Path(minivllm.viz.__file__).parent / "static", tmp_path / "static")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text("""
import { History } from "./static/dashboard.js";
const history = new History(["number", "running"], 5);
const added = [[[0, 10], [1, 11]], [[4, 14]], [[2, 12], [3, 13], [4, 14]], [[5, 15], [6, 16]]].map((rows) => history.add(rows));
console.log(JSON.stringify([added, history.columns]));
""")
    done = subprocess.run(["node", tmp_path / "run.js"], capture_output=True, text=True, check=True)
    added, columns = json.loads(done.stdout)
    assert added == [2, 1, 2, 2]
    assert columns == {"number": [2, 3, 4, 5, 6], "running": [12, 13, 14, 15, 16]}
