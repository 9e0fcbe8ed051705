"""Adapters over HTTP: by model name, listed with their parent, loaded and unloaded while serving."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from adapters import VARIANTS, peft_adapter
from live_server import live_server
from safetensors.torch import load_file, save_file
from tiny_models import hf_model

from minivllm.core.config import EngineArgs
from minivllm.lora.adapter import WEIGHTS
from minivllm.serving.app import ServerOptions

PROMPT = "adapters change what comes next"
HOW: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """Folder and merged model of two adapters."""
    root = tmp_path_factory.mktemp("served")
    names = ("all-linear", "ends")
    return {n: (str(root / n), peft_adapter("llama", VARIANTS[n], root / n, seed=i)) for i, n in enumerate(names)}


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request: pytest.FixtureRequest, tiny_args: EngineArgs, folders: Any) -> Any:
    args = replace(tiny_args, enable_lora=True, max_loras=2)
    first, root = folders["all-linear"][0], Path(folders["ends"][0]).parent
    options = ServerOptions(
        served_model_name=["base"],
        lora_modules=[f"first={first}"],
        lora_resolvers=[f"folder={root}"],
        enable_runtime_lora=True,
    )
    with live_server(args, options, engine_in=request.param) as running:
        yield running


@torch.inference_mode()
def greedy(server: Any, model: Any) -> str:
    tokenizer = server.llm.get_tokenizer()
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None)
    return tokenizer.decode(out[0, ids.shape[1] :])


def test_by_name(server, folders):
    client = server.client()
    for name, model in (("base", hf_model("llama")), ("first", folders["all-linear"][1])):
        answer = client.completions.create(model=name, **HOW)
        assert answer.model == name
        assert answer.choices[0].text == greedy(server, model)
    with pytest.raises(openai.NotFoundError, match="'second' is not served here"):
        client.completions.create(model="second", **HOW)


def test_models_have_parents(server):
    cards = {card.id: card for card in server.client().models.list()}
    assert cards["base"].parent is None and cards["first"].parent == "base"
    assert server.client().models.retrieve("first").parent == "base"


def test_load_and_unload(server, folders):
    path, model = folders["ends"]
    assert server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": path}).status_code == 200
    assert server.client().completions.create(model="second", **HOW).choices[0].text == greedy(server, model)
    again = server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": path})
    assert again.status_code == 400 and "served already" in again.text
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="second", **HOW)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 404


def test_the_same_name_with_other_weights(server, folders):
    """Blocks that were cached under the old weights are not used."""
    for name in ("all-linear", "ends"):
        path, model = folders[name]
        assert server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path}).status_code == 200
        assert server.client().completions.create(model="x", **HOW).choices[0].text == greedy(server, model)
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200


def test_a_bad_adapter_is_the_clients_error(server, tmp_path):
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "nowhere")})
    assert answer.status_code == 400 and "no adapter folder" in answer.json()["error"]["message"]
    assert "bad" not in {card.id for card in server.client().models.list()}


def test_the_answer_comes_when_the_adapter_is_read(server, folders, tmp_path):
    """What is wrong with its numbers is this call's error, and the name is free for a file that is right."""
    path, model = folders["ends"]
    shutil.copytree(path, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    save_file({name: x * torch.nan for name, x in tensors.items()}, tmp_path / "a" / WEIGHTS)
    body = {"lora_name": "third", "lora_path": str(tmp_path / "a")}
    answer = server.post("/v1/load_lora_adapter", body)
    assert answer.status_code == 400 and "has numbers that are not finite" in answer.json()["error"]["message"]
    assert "third" not in {card.id for card in server.client().models.list()}
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    assert server.post("/v1/load_lora_adapter", body).status_code == 200
    shutil.rmtree(tmp_path / "a")  # it is in memory
    assert server.client().completions.create(model="third", **HOW).choices[0].text == greedy(server, model)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "third"}).status_code == 200


def test_an_unknown_name_is_asked_of_the_resolvers(server, folders):
    """Many requests at once bring one adapter, which is listed and can be unloaded like any other."""
    client, want = server.client(), greedy(server, folders["ends"][1])
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.completions.create(model="ends", **HOW), range(4)))
    assert {(answer.model, answer.choices[0].text) for answer in answers} == {("ends", want)}
    cards = {card.id: card for card in client.models.list()}
    assert cards["ends"].parent == "base" and cards["ends"].root == folders["ends"][0]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "ends"}).status_code == 200
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert server.post("/tokenize", {"model": "ends", "prompt": "a"}).status_code == 200  # found again
    assert server.post("/v1/chat/completions", {"model": "ends", **body}).json()["model"] == "ends"
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "ends"}).status_code == 200


def test_no_name_leads_out_of_the_folder(server, folders, tmp_path):
    root = Path(folders["ends"][0]).parent
    shutil.copytree(folders["ends"][0], root.parent / "outside", dirs_exist_ok=True)
    if not (root / "link").exists():
        (root / "link").symlink_to(root.parent / "outside")
    outside = [
        "../outside",
        str(root.parent / "outside"),
        "link",
        f"x/../../{root.name}/ends",
        "./ends",
        "ends/",
        "a\x00b",
    ]
    before = len(server.client().models.list().data)
    for name in outside:
        answer = server.post("/v1/completions", {"model": name, "prompt": "a"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found", name
    assert len(server.client().models.list().data) == before


def test_what_a_resolver_finds_is_checked(server, folders):
    """A broken folder is the error of the request that names it, and the name stays free."""
    broken = Path(folders["ends"][0]).parent / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    answer = server.post("/v1/completions", {"model": "broken", "prompt": "a"})
    assert answer.status_code == 400 and "peft_type must be 'LORA'" in answer.json()["error"]["message"]
    assert "broken" not in {card.id for card in server.client().models.list()}


def test_not_without_the_switch(tiny):
    for path, body in (("load", {"lora_name": "a", "lora_path": "b"}), ("unload", {"lora_name": "a"})):
        answer = tiny.post(f"/v1/{path}_lora_adapter", body)
        assert answer.status_code == 403 and "--enable-runtime-lora" in answer.json()["error"]["message"]


def test_options():
    for modules in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(ValueError, match="lora_modules"):
            ServerOptions(lora_modules=modules)
    for resolvers, why in (
        (["folder"], "kind=argument"),
        (["s3=x"], "kinds: folder, hub"),
        (["hub=alone"], "owner/name"),
    ):
        with pytest.raises(ValueError, match=why):
            ServerOptions(lora_resolvers=resolvers)
    with pytest.raises(ValueError, match="there is no folder '/no/where'"):
        ServerOptions(lora_resolvers=["folder=/no/where"])
