"""The trace finds its own faults, survives files, and becomes tables that agree with it."""

import inspect
import json
import math
import re

import pytest
from scheduling import fake_model, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.events import SCHEMA, EventReader, Fold, FoldReader, named, read
from minivllm.core.policy import FairShare
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler, Swap, VirtualClock
from minivllm.core.trace import Trace, TraceError
from minivllm.core.trace_files import TraceFileError


@pytest.fixture(scope="module", params=["recompute", "swap"])
def trace(request) -> Trace:
    clock = VirtualClock()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40),
        CacheConfig(4, 14),
        clock=clock,
        preemption=Swap(20) if request.param == "swap" else None,
    )
    made = scheduler.record()
    for i in range(8):
        scheduler.add_request(
            Request(
                f"r{i}",
                [1] * 5 + [i] * i,
                max_tokens=20,
                arrival_time=clock.now(),
                user="ann" if i % 2 else None,
                cache_salt="salt" if i == 3 else None,
                extra_keys=(("image", b"\x00\xff"), 7) if i == 4 else (),
            )
        )
        step(scheduler, clock)
    scheduler.finish_requests(["r7"])
    while scheduler.has_requests():
        step(scheduler, clock)
    assert scheduler.num_preemptions
    made.check()
    return made


def step(scheduler, clock):
    output = scheduler.schedule()
    clock.advance(0.01 + 0.001 * output.total_num_scheduled_tokens)
    scheduler.update_from_output(output, fake_model(output, scheduler))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_files_bring_everything_back(trace, tmp_path, ending):
    pytest.importorskip("pyarrow")
    path = tmp_path / f"run.{ending}"
    trace.save(path)
    again = Trace.load(path)
    assert again == trace
    assert [again.at(i) for i in range(again.num_steps)] == [state for _, state in trace.states()]


def test_a_trace_tells_what_it_was_recorded_with(trace):
    told = {event[1]: event[2] for event in trace.events if event[0] == "attributes"}
    assert told == {"r3": {"cache_salt": "salt"}, "r4": {"extra_keys": (("image", b"\x00\xff"), 7)}}
    assert "step 2: asked for cache_salt='salt'" in trace.why("r3")
    assert (trace.header.preemption == "swap") == bool(trace.header.num_cpu_blocks)
    groups = kv_config("hybrid", 4, 32)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        CacheConfig(4, 32),
        groups,
        policy=FairShare(output_weight=3.0),
    )
    head = scheduler.record().header
    assert head.policy_arguments == {"input_weight": 1.0, "output_weight": 3.0}
    assert [g["spec"]["kind"] for g in head.groups] == [g.spec.kind for g in groups.groups]


def test_an_extra_key_that_no_file_can_hold_is_named(tmp_path):
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), CacheConfig(4, 14))
    made = scheduler.record()
    scheduler.add_request(Request("a", [1], max_tokens=1, extra_keys=(frozenset({1}),)))
    with pytest.raises(TypeError, match=r"extra key frozenset\(\{1\}\) cannot be saved"):
        made.save(tmp_path / "x.jsonl")
    assert not list(tmp_path.iterdir())


def test_at_agrees_with_folding_in_order_in_any_order(trace):
    states = dict(trace.states())
    for i in sorted(states, key=lambda i: (i * 7919) % len(states)):
        assert trace.at(i) == states[i]
    assert trace.at(-1) == states[len(states) - 1]
    for bad in (len(states), -len(states) - 1):
        with pytest.raises(IndexError, match=f"step {bad} of a trace with {len(states)} steps"):
            trace.at(bad)


def test_tables_agree_with_the_trace(trace):
    frames = trace.to_pandas()
    steps, requests, tokens, blocks = (
        frames["steps"],
        frames["requests"].set_index("request_id"),
        frames["tokens"],
        frames["blocks"],
    )
    for i, state in trace.states():
        row = steps.iloc[i]
        assert row["num_running"] == len(state.running)
        assert row["num_waiting"] == len(state.waiting)
        assert row["used_blocks"] == sum(ref > 0 for ref in state.ref_cnt)
        assert row["free_blocks"] + row["cached_blocks"] == len(state.free)
    assert steps["num_tokens"].sum() == sum(sum(e[1].values()) for e in trace.events if e[0] == "schedule")
    assert (steps["num_prefill_tokens"] + steps["num_decodes"] == steps["num_tokens"]).all()
    assert (
        tokens.groupby("request_id").size().to_dict()
        == requests["num_output_tokens"][requests["num_output_tokens"] > 0].to_dict()
    )
    assert requests.loc["r7", "finish_reason"] == "abort"
    assert requests["num_preemptions"].sum() == sum(e[0] == "preempt" for e in trace.events)
    done = requests.drop("r7")
    assert (done["queue_time"] >= 0).all()
    assert (done["ttft"] <= done["e2e"]).all()
    first = done.loc["r0"]
    assert math.isclose(first["tpot"] * (first["num_output_tokens"] - 1) + first["ttft"], first["e2e"])
    assert (blocks.dtypes[["group", "position"]] == "Int64").all(), "an eviction has none, and numbers stay whole"
    taken = blocks[blocks["event"] == "allocated"].shape[0]
    assert taken == sum(sum(b > 0 for b in e[3]) for e in trace.events if e[0] == "alloc")


def test_why_in_plain_words(trace):
    victim = next(e for e in trace.events if e[0] == "preempt")
    lines = trace.why(victim[1])
    assert any("preempted" in line and f"{victim[3]} needed blocks" in line for line in lines)
    assert lines[0].endswith("prompt tokens")
    step = int(next(line for line in lines if "preempted" in line).split()[1].rstrip(":"))
    assert trace.why(victim[1], step)
    assert all(line.startswith(f"step {step}:") for line in trace.why(victim[1], step))
    assert any("waited" in line for r in range(8) for line in trace.why(f"r{r}"))
    with pytest.raises(KeyError, match="no request 'nobody' in this trace, which begins with the ids '"):
        trace.why("nobody")


def test_why_tells_what_a_window_gives_back():
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=40)
    s = Scheduler(config, CacheConfig(4, 16), kv_config("window", 4, 16))
    trace = s.record()
    s.add_request(Request("w", list(range(14)), max_tokens=12))
    while s.has_requests():
        output = s.schedule()
        s.update_from_output(output, fake_model(output, s))
    took = [block for e in trace.events if e[0] == "alloc" for block in e[3]]
    given = [block for e in trace.events if e[0] == "skip" for block in e[5]]
    lines = [line for line in trace.why("w") if "gave back block" in line]
    assert len(given) >= 3 and set(given) <= set(took)
    assert [int(n) for line in lines for n in re.findall(r"\d+", line.split("gave back")[1])] == given


class Words:
    """A tokenizer of whole words; ids from 90 on are special."""

    all_special_ids = (90, 91)

    def decode(self, ids):
        return "".join({90: "<start>", 91: "<end>"}.get(i, f" w{i}") for i in ids)


def test_why_tells_text_and_one_line_for_decodes_in_a_row(trace):
    lines = trace.why("r0")
    sampled = [line for line in lines if "sampled" in line]
    assert sampled == [line for line in sampled if "[" in line], "ids, where no tokenizer is known"
    steps = sum("schedule" == e.kind and "r0" in e.num_scheduled for e in trace)
    assert len(sampled) < steps / 2
    assert sum(line.count("computed, sampled") for line in lines) == len(sampled)
    trace.tokenizer = Words()
    try:
        told = [line for line in trace.why("r0") if "sampled" in line]
        tokens = [t for e in trace if e.kind == "update" for t in e.tokens.get("r0", ())]
        assert "".join(line.split("sampled ")[1].strip("'") for line in told) == Words().decode(tokens)
    finally:
        trace.tokenizer = None


def test_requests_are_named_by_the_words_in_which_they_differ():
    scheduler = Scheduler(SchedulerConfig(), CacheConfig())
    made = scheduler.record()
    asked = {
        "a": [90, 1, 2, 91, 90, 3, 4, 91],
        "b": [90, 1, 2, 91, 90, 5, 91],
        "c": [90, 1, 2, 91, 90, 5, 91],
        "d": [7] * 30,
    }
    for name, prompt in asked.items():
        scheduler.add_request(Request(name, prompt, max_tokens=1))
    assert made.names() == {name: name for name in asked}, "no text is known"
    named = made.names(Words())
    assert named["a"] == "w3 w4" and named["b"] == "w5" and named["c"] == "w5 (2)"
    assert named["d"].startswith("w7 w7") and named["d"].endswith("…") and len(named["d"]) <= 29


def test_names_leave_out_a_common_beginning():
    scheduler = Scheduler(SchedulerConfig(), CacheConfig())
    made = scheduler.record()
    for i in range(3):
        scheduler.add_request(Request(str(i), [*range(40), 50 + i], max_tokens=1))
    assert list(made.names(Words()).values()) == ["w50", "w51", "w52"]


def test_events_have_their_fields_by_name(trace):
    assert [tuple(event)[: len(raw)] for event, raw in zip(trace, trace.events, strict=True)] == trace.events
    add = next(event for event in trace if event.kind == "add")
    assert (add.request, add.num_prompt, add.max_tokens) == add[1:4]
    assert named(("update", 0.5, {})).step is None
    with pytest.raises(KeyError):
        named(("what", 1))


def test_methods_of_a_reader_take_the_fields_of_the_schema():
    """A wrong kind is an error when the class is made; fields are told in the order of the schema."""
    with pytest.raises(TypeError, match="Reader._on_allok: there is no such event; there are step, add"):
        type("Reader", (EventReader,), {"_on_allok": lambda self: None})
    for kind, fields in SCHEMA.items():
        told = [p for p in inspect.signature(getattr(Fold, f"_on_{kind}")).parameters.values() if p.name != "self"]
        plain = [p.name for p in told if p.kind is not p.VAR_POSITIONAL]
        assert tuple(plain) == fields[: len(plain)], kind
        assert len(plain) == len(fields) or told[-1].kind is told[-1].VAR_POSITIONAL, kind


def test_readers_share_one_fold(trace):
    class Counts(FoldReader):
        def begin(self):
            self.used, self.kinds = [], 0

        def end_step(self):
            self.used.append(self.fold.num_used)

        def _on_alloc(self, request, group, blocks):
            assert all(self.fold.now.ref_cnt[block] == 0 for block in blocks), "the fold is as it was before the event"

    readers = Counts(), Counts()
    end = read(trace, *readers)
    assert end.state() == trace.at(-1) and readers[0].fold is readers[1].fold
    assert readers[0].used == readers[1].used == [sum(n > 0 for n in state.ref_cnt) for _, state in trace.states()]


def test_pictures_say_where_they_come_from(trace, monkeypatch):
    monkeypatch.setattr("minivllm.core.views._provider", None)
    with pytest.raises(ImportError, match="show belongs to the views"):
        trace.show()


def mutate(trace, i, *events):
    broken = Trace(trace.header, trace.start)
    broken.events = [*trace.events[:i], *events, *trace.events[i + 1 :]]
    return broken


def test_check_points_at_the_first_bad_event(trace):
    def where(kind):
        return next(i for i, e in enumerate(trace.events) if e[0] == kind)

    i = where("alloc")
    event = trace.events[i]
    cases = [
        (mutate(trace, i), r"after step|event \d+"),
        (mutate(trace, i, event, event), rf"event {i + 1}"),
        (
            mutate(
                trace,
                where("finish"),
                trace.events[where("finish")],
                ("alloc", trace.events[where("finish")][1], 0, (13,)),
            ),
            "has finished",
        ),
        (mutate(trace, where("schedule"), ("schedule", {"r0": 17})), "more than the budget of 16"),
        (mutate(trace, where("free"), ("what",)), "unknown event 'what'"),
        (mutate(trace, where("free")), r"event \d+"),
        (
            mutate(
                trace,
                where("finish"),
                trace.events[where("finish")],
                ("wait", trace.events[where("finish")][1], "budget"),
            ),
            "has finished",
        ),
        (
            mutate(trace, where("step"), trace.events[where("step")], ("update", 0.0, {"r0": (1,)})),
            "r0 gained a token, but 0 of its 5",
        ),
    ]
    for broken, words in cases:
        with pytest.raises(TraceError, match=words):
            broken.check()


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "the file is empty"),
        ("[1]\n", "not a trace of minivllm"),
        ("{}\n", "not a trace of minivllm"),
        ("not json\n", "line 1: not a trace event"),
        ('{"trace": {"version": 99}}\n', "version 99; this program reads version 2"),
    ],
)
def test_broken_files_are_named(tmp_path, text, words):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(TraceFileError, match=f"x.jsonl.*{words}"):
        Trace.load(path)


def test_broken_line_and_binary_file(trace, tmp_path):
    path = tmp_path / "x.jsonl"
    trace.save(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], lines[5][:-3], *lines[6:]]))
    with pytest.raises(TraceFileError, match="line 6"):
        Trace.load(path)
    for name in ("y.jsonl", "y.parquet"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00\x01")
        with pytest.raises(TraceFileError, match=name):
            Trace.load(tmp_path / name)
        with pytest.raises(FileNotFoundError):
            Trace.load(tmp_path / f"missing-{name}")
    with pytest.raises(ValueError, match="saved as .jsonl or .parquet"):
        trace.save(tmp_path / "x.csv")


def test_perfetto_file(trace, tmp_path):
    trace.to_perfetto(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"r0", "r7", "engine"} <= tracks
    assert sum(e["ph"] == "X" and e["name"] == "step" for e in events) == trace.num_steps
    assert {"waiting", "prefill", "decode"} <= {e["name"] for e in events if e["ph"] == "X"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert {"tokens", "budget", "blocks", "requests"} == {e["name"] for e in events if e["ph"] == "C"}


def test_recording_can_start_in_the_middle():
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, max_model_len=40), CacheConfig(4, 20)
    )
    for i in range(4):
        scheduler.add_request(Request(f"r{i}", [i] * 9, max_tokens=5))
    clock = VirtualClock()
    step(scheduler, clock)
    trace = scheduler.record()
    while scheduler.has_requests():
        step(scheduler, clock)
    trace.check()
    assert trace.at(-1) == scheduler.state()
    assert trace.why("r0")
    scheduler.stop_recording()
    n = len(trace.events)
    scheduler.add_request(Request("more", [1], max_tokens=1))
    assert len(trace.events) == n


def test_empty_trace():
    trace = Scheduler(SchedulerConfig(), CacheConfig()).record()
    trace.check()
    assert trace.num_steps == 0
    assert all(frame.empty for frame in trace.to_pandas().values())
    with pytest.raises(IndexError, match="0 steps"):
        trace.at(-1)
