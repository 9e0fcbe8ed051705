"""The official client cannot tell the server from OpenAI's, over a real socket."""

import asyncio
import functools
import random
import re
from typing import Any

import openai
import pytest
from live_server import LiveServer
from pydantic import BaseModel, Field

HELLO = [{"role": "user", "content": "Hello"}]


def test_models(tiny: LiveServer):
    with tiny.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny", "tiny-alias"]
        assert client.models.retrieve("tiny-alias").id == "tiny-alias"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-7")
    assert caught.value.code == "model_not_found"


def test_completion_is_what_the_engine_says(tiny: LiveServer):
    from minivllm import SamplingParams
    from minivllm.sampling.params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)

    async def direct():
        return [output async for output in tiny.llm.generate("abc", params)][-1]

    expected = asyncio.run(direct())
    with tiny.client() as client:
        got = client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=20)
    assert got.object == "text_completion" and got.model == "tiny" and got.id.startswith("cmpl-")
    assert got.choices[0].text == expected.outputs[0].text
    assert got.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, len(expected.outputs[0].token_ids))
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole(tiny: LiveServer, n: int):
    wishes = {"model": "tiny", "messages": HELLO, "temperature": 0.9, "seed": 5, "max_tokens": 15, "n": n}
    with tiny.client() as client:
        whole = client.chat.completions.create(**wishes)
        chunks = list(client.chat.completions.create(**wishes, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    text, reasons, roles = [""] * n, [None] * n, [None] * n
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            roles[choice.index] = choice.delta.role or roles[choice.index]
    assert text == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] and None not in reasons
    assert roles == ["assistant"] * n
    last = chunks[-1]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_prompts_as_texts_and_token_ids(tiny: LiveServer):
    with tiny.client() as client:
        forms = ["ab", ["ab", "cd"], [64, 65], [[64, 65], [66, 67]]]
        answers = [client.completions.create(model="tiny", prompt=form, temperature=0, max_tokens=6) for form in forms]
    texts = [[choice.text for choice in answer.choices] for answer in answers]
    assert [len(t) for t in texts] == [1, 2, 1, 2]
    assert texts[0][0] == texts[1][0] == texts[2][0] == texts[3][0] and texts[1] == texts[3]
    assert [choice.index for choice in answers[1].choices] == [0, 1]


def test_streamed_batch_of_prompts(tiny: LiveServer):
    wishes = {"model": "tiny", "prompt": ["ab", "cd", "ef"], "temperature": 0.7, "seed": 3, "max_tokens": 9, "n": 2}
    with tiny.client() as client:
        whole = client.completions.create(**wishes)
        text = [""] * 6
        for chunk in client.completions.create(**wishes, stream=True):
            for choice in chunk.choices:
                text[choice.index] += choice.text
    assert text == [choice.text for choice in whole.choices]


def test_echo_and_logprobs_line_up(tiny: LiveServer):
    with tiny.client() as client:
        wishes = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 5, "logprobs": 2}
        plain = client.completions.create(**wishes).choices[0]
        echoed = client.completions.create(**wishes, echo=True).choices[0]
        scored = client.completions.create(**{**wishes, "max_tokens": 0}, echo=True)
    assert echoed.text == "hello" + plain.text
    lp = echoed.logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == 10
    assert lp.tokens[:5] == list("hello") and lp.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None
    assert lp.token_logprobs[5:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert [at - 5 for at in lp.text_offset[5:]] == plain.logprobs.text_offset
    assert scored.choices[0].text == "hello" and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(lp.token_logprobs[1:5], abs=1e-4)


def test_prompt_logprobs_are_those_of_transformers(tiny: LiveServer):
    import torch
    from tiny_models import hf_model

    ids = [64, 70, 75, 71]
    with tiny.client() as client:
        choice = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=0).choices[0]
    with torch.inference_mode():
        logprobs = torch.log_softmax(hf_model("llama")(torch.tensor([ids])).logits[0], -1)
    expected = [logprobs[i, token].item() for i, token in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)


def test_chat_logprobs(tiny: LiveServer):
    wishes = {
        "model": "tiny",
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with tiny.client() as client:
        content = client.chat.completions.create(**wishes).choices[0].logprobs.content
        streamed = [
            c.choices[0].logprobs.content
            for c in client.chat.completions.create(**wishes, stream=True)
            if c.choices[0].logprobs
        ]
    assert [t.token for piece in streamed for t in piece] == [t.token for t in content]
    for token in content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob  # greedy
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob >= token.top_logprobs[2].logprob
        assert token.bytes is not None and len(token.bytes) >= 1


def test_stop_seed_and_bias(tiny: LiveServer):
    with tiny.client() as client:

        def ask(**wishes):
            return client.completions.create(model="tiny", prompt="abc", max_tokens=20, **wishes).choices[0]

        free = ask(temperature=0)
        letter = free.text[3]
        stopped = ask(temperature=0, stop=letter)
        assert stopped.text == free.text[: free.text.index(letter)] and stopped.finish_reason == "stop"
        assert stopped.stop_reason == letter
        assert ask(temperature=1, seed=7).text == ask(temperature=1, seed=7).text
        assert len({ask(temperature=1, seed=seed).text for seed in range(4)}) > 1
        assert ask(temperature=0, logit_bias={"64": 100}).text == "a" * 20


def test_cached_tokens_are_reported(tiny: LiveServer):
    prompt = "".join(random.Random(1).choices("abcdefgh", k=70))
    with tiny.client() as client:
        first, second = (client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0 and second.prompt_tokens_details.cached_tokens == 64


def test_content_parts_and_roles(tiny: LiveServer):
    def prompt_of(messages, **more):
        return tiny.post("/tokenize", {"messages": messages, **more}).json()["tokens"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of([{"role": "user", "content": parts}]) == prompt_of([{"role": "user", "content": "a\nb"}])
    assert prompt_of([{"role": "developer", "content": "x"}]) == prompt_of([{"role": "system", "content": "x"}])
    whole = prompt_of(HELLO)
    bare = prompt_of(HELLO, add_generation_prompt=False)
    assert whole[: len(bare)] == bare and len(whole) > len(bare)
    opened = prompt_of([*HELLO, {"role": "assistant", "content": "Yes"}], continue_final_message=True)
    assert tiny.post("/detokenize", {"tokens": opened}).json()["prompt"].endswith("assistant\nYes")


def test_many_clients_each_get_their_own_answer(tiny: LiveServer):
    """What comes together is what comes alone, token for token; some of the clients hang up."""
    rng = random.Random(0)
    wishes = [
        {"model": "tiny", "prompt": [rng.randrange(33, 120) for _ in range(rng.randrange(2, 60))],
         "temperature": rng.choice([0, 1]), "seed": i, "max_tokens": rng.randrange(1, 40)}
        for i in range(40)
    ]  # fmt: skip
    with tiny.client() as client:
        alone = [client.completions.create(**wish).choices[0].text for wish in wishes]

    async def one(client, i):
        stream = await client.completions.create(**wishes[i], stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if i % 3 == 0 and len(text) > 3:
                await stream.close()
                return alone[i].startswith(text)
        return text == alone[i]

    async def together():
        async with tiny.async_client() as client:
            return await asyncio.gather(*(one(client, i) for i in range(len(wishes))))

    assert asyncio.run(together()) == [True] * len(wishes)
    assert tiny.wait_at_rest()


class City(BaseModel):
    name: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=999)


def test_parse_gives_an_object(tiny: LiveServer):
    """A model of random weights writes JSON that fits, for it cannot do otherwise."""
    with tiny.client() as client:
        answer = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=City, temperature=1, seed=1, max_tokens=150
        )
    assert isinstance(answer.choices[0].message.parsed, City) and answer.choices[0].finish_reason == "stop"


def test_choice_and_regex(tiny: LiveServer):
    with tiny.client() as client:
        for wish, allowed in (({"choice": ["red", "green"]}, r"red|green"), ({"regex": "[0-9]{3}-[0-9]"}, r"\d{3}-\d")):
            more = {"extra_body": {"structured_outputs": wish}, "temperature": 1, "seed": 2}
            assert re.fullmatch(allowed, client.completions.create(model="tiny", prompt="abc", **more).choices[0].text)


@pytest.mark.slow
def test_smollm2_knows_the_capital(smol: LiveServer):
    wishes = {"model": "smollm2", "temperature": 0, "max_tokens": 12}
    with smol.client() as client:
        answer = client.chat.completions.create(
            messages=[{"role": "user", "content": "What is the capital of France?"}], **wishes
        )
    assert "Paris" in answer.choices[0].message.content


@pytest.mark.slow
def test_smollm2_writes_json_that_fits(smol: LiveServer):
    with smol.client() as client:
        question = [{"role": "user", "content": "Name a city and how many thousand people live there, as JSON."}]
        whole = client.chat.completions.parse(model="smollm2", messages=question, response_format=City, temperature=0)
        chunks = client.chat.completions.create(
            model="smollm2",
            messages=question,
            temperature=0,
            stream=True,
            response_format={"type": "json_object"},
            max_tokens=60,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert isinstance(whole.choices[0].message.parsed, City)
    assert text.lstrip().startswith("{")


@functools.cache
def published(model: str) -> Any:
    """A published tokenizer: Gemma's takes seconds."""
    from minivllm.models.tokenizer import get_tokenizer

    return get_tokenizer(model)


@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_the_offsets_of_an_echoed_prompt_are_those_of_its_characters(model: str):
    from minivllm.engine.detokenizer import DetokenizerFactory
    from minivllm.engine.outputs import RequestOutput
    from minivllm.serving.completions import Echo

    tokenizer = published(model)
    for text in ("Ünï tide:", "<|im_start|>user\nhé", "<start_of_turn>user\nhé", "naïve ½"):
        found = tokenizer(text, return_offsets_mapping=True)
        output = RequestOutput("r", text, found.input_ids, [], True)
        echo = Echo(output, DetokenizerFactory(tokenizer), True, continued=True)
        assert echo.text == text
        assert echo.offsets() == [begin for begin, _ in found.offset_mapping]


@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_an_echo_leaves_the_unfinished_character_to_the_answer(model: str):
    from minivllm.engine.detokenizer import DetokenizerFactory
    from minivllm.engine.outputs import RequestOutput
    from minivllm.serving.completions import Echo

    tokenizer = published(model)
    factory, ids = DetokenizerFactory(tokenizer), tokenizer("Sign: 🫖", add_special_tokens=False).input_ids
    output = RequestOutput("r", None, ids[:-1], [], True)
    answer = factory(ids[:-1])
    assert Echo(output, factory, True, continued=True).text + answer.push(ids[-1]) + answer.flush() == "Sign: 🫖"
    assert Echo(output, factory, True, continued=False).text.startswith("Sign: \ufffd")
