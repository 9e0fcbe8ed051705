"""Readers: each format, streamed, and errors that name file and line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.scheduler import VirtualClock
from minivllm.lab import read_workload, simulate
from minivllm.lab.cost import Constant
from minivllm.lab.readers import WorkloadFileError, _json_items, read_sharegpt, split_into_tokens, tell_format
from minivllm.lab.workload import WorkloadRequest, chat, poisson

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.017335+00:00,2399,6\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 300, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 3]}\n\n'
    '{"timestamp": 2500, "input_length": 1024, "output_length": 1, "hash_ids": [0, 4]}\n'
)
BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 33, "output_length": 4, "type": "text", "turn": 1, "hash_ids": [5, 6, 9]}\n'
    '{"chat_id": 8, "parent_chat_id": 7, "timestamp": 7.25, "input_length": 40, "output_length": 2, "type": "text", "turn": 2, "hash_ids": [5, 6, 11]}\n'
    '{"chat_id": 9, "parent_chat_id": -1, "timestamp": 8, "input_length": 16, "output_length": 2, "type": "text", "turn": 1, "hash_ids": [5]}\n'
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    "45.5,GPT-4,0,0,0,API log\n118,GPT-4,417,276,693,Conversation log\n"
)
CONVERSATION = {
    "id": "x",
    "conversations": [
        {"from": "human", "value": "Where is the moon?"},
        {"from": "gpt", "value": "Above."},
        {"from": "human", "value": "And tomorrow?"},
        {"from": "gpt", "value": "Above as well, most likely."},
    ],
}
MESSAGES = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}  # fmt: skip
BENCH = {
    "date": "20250101-000000", "num_prompts": 3, "request_rate": 2.0, "burstiness": 1.0, "completed": 2,
    "input_lens": [100, 200, 300], "output_lens": [10, 0, 30], "ttfts": [0.1, 0, 0.2], "itls": [[0.01] * 9, [], [0.01] * 29],
}  # fmt: skip
FILES = {
    "azure": AZURE,
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "burstgpt": BURSTGPT,
    "sharegpt": json.dumps([CONVERSATION, MESSAGES], indent=1),
    "bench": json.dumps(BENCH),
}


def written(folder, content, name="workload.dat"):
    path = folder / name
    path.write_text(content, newline="")
    return path


def lengths(workload):
    requests = workload if isinstance(workload, list) else workload.unrolled()
    return [(round(r.arrival_time, 6), r.num_prompt_tokens, r.num_output_tokens) for r in requests]


@pytest.mark.parametrize(
    ("kind", "mark"),
    [
        *((kind, mark) for kind in FILES for mark in ("", "\ufeff")),
        *((kind, "\n \n") for kind in ("mooncake", "sharegpt", "bench")),
    ],
)
def test_format_is_told_from_content(tmp_path, kind, mark):
    path = written(tmp_path, mark + FILES[kind])
    assert tell_format(path) == kind
    assert list(read_workload(path))


def test_conversations_as_json_lines(tmp_path):
    lines = json.dumps(CONVERSATION) + "\n" + json.dumps(MESSAGES) + "\n"
    a, b = (read_workload(written(tmp_path, text)) for text in (lines, FILES["sharegpt"]))
    assert tell_format(written(tmp_path, lines)) == "sharegpt"
    assert lengths(a) == lengths(b) and len(lengths(a)) == 3


def test_azure(tmp_path):
    assert lengths(read_workload(written(tmp_path, AZURE))) == [(0.0, 374, 44), (4.314579, 396, 109)]
    assert lengths(read_workload(written(tmp_path, AZURE_2024))) == [(0.0, 2162, 5), (1.007405, 2399, 6)]


def test_mooncake_shares_exactly_what_its_ids_say(tmp_path):
    a, b, c = read_workload(written(tmp_path, MOONCAKE))
    assert [r.arrival_time for r in (a, b, c)] == [0.0, 0.3, 2.5]
    assert a.prompt_token_ids()[:1024] == b.prompt_token_ids()[:1024]
    assert not set(a.prompt_token_ids()[1024:]) & set(b.prompt_token_ids()[1024:])
    assert a.prompt_token_ids()[:512] == c.prompt_token_ids()[:512] and not set(a.prompt_token_ids()) & set(
        c.prompt_token_ids()[512:]
    )
    assert not {*a.output} & {*b.output} and not {*a.output} & {*a.prompt_token_ids()}


def test_bailian_is_told_from_mooncake(tmp_path):
    """Blocks of 16 tokens, times in seconds, and turns of one conversation under one name."""
    path = written(tmp_path, BAILIAN)
    first, second, third = read_workload(path)
    assert tell_format(path) == "bailian" and lengths([first, second, third]) == [
        (1.5, 33, 4),
        (7.25, 40, 2),
        (8.0, 16, 2),
    ]
    assert [r.session for r in (first, second, third)] == ["7", "7", "9"]
    shared = set(first.block_names(16)) & set(second.block_names(16))
    assert len(shared) == 2 and third.prompt_token_ids() == first.prompt_token_ids()[:16]
    wide = written(tmp_path, BAILIAN.replace("[5, 6, 9]", "[5, 6]").replace("[5, 6, 11]", "[5, 7]"), "wide")
    assert [r.num_prompt_tokens for r in read_workload(wide, block_size=32)] == [33, 40, 16]
    with pytest.raises(ValueError, match="block_size goes with files of hash ids, and azure is of the format 'azure'"):
        read_workload(written(tmp_path, AZURE, "azure"), block_size=16)


def test_no_request_arrives_at_a_moment_that_is_none():
    for moment in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"'0': arrival_time must be finite, got"):
            WorkloadRequest("0", moment, ([1],), [2])
        with pytest.raises(ValueError, match="a finite time"):
            VirtualClock().advance(moment)
        with pytest.raises(ValueError, match="finite"):
            poisson(1, 5).faster(moment)
        with pytest.raises(ValueError, match="think_time must be finite"):
            chat(1, 5, think_time=moment)


def test_burstgpt_counts_failed_requests(tmp_path):
    workload = read_workload(written(tmp_path, BURSTGPT))
    for _ in range(2):
        assert lengths(workload) == [(0.0, 472, 18), (113.0, 417, 276)]
        assert workload.skipped == {"no prompt tokens": 1}
    assert [r.user for r in workload] == ["ChatGPT", "GPT-4"]
    head = workload.head(2)
    assert len(list(head)) == 2 and head.skipped == {"no prompt tokens": 1}


def test_sharegpt_turns_and_tokenizer(tmp_path):
    path = written(tmp_path, FILES["sharegpt"])
    first, second = read_sharegpt(path, tokenize=lambda text: [ord(sign) for sign in text], think_time=2.0)
    turns = [turn["value"] for turn in CONVERSATION["conversations"]]
    assert "".join(map(chr, first.prompt_token_ids())) == turns[0] and "".join(map(chr, first.output)) == turns[1]
    after = first.follow_up(10.0)
    assert after.arrival_time == 12.0
    assert (
        "".join(map(chr, after.prompt_token_ids())) == "".join(turns[:3])
        and "".join(map(chr, after.output)) == turns[3]
    )
    assert after.follow_up is None and second.num_prompt_tokens == len("Be short.Hi")
    assert split_into_tokens("the schedulers") == split_into_tokens("the") + split_into_tokens(" schedulers")


def test_conversation_without_question_is_counted(tmp_path):
    only = {"conversations": [{"from": "gpt", "value": "Hello!"}]}
    workload = read_workload(written(tmp_path, json.dumps([only, CONVERSATION])))
    assert len(list(workload)) == 1 and workload.skipped == {"a conversation without a question and an answer": 1}


def test_bench_serve(tmp_path):
    drawn = read_workload(written(tmp_path, FILES["bench"]))
    assert [(p, n) for _, p, n in lengths(drawn)] == [(100, 10), (300, 30)] and lengths(drawn)[0][0] > 0
    timed = {**BENCH, "start_times": [12.5, 11.0, 11.5]}
    assert lengths(read_workload(written(tmp_path, json.dumps(timed)))) == [(0.5, 300, 30), (1.5, 100, 10)]
    at_once = {**BENCH, "request_rate": "inf"}
    assert [t for t, _, _ in lengths(read_workload(written(tmp_path, json.dumps(at_once))))] == [0.0, 0.0]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_recorded_trace_is_a_workload(tmp_path, ending):
    run = simulate(poisson(50, 10, (3, 9), (1, 5)), config={"num_gpu_blocks": 64}, cost_model=Constant(0.01))
    path = tmp_path / f"run.{ending}"
    run.trace.save(path)
    assert [(p, n) for _, p, n in lengths(read_workload(path))] == [
        (p, n) for _, p, n in lengths(poisson(50, 10, (3, 9), (1, 5)))
    ]


BROKEN = [
    (AZURE.replace("396", "many"), "workload.dat, line 3: 'ContextTokens' must be a whole number, at least 0, got 'many'"),
    (AZURE.replace("2023-11-16 18:15:50", "yesterday"), "line 3: Invalid isoformat string"),
    (AZURE.replace(",109", ""), "line 3: 2 fields, the header has 3"),
    ("ContextTokens,GeneratedTokens\n1,2\n", "line 1: no column 'TIMESTAMP'"),
    (MOONCAKE.replace('"hash_ids": [0, 1, 3]', '"hash_ids": [0, 1]'), "line 2: 'hash_ids' must have 3 ids of 512 tokens for 1100 tokens, got 2"),
    (MOONCAKE.replace("[0, 4]", "[0, -4]"), "line 4: 'hash_ids' must be whole numbers"),
    (MOONCAKE.replace('"input_length": 1100, ', ""), "line 2: 'input_length' must be a whole number, at least 0, got None"),
    (MOONCAKE.replace('"timestamp": 300', '"timestamp": true'), "line 2: 'timestamp' must be a whole number"),
    (MOONCAKE.replace("1100,", "1100"), "line 2: not JSON"),
    (BURSTGPT.replace("118,", "noon,"), "line 4: could not convert string to float: 'noon'"),
    (json.dumps([CONVERSATION, {"conversations": [{"from": "human"}]}], indent=0), "needs the texts 'from' and 'value'"),
    (json.dumps([CONVERSATION, {"other": 1}]), "line 1: no list 'conversations' or 'messages'"),
    (json.dumps([CONVERSATION], indent=1)[:-2], "the array is not closed"),
    (json.dumps([CONVERSATION], indent=1).replace('"gpt",', '"gpt"', 1), "line 11: not JSON"),
    (json.dumps({**BENCH, "output_lens": [1, 2]}), "lists of different length"),
    (json.dumps({**BENCH, "input_lens": [1, 2, "3"]}), r"input_lens\[2\] must be a number, got '3'"),
    (json.dumps({**BENCH, "start_times": [1.0, None, 3.0]}), r"line 1: start_times\[1\] must be a finite number of seconds, got None"),
    (json.dumps({**BENCH, "start_times": [1.0, 2.0, float("nan")]}), r"start_times\[2\] must be a finite number of seconds, got nan"),
    (json.dumps({**BENCH, "input_lens": [1, 2, float("inf")]}), r"'input_lens\[2\]' must be a whole number, at least 0, got inf"),
    (json.dumps({**BENCH, "request_rate": float("nan")}), "line 1: rate must be above 0 requests per second, got nan"),
    (AZURE + "2023-11-16 18:15:47,1,2\r\n", r"line 4: arrives at 0.31941 s, before the one in front of it \(4.31458 s\)"),
    (MOONCAKE.replace("2500", "200"), r"line 4: arrives at 0.2 s, before the one in front of it \(0.3 s\)"),
    (MOONCAKE.replace("2500", "NaN"), "line 4: 'timestamp' must be a whole number, at least 0, got nan"),
    (BAILIAN.replace("7.25", "Infinity"), "line 2: 'timestamp' must be a finite number of seconds, got inf"),
    (BAILIAN.replace("7.25", "0.5"), r"line 2: arrives at 0.5 s, before the one in front of it \(1.5 s\)"),
    (BURSTGPT.replace("118,", "nan,"), "line 4: 'Timestamp' must be a finite number of seconds, got 'nan'"),
    (BURSTGPT.replace("118,", "inf,"), "line 4: 'Timestamp' must be a finite number of seconds, got 'inf'"),
    (BURSTGPT.replace("118,", "3,"), r"line 4: arrives at -2 s, before the one in front of it \(0 s\)"),
    (json.dumps({"num_prompts": 3}), "with --save-result --save-detailed"),
    ("hello, world\n", "no known workload format. It begins with 'hello, world'"),
    ("", "no known workload format"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_broken_files_say_where(tmp_path, content, message):
    with pytest.raises(WorkloadFileError, match=message.replace("(", r"\(").replace(r"\\(", r"\(")):
        list(read_workload(written(tmp_path, content)))


def test_requests_before_the_broken_line_arrive(tmp_path):
    stream = iter(read_workload(written(tmp_path, AZURE + "oops\n")))
    assert [next(stream).num_prompt_tokens for _ in range(2)] == [374, 396]
    with pytest.raises(WorkloadFileError, match="line 4"):
        next(stream)


def test_limit(tmp_path):
    path = written(tmp_path, AZURE + "oops\n")
    assert len(list(read_workload(path, limit=2))) == 2
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_workload(path, limit=0)
    with pytest.raises(FileNotFoundError):
        read_workload(tmp_path / "missing.csv")


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=30), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))  # fmt: skip


@given(items=st.lists(VALUES, max_size=6), chunk=st.integers(1, 50), indent=st.sampled_from([None, 0, 2]))
@settings(max_examples=60)
def test_streamed_array_equals_the_whole(tmp_path_factory, items, chunk, indent):
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_text(json.dumps(items, indent=indent, ensure_ascii=False))
    streamed = list(_json_items(path, chunk))
    assert [value for _, value in streamed] == items
    assert all(line <= path.read_text().count("\n") + 1 for line, _ in streamed)


def test_published_files(trace_files):
    azure, mooncake = trace_files / "azure_llm_2023_conv.csv", trace_files / "mooncake_conversation.jsonl"
    if azure.exists():
        table = read_workload(azure).to_pandas()
        assert len(table) == 19_366 and table.arrival.is_monotonic_increasing
    if mooncake.exists():
        workload = read_workload(mooncake)
        assert sum(1 for _ in workload) == 12_031 and not workload.skipped
