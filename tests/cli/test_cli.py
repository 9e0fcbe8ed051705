"""The command line: in this process where that is enough, as a process of its own where it matters."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tiny_models import tiny_model_path  # noqa: F401

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.cli import main, make_parser
from minivllm.commands.chat import ChatSession
from minivllm.commands.complete import stream_answer
from minivllm.commands.flags import sampling_params_from
from minivllm.engine.arguments import engine_args_from

COMMAND = [sys.executable, "-c", "import sys; from minivllm.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def path(tiny_model_path):  # noqa: F811
    return str(tiny_model_path("llama"))


@pytest.fixture(scope="module")
def engine(path):
    with LLM(path, dtype="float32", num_gpu_blocks=64, block_size=4) as llm:
        yield llm.llm_engine


def run(*arguments, stdin="", timeout=120):
    environment = os.environ | {"COLUMNS": "120"}
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )


def small(path):
    return ["--model", path, "--dtype", "float32", "--num-gpu-blocks", "64"]


# ---- flags


def test_every_engine_argument_is_a_flag():
    parser = make_parser()
    assert engine_args_from(parser.parse_args(["complete", "x"])) == EngineArgs()
    given = [
        "--max-num-seqs",
        "3",
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization",
        "0.5",
        "--dtype",
        "float32",
    ]
    args = engine_args_from(parser.parse_args(["chat", *given]))
    assert args == EngineArgs(max_num_seqs=3, enable_prefix_caching=False, gpu_memory_utilization=0.5, dtype="float32")


def test_sampling_flags_go_over_the_defaults_of_the_model():
    args = make_parser().parse_args(["complete", "x", "--top-k", "5", "--stop", "a", "--stop", "b", "--ignore-eos"])
    got = sampling_params_from(args, SamplingParams(temperature=0.25, top_k=50))
    assert got == SamplingParams(temperature=0.25, top_k=5, stop=["a", "b"], ignore_eos=True, max_tokens=64)


def test_help_is_quick_and_loads_nothing_heavy():
    code = "import sys; from minivllm.cli import main\ntry: main(['chat', '--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout and "--temperature" in done.stdout and "/reset" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["complete", "x", "--model", "smollm"], "unknown model 'smollm'. Did you mean 'smollm2'"),
        (["complete", "x", "--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
        (["serve", "--trace", "x.foo"], "a trace is saved as .jsonl or .parquet, got 'x.foo'"),
    ],
)
def test_a_mistake_is_one_line(arguments, says, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("minivllm: error: ") and says in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--port", "x"], "a port is in 0..65535, got x"),
        (["complete", "x", "--speculative-config", "{"], "it takes a JSON object such as '{\"key\": 1}', got '{'"),
        (["bench", "serve", "--extra-body", "[1]"], "it takes a JSON object such as '{\"key\": 1}', got '[1]'"),
    ],
)
def test_a_flag_says_what_it_takes(arguments, says, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert says in capsys.readouterr().err


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="max_num_seqs"):
        main(["--debug", "complete", "x", "--max-num-seqs", "0"])


def test_bad_parameters_are_one_line(path, capsys):
    assert main(["complete", "x", *small(path), "--temperature", "-1"]) == 2
    assert "temperature must be" in capsys.readouterr().err
    assert main(["complete", "", *small(path)]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


# ---- complete


def test_complete_streams_what_generate_says(path, capsys):
    with LLM(path, dtype="float32", num_gpu_blocks=64) as llm:
        want = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0].text
    flags = [*small(path), "--temperature", "0", "--max-tokens", "12"]
    assert main(["complete", "Hello", *flags]) == 0
    streamed = capsys.readouterr().out
    assert main(["complete", "Hello", *flags, "--no-stream"]) == 0
    assert streamed == capsys.readouterr().out == want + "\n"


def test_complete_several_and_from_a_pipe(path):
    done = run("complete", "-", *small(path), "--n", "3", "--max-tokens", "4", "--temperature", "1", stdin="Hello")
    assert done.returncode == 0 and done.stdout.count("\n--------\n") == 2


def test_a_flag_switches_speculation_on(path, capsys, monkeypatch):
    """As JSON; the text is the same, and a mistake in it is one line."""
    flags = ["complete", "ab ab ab ab", *small(path), "--temperature", "0", "--max-tokens", "24", "--ignore-eos"]
    assert main(flags) == 0
    plain, made = capsys.readouterr().out, []
    monkeypatch.setattr("minivllm.engine.core.EngineCore.shutdown", lambda core: made.append(core.get_stats()))
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "dynamic_length": False}
    assert main([*flags, "--speculative-config", json.dumps(config | {"prompt_lookup_max": None})]) == 0
    assert capsys.readouterr().out == plain and made[0]["spec_decode_num_drafts"] > 0
    for given, says in ((json.dumps(config | {"method": "n-gram"}), "got 'n-gram'"), ("{", "--speculative-config")):
        with contextlib.suppress(SystemExit):
            assert main([*flags, "--speculative-config", given]) == 2
        assert says in capsys.readouterr().err


# ---- chat


def chat(engine, lines, **params):
    out = io.StringIO()
    session = ChatSession(engine, SamplingParams(**{"temperature": 0, "max_tokens": 8} | params), out)
    left = iter(lines)

    def read(prompt):
        try:
            line = next(left)
        except StopIteration:
            raise EOFError from None
        if isinstance(line, BaseException):
            raise line
        return line

    session.run(read, "> ")
    return session, out.getvalue()


def test_a_conversation_grows_and_is_reset(engine):
    session, said = chat(engine, ["one", "two"])
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    assert said == f"{session.messages[1]['content']}\n{session.messages[3]['content']}\n"
    session, _ = chat(engine, ["one", "/reset", "two"])
    assert session.messages[0]["content"] == "two"
    session, _ = chat(engine, ["one", "/system Be brief.", "two", ""])
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]


def test_commands(engine):
    _, said = chat(engine, ["/help", "/nonsense"])
    assert "/system TEXT" in said and "unknown command /nonsense" in said
    session, _ = chat(engine, ["/exit", "never heard"])
    assert session.messages == []


def test_ctrl_c_at_the_prompt_forgets_the_line(engine):
    session, _ = chat(engine, [KeyboardInterrupt(), "one"])
    assert len(session.messages) == 2


def test_ctrl_c_stops_the_answer_and_keeps_it(engine):
    def press(logits, view):
        if len(view.output_token_ids) == 2:
            signal.raise_signal(signal.SIGINT)
        return logits

    session, said = chat(engine, ["one"], max_tokens=100, logits_processors=[press])
    assert said == session.messages[1]["content"] + " [stopped]\n"
    assert not engine.has_unfinished_requests() and chat(engine, ["two"])[1]


def test_a_conversation_that_is_too_long_says_so(engine):
    session, said = chat(engine, ["x" * 300, "short"])
    assert "error: the prompt has" in said and "/reset starts over" in said
    assert session.messages[0]["content"] == "short"


def test_an_abandoned_stream_is_aborted(engine):
    stream = stream_answer(engine, "Hello", SamplingParams(temperature=0, max_tokens=50))
    next(stream)
    stream.close()
    assert not engine.has_unfinished_requests()


def test_chat_through_a_pipe(path):
    done = run("chat", *small(path), "--temperature", "0", "--max-tokens", "5", stdin="one\n/what\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2 and "unknown command /what" in done.stdout and ">" not in done.stdout[:1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_chat_at_a_terminal(path):
    """A real pseudo-terminal: prompt, answer, Ctrl-C in an endless answer, Ctrl-D."""
    import pty

    parent, child = pty.openpty()
    length = 20_000  # seconds of text: a Ctrl-C finds the answer under way on any machine
    arguments = ["chat", "--model", path, "--dtype", "float32", "--temperature", "0", "--ignore-eos"]
    arguments += ["--hf-overrides", json.dumps({"max_position_embeddings": length})]
    arguments += ["--max-model-len", str(length), "--max-tokens", str(length - 100)]
    process = subprocess.Popen([*COMMAND, *arguments], stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    try:
        assert "/help lists the commands" in read_until(parent, "> ")
        os.write(parent, b"hi\n")
        read_until(parent, ".{200}")  # more than the echo
        process.send_signal(signal.SIGINT)
        read_until(parent, r" \[stopped\].*> ")
        os.write(parent, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def read_until(descriptor, pattern, seconds=90.0):
    seen, end = "", time.monotonic() + seconds
    while not re.search(pattern, seen, re.DOTALL):
        assert time.monotonic() < end, f"waited for {pattern!r}, saw {seen!r}"
        seen += os.read(descriptor, 4096).decode(errors="replace")
    return seen


# ---- the others


def test_collect_env(capsys):
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "memory" in out and "/home" not in out


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("minivllm ")


@pytest.mark.slow
def test_demo_shows_answers_steps_and_blocks(smollm2_path, capsys):
    assert main(["demo", "--max-tokens", "24", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    for letter in "ABCD":
        assert f"\n{letter}  " in "\n" + out
    assert "The capital of France is Paris." in out and out.count("   -> ") == 4
    steps = out[out.index("KV blocks") :].splitlines()
    assert steps[1].split()[:3] == ["0", "48", "42"] and "#" in steps[1] and "tokens cached" in out and "ends (" in out
