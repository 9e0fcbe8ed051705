"""`/pooling`, `/classify`, `/score` and `/rerank`, and `/v1/embeddings` of an encoder, against transformers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from live_server import LiveServer, live_server
from tiny_models import hf_pooling_model, pair_tokenizer, save_pooling_model

from minivllm import EngineArgs
from minivllm.serving.generation import ServerOptions

CROSS, EMBEDDER = "BertForSequenceClassification", "BertModel"
QUERY, DOCUMENTS = "what is a cat?", ["an animal", "a yellow car", "x"]


def serve(name: str, folder: Any, **changes: Any) -> Any:
    args = EngineArgs(model=str(save_pooling_model(name, folder, **changes)), dtype="float32", max_num_seqs=8)
    return live_server(args, ServerOptions(served_model_name=["tiny"]))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(CROSS, tmp_path_factory.mktemp("cross"), num_labels=1) as server:
        yield server


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(EMBEDDER, tmp_path_factory.mktemp("embedder")) as server:
        yield server


@torch.inference_mode()
def vector(text: str) -> np.ndarray:
    """The first token's hidden state, of length 1."""
    hidden = hf_pooling_model(EMBEDDER)(**pair_tokenizer()(text, return_tensors="pt")).last_hidden_state[0, 0]
    return torch.nn.functional.normalize(hidden.double(), dim=0).numpy()


@torch.inference_mode()
def score(a: str, b: str) -> float:
    given = pair_tokenizer()(a, text_pair=b, return_tensors="pt", return_token_type_ids=True)
    return float(torch.sigmoid(hf_pooling_model(CROSS, num_labels=1)(**given).logits[0, 0]))


def test_an_encoder_by_the_official_client(embedder: LiveServer):
    with embedder.client() as client:  # asks for base64 by itself
        answer = client.embeddings.create(model="tiny", input=["a cat", "a yellow car"])
        floats = client.embeddings.create(model="tiny", input="a cat", encoding_format="float", dimensions=8)
    np.testing.assert_allclose(answer.data[1].embedding, vector("a yellow car"), atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 7 + 14
    short = vector("a cat")[:8]
    np.testing.assert_allclose(floats.data[0].embedding, short / np.linalg.norm(short), atol=1e-5)


def test_pooling_gives_what_is_named(embedder: LiveServer):
    body = embedder.post("/pooling", {"model": "tiny", "input": ["a cat", "x"]}).json()
    assert [entry["object"] for entry in body["data"]] == ["pooling"] * 2 and body["object"] == "list"
    np.testing.assert_allclose(body["data"][0]["data"], vector("a cat"), atol=1e-5)
    tokens = embedder.post("/pooling", {"input": "a cat", "task": "token_embed"}).json()
    assert np.shape(tokens["data"][0]["data"]) == (7, 48) and tokens["usage"]["total_tokens"] == 7
    plain = embedder.post("/pooling", {"input": "a cat", "add_special_tokens": False}).json()
    assert plain["usage"]["prompt_tokens"] == 5


def test_scores_of_vectors(embedder: LiveServer):
    body = embedder.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()
    found = [entry["score"] for entry in body["data"]]
    np.testing.assert_allclose(found, [vector(QUERY) @ vector(text) for text in DOCUMENTS], atol=1e-5)
    assert body["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in (QUERY, *DOCUMENTS))


def test_scores_of_a_cross_encoder(reranker: LiveServer):
    expected = [score(QUERY, text) for text in DOCUMENTS]
    body = reranker.post("/score", {"text_1": [QUERY] * 3, "text_2": DOCUMENTS}).json()
    np.testing.assert_allclose([entry["score"] for entry in body["data"]], expected, atol=1e-5)
    one = reranker.post("/classify", {"input": "a cat"}).json()["data"][0]
    assert one["label"] == "LABEL_0" and one["num_classes"] == 1 and 0 < one["probs"][0] < 1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(reranker: LiveServer, path: str):
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    body = reranker.post(path, {"model": "tiny", "query": QUERY, "documents": documents, "top_n": 2}).json()
    expected = [score(QUERY, text) for text in DOCUMENTS]
    best = sorted(range(3), key=lambda i: -expected[i])[:2]
    assert [result["index"] for result in body["results"]] == best
    np.testing.assert_allclose([r["relevance_score"] for r in body["results"]], [expected[i] for i in best], atol=1e-5)
    texts = [result.get("document", {}).get("text") for result in body["results"]]
    assert texts == ([None, None] if path.startswith("/v2/") else [DOCUMENTS[i] for i in best])
    assert body["usage"]["total_tokens"] == sum(len(QUERY) + len(text) + 3 for text in DOCUMENTS)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/rerank", {"query": "a", "documents": []}, "make no pairs"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "greater than or equal to 1"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 3}, "documents are not split"),
        ("/rerank", {"query": "a", "documents": ["b" * 90]}, "94 tokens, but at most 66"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "make no pairs"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/classify", {"input": []}, "at least one input"),
        ("/pooling", {"input": "a", "task": "embed"}, "one that this model can do: classify, token_classify, score"),
        ("/pooling", {"input": "a", "dimensions": 4}, "left out for the task 'classify'"),
        ("/v1/embeddings", {"input": "a"}, "one that this model can do"),
        ("/v1/completions", {"prompt": "a"}, "predicts no tokens"),
    ],
)
def test_what_is_wrong_is_named(reranker: LiveServer, path: str, body: dict[str, Any], words: str):
    response = reranker.post(path, body)
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text
    assert reranker.wait_at_rest()


def test_a_long_pair_can_be_cut(reranker: LiveServer):
    body = {"text_1": QUERY, "text_2": "b" * 90, "truncate_prompt_tokens": -1}
    assert reranker.post("/score", body).json()["usage"]["prompt_tokens"] == 66
