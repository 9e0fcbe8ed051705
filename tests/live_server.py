"""A server on a real port of this machine, in a thread of the test process."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn
from httpx._transports import default as transports

from minivllm.core.config import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.sampling.sampler import Sampler
from minivllm.serving.app import ServerOptions, create_app, listen, server_config

# Every client, of a single request too, would read all certificates of this machine, 20 ms; these servers speak plain HTTP.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)


@dataclass
class LiveServer:
    """``url``: without /v1. ``model``: the first served name."""

    llm: AsyncLLM
    url: str
    model: str
    key: str

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"} | options.pop("headers", {})
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {self.key}"}, timeout=60)

    @property
    def at_rest(self) -> bool:
        """No request anywhere, and no block held."""
        scheduler = self.llm.llm_engine.core.scheduler
        return not (scheduler.requests or self.llm.num_unfinished or self.get("/load").json()["server_load"]) and (
            scheduler.kv_cache_manager.block_pool.usage == 0
        )

    def wait_at_rest(self, seconds: float = 20) -> bool:
        end = time.monotonic() + seconds
        while not self.at_rest:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


@contextmanager
def scripted_model(server: LiveServer, *, against_grammar: bool = False) -> Iterator[Callable[..., LiveServer]]:
    """A function that makes the model write this text from now on, as far as a grammar allows it (or in spite of one). Of several
    texts it writes the one whose number is that of the tool results in the prompt. `pace`: seconds that each token takes, so that a
    server on a busy machine keeps up with them."""
    runner, tokenizer = server.llm.llm_engine.core.executor.runner, server.llm.get_tokenizer()
    before = runner.sampler

    def say(*texts: str, pace: float = 0.0) -> LiveServer:
        answers = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]

        def wish(logits: Any, batch: Any) -> Any:
            time.sleep(pace)
            for row, view in enumerate(batch.requests):
                results = tokenizer.decode(view.prompt_token_ids).count("<tool_response>") if len(answers) > 1 else 0
                tokens = answers[min(results, len(answers) - 1)]
                if against_grammar:
                    logits[row] = 0.0
                logits[row, tokens[min(len(view.output_token_ids), len(tokens) - 1)]] += 1000.0
            return logits

        runner.sampler = Sampler(transforms=[wish], logprobs_mode=before.logprobs_mode)
        return server

    yield say
    runner.sampler = before


@contextmanager
def live_server(
    args: EngineArgs, options: ServerOptions | None = None, engine_in: str = "thread"
) -> Iterator[LiveServer]:
    """Serve for the time of the block."""
    llm = AsyncLLM.from_engine_args(args, engine_in=engine_in)
    options = options or ServerOptions()
    app, sock = create_app(llm, options), listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(app, shutdown_timeout=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server has not started")
            time.sleep(0.01)
        key = options.api_key[0] if options.api_key else "none"
        yield LiveServer(llm, url, app.state.server.model_names[0], key)
    finally:
        server.should_exit = True
        thread.join(30)
        llm.shutdown()
