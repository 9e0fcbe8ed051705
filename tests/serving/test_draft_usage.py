"""Draft tokens in the usage of an answer: under OpenAI's names, and the sum of /metrics."""

import re
from dataclasses import replace

import openai
from live_server import live_server

from minivllm.engine.arguments import EngineArgs
from minivllm.serving.generation import ServerOptions


def test_accepted_and_rejected_draft_tokens_are_told(tiny_args: EngineArgs):
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
        "dynamic_length": False,
    }
    with live_server(
        replace(tiny_args, speculative_config=config), ServerOptions(served_model_name=["tiny"])
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        asked = {
            "model": "tiny",
            "max_tokens": 30,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "allowed_token_ids": [5, 6, 7]},
        }
        whole = client.chat.completions.create(
            messages=[{"role": "user", "content": "abababab"}], n=2, **asked | {"temperature": 1}
        )
        stream = client.completions.create(
            prompt=["ababab", "cdcdcd"], stream=True, stream_options={"include_usage": True}, **asked
        )
        usages = [whole.usage, next(chunk.usage for chunk in stream if chunk.usage)]
        metrics = server.get("/metrics").text
    told = [
        (u.completion_tokens_details.accepted_prediction_tokens, u.completion_tokens_details.rejected_prediction_tokens)
        for u in usages
    ]
    counted = {
        name: float(re.search(rf"^vllm:spec_decode_num_{name}\S* (\S+)", metrics, re.MULTILINE)[1])
        for name in ("draft_tokens_total", "accepted_tokens_total")
    }
    assert all(accepted + rejected > 0 for accepted, rejected in told)
    assert sum(accepted for accepted, _ in told) == counted["accepted_tokens_total"] > 0
    assert sum(map(sum, told)) == counted["draft_tokens_total"]
    assert whole.usage.completion_tokens == 60


def test_without_speculation_there_is_nothing_to_tell(tiny):
    answer = tiny.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).json()
    assert "completion_tokens_details" not in answer["usage"]
