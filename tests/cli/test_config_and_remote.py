"""--config files, commands that ask a server, and batch files."""

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from tiny_models import tiny_model_path

from minivllm.cli import main, make_parser
from minivllm.commands.chat import RemoteChatSession
from minivllm.core.config import EngineArgs
from minivllm.engine.arguments import with_config
from minivllm.serving import app, run_batch
from minivllm.serving.app import ServerOptions
from minivllm.serving.client import Remote, ServerError

__all__ = ["tiny_model_path"]


@pytest.fixture(scope="module")
def args(tiny_model_path: Any) -> EngineArgs:
    return EngineArgs(model=str(tiny_model_path("llama")), dtype="float32", num_gpu_blocks=128, max_num_seqs=16)


@pytest.fixture(scope="module")
def server(args: EngineArgs) -> Iterator[LiveServer]:
    with live_server(args, ServerOptions(served_model_name=["tiny"], api_key=["k"])) as live:
        yield live


def serve_flags(tmp_path: Path, text: str, *argv: str) -> argparse.Namespace:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    parser = app.make_parser()
    return parser.parse_args(with_config([*argv, "--config", str(path)], parser))


def test_the_command_line_wins(tmp_path: Path):
    text = "port: 1\nmax-num-seqs: 7\nmax_model_len: 99\napi-key: [a, b]\nlog-json: true\nenable-prefix-caching: false\nhf-overrides: {x: 1}\n"
    found = serve_flags(tmp_path, text, "smollm2", "--port", "2", "--max-model-l=50")
    assert (found.port, found.max_num_seqs, found.max_model_len, found.api_key) == (2, 7, 50, ["a", "b"])
    assert found.log_json is True and found.enable_prefix_caching is False and found.hf_overrides == {"x": 1}
    assert serve_flags(tmp_path, text, "--api-key", "c").api_key == ["c"]
    assert serve_flags(tmp_path, text, "--enable-prefix-caching").enable_prefix_caching is True
    assert serve_flags(tmp_path, "log-json: false\nmodel: other").model == "other"
    parser = make_parser()
    (tmp_path / "c.yaml").write_text("stop: [x, y]\ntemperature: 0.5")
    complete = parser.parse_args(with_config(["complete", "hi", "--config", str(tmp_path / "c.yaml")], parser))
    assert complete.stop == ["x", "y"] and complete.temperature == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seq: 3", "serve.yaml: minivllm serve has no option 'max-num-seq'; did you mean 'max-num-seqs'"),
        ("- a\n- b", "must map flags to values.*it holds list"),
        ("a: [1", "is not YAML"),
        ("config: other.yaml", "has no option 'config'"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, said: str):
    with pytest.raises(ValueError, match=said):
        serve_flags(tmp_path, text)


def test_complete_asks_a_server(server: LiveServer, capsys: pytest.CaptureFixture[str]):
    flags = ["--url", server.url, "--api-key", "k", "--max-tokens", "5", "--temperature", "0", "--ignore-eos"]
    assert main(["complete", "abc", *flags]) == 0
    expected = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True})
    assert capsys.readouterr().out == expected.json()["choices"][0]["text"] + "\n"
    assert main(["complete", "abc", *flags[:-3], "--n", "2", "--temperature", "1"]) == 0
    assert "\n--------\n" in capsys.readouterr().out
    for wrong, said in (
        (["--url", server.url], "answered 401"),
        ([*flags, "--dtype", "float32"], "--dtype is for an engine here"),
        ([*flags, "--model-name", "x"], "does not serve 'x'; it serves tiny"),
        ([*flags, "--top-p", "3"], "answered 400: top_p"),
        (["--url", "localhost:1"], "begins with http"),
        (["--url", "http://127.0.0.1:99999"], "with a port up to 65535; got 'http://127.0.0.1:99999"),
        (["--url", "http://127.0.0.1:9"], "cannot connect to 127.0.0.1:9"),
    ):
        assert main(["complete", "abc", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_chat_asks_a_server(server: LiveServer):
    out = io.StringIO()
    session = RemoteChatSession(
        Remote(server.url + "/v1", None, "k"), {"max_tokens": 4, "temperature": 0}, out, "be brief"
    )
    session.handle("hello")
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    body = {"messages": asked, "max_tokens": 4, "temperature": 0}
    expected = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert out.getvalue() == expected + "\n" and session.messages == [
        *asked,
        {"role": "assistant", "content": expected},
    ]
    session.remote.api_key = "wrong"
    session.handle("again")
    assert "error: the server answered 401" in out.getvalue() and len(session.messages) == 3
    with pytest.raises(ServerError):
        list(session.remote.chat(asked))


def test_run_batch(args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
        return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})

    lines = [line(f"n{i}", prompt="abc", max_tokens=1 + i, temperature=0, ignore_eos=True) for i in range(9)]
    lines += [
        line("wrong", prompt="abc", temperature=9),
        line("nowhere", "/v1/nothing"),
        "",
        "{no json",
        line("s", stream=True),
    ]
    lines += [line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=2)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    engine = ["--model", args.model, "--dtype", "float32", "--num-gpu-blocks", "64", "--max-num-seqs", "2"]
    assert run_batch.main(["-i", str(source), "-o", str(target), *engine]) == 1
    assert "14 requests, 4 failed" in capsys.readouterr().out
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    names = [f"n{i}" for i in range(9)] + ["wrong", "nowhere", None, "s", "chat"]
    assert [answer["custom_id"] for answer in answers] == names
    assert [a["response"]["body"]["usage"]["completion_tokens"] for a in answers[:9]] == list(range(1, 10))
    by_name = {answer["custom_id"]: answer for answer in answers if answer["custom_id"]}
    assert by_name["wrong"]["response"]["status_code"] == 400 and "temperature" in by_name["wrong"]["error"]["message"]
    assert by_name["nowhere"]["response"]["status_code"] == 404
    assert by_name["chat"]["response"]["body"]["object"] == "chat.completion" and by_name["chat"]["error"] is None
    assert [a["error"]["code"] for a in answers[11:13]] == ["invalid_request"] * 2
    assert set(answers[0]) == {"id", "custom_id", "response", "error"} and answers[0]["response"]["request_id"]
    with pytest.raises(ValueError, match="another file"):
        run_batch.main(["-i", str(source), "-o", str(source)])
