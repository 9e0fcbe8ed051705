"""`/v1/embeddings` by the official client, against transformers."""

import asyncio
import base64
import struct

import numpy as np
import openai
import pytest
import torch
from live_server import LiveServer
from tiny_models import hf_model

PATH = "/v1/embeddings"


def expected(prompt: list[int], pooling: str = "mean") -> np.ndarray:
    with torch.inference_mode():
        hidden = hf_model("llama").model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    vector = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return vector / np.linalg.norm(vector)


def test_texts_and_token_ids(tiny: LiveServer):
    with tiny.client() as client:
        forms = ["abc", ["abc", "hello"], [64, 65, 66], [[64, 65, 66], [71, 68]]]
        answers = [client.embeddings.create(model="tiny", input=form) for form in forms]
    assert [len(answer.data) for answer in answers] == [1, 2, 1, 2]
    assert [entry.index for entry in answers[1].data] == [0, 1] and answers[0].object == "list"
    assert answers[1].usage.prompt_tokens == answers[1].usage.total_tokens == 8 and answers[0].model == "tiny"
    for answer in answers:
        np.testing.assert_allclose(answer.data[0].embedding, expected([64, 65, 66]), atol=1e-4)
    np.testing.assert_allclose(answers[3].data[1].embedding, expected([71, 68]), atol=1e-4)


def test_both_encodings_are_the_same_float32_numbers(tiny: LiveServer):
    plain = tiny.post(PATH, {"input": "abc", "encoding_format": "float"}).json()["data"][0]["embedding"]
    packed = tiny.post(PATH, {"input": "abc", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert list(struct.unpack("<72f", base64.b64decode(packed))) == plain
    assert tiny.post(PATH, {"input": "abc"}).json()["data"][0]["embedding"] == plain


def test_pooling_dimensions_and_length(tiny: LiveServer):
    with tiny.client() as client:
        last = client.embeddings.create(model="tiny", input=[64, 65, 66], extra_body={"pooling_type": "last"})
        short = client.embeddings.create(model="tiny", input=[64, 65, 66], dimensions=5)
        raw = client.embeddings.create(model="tiny", input=[64, 65, 66], extra_body={"normalize": False})
    np.testing.assert_allclose(last.data[0].embedding, expected([64, 65, 66], "last"), atol=1e-4)
    assert len(short.data[0].embedding) == 5 and np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-6)
    vector = np.array(raw.data[0].embedding)
    assert np.linalg.norm(vector) > 1.5
    np.testing.assert_allclose(vector / np.linalg.norm(vector), expected([64, 65, 66]), atol=1e-4)


def test_many_at_once_and_words_meanwhile(tiny: LiveServer):
    prompts = [[33 + (7 * i + j) % 80 for j in range(1 + i % 30)] for i in range(40)]

    async def main():
        async with tiny.async_client() as client:
            words = client.completions.create(model="tiny", prompt=[64], temperature=0, max_tokens=50)
            vectors = [client.embeddings.create(model="tiny", input=prompt) for prompt in prompts]
            return await asyncio.gather(words, client.embeddings.create(model="tiny", input=prompts), *vectors)

    words, together, *alone = asyncio.run(main())
    assert words.choices[0].text
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(together.data[i].embedding, alone[i].data[0].embedding, atol=1e-5)
        np.testing.assert_allclose(together.data[i].embedding, expected(prompt), atol=2e-4)
    assert tiny.wait_at_rest()


def test_the_metrics_count_them(tiny: LiveServer):
    def count() -> float:
        lines = tiny.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{"))

    before = count()
    tiny.post(PATH, {"input": ["a", "b"]})
    assert count() == before + 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "at least one"),
        ({"input": ["a", ""]}, None, "empty"),
        ({"input": [[64], []]}, None, "empty"),
        ({"input": [[99999]]}, None, "token ids"),
        ({"input": {"a": 1}}, "input", "string"),
        ({}, "input", "required"),
        ({"input": "a" * 300}, None, "has 300 tokens, but at most 255 are allowed: max_model_len=256"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "a", "dimensions": 73}, "dimensions", "at most the 72"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "pooling_type": "max"}, "pooling_type", "mean"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field"),
    ],
)
def test_what_is_wrong_is_named(tiny: LiveServer, body: dict, param: str | None, words: str):
    response = tiny.post(PATH, body)
    error = response.json()["error"]
    assert response.status_code == 400 and words.lower() in error["message"].lower(), error
    assert param is None or (error["param"] or "").startswith(param), error


def test_unknown_model(tiny: LiveServer):
    with tiny.client() as client, pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-9", input="a")


def test_a_long_input_can_be_cut(tiny: LiveServer):
    with tiny.client() as client:
        cut = client.embeddings.create(model="tiny", input="b" * 300 + "abc", extra_body={"truncate_prompt_tokens": 3})
    assert cut.usage.prompt_tokens == 3
    np.testing.assert_allclose(cut.data[0].embedding, expected([64, 65, 66]), atol=1e-4)
