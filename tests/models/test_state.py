"""State-space layers: three forms of a recurrence, and whole models whose state outlives chunks, preemption and hits."""

# ruff: noqa: F811

import importlib.util
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from paged import PagedDecoder, make_decoder
from tiny_models import STATES, VOCAB_SIZE, hf_model, logits_equal, tiny_model_path  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.attention.backend import AttentionBatch
from minivllm.attention.state import MambaSpec, Sequences, StateView, plan_states
from minivllm.core.config import KVCacheSpec, _check_drafts, make_kv_cache_groups, unify_block_size
from minivllm.models.mixers.scan import (
    conv_scan,
    conv_step,
    delta_recurrence,
    delta_scan,
    selective_recurrence,
    selective_scan,
    ssd_recurrence,
    ssd_scan,
)
from minivllm.models.ops.states import Fixed, StateOps

CPU = torch.device("cpu")
BACKEND = "numba_cpu" if importlib.util.find_spec("numba") else "sdpa"
SPEC = MambaSpec(shapes=((6, 5), (3,)), dtypes=(torch.float32, torch.float32), block_size=4, dtype=torch.float32)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def hf_generate(name: str, tokens: list[int], max_tokens: int) -> list[int]:
    model = hf_model(name)
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([tokens]), max_new_tokens=max_tokens, do_sample=False)
    return out[0, len(tokens) :].tolist()


def close(got: torch.Tensor, want: torch.Tensor, share: float = 0.0) -> bool:
    """Within 1e-5 of the largest, and a share of the number itself."""
    return bool(((got - want).abs() <= 1e-5 * max(1.0, float(want.abs().max())) + share * want.abs()).all())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_ssd_in_chunks_is_the_recurrence(length):
    torch.manual_seed(length)
    x, dt, state = torch.randn(length, 4, 8), torch.rand(length, 4) * 3, torch.randn(4, 8, 16)
    B, C, A, D = torch.randn(length, 2, 16), torch.randn(length, 2, 16), -torch.rand(4) * 8, torch.randn(4)
    want, after = ssd_recurrence(x, dt, A, B, C, D, state)
    got, there = ssd_scan(x, dt, A, B, C, D, state)
    assert close(got, want) and close(there, after)


@pytest.mark.parametrize("length", [1, 64, 65, 150])
def test_the_delta_rule_in_chunks_is_the_recurrence(length):
    torch.manual_seed(length)
    q, k = (torch.nn.functional.normalize(torch.randn(length, 4, 8), dim=-1) for _ in range(2))
    v, log_decay, beta = torch.randn(length, 4, 12), -torch.rand(length, 4) * 3, torch.rand(length, 4)
    state = torch.randn(4, 8, 12)
    want, after = delta_recurrence(q, k, v, log_decay, beta, state)
    got, there = delta_scan(q, k, v, log_decay, beta, state)
    assert close(got, want) and close(there, after)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_the_selective_scan_in_chunks_is_the_recurrence(length):
    torch.manual_seed(length)
    x, dt, state = torch.randn(length, 12), torch.rand(length, 12) * 3, torch.randn(4, 12)
    B, C, A, D = torch.randn(length, 4), torch.randn(length, 4), -torch.rand(4, 12) * 8, torch.randn(12)
    want, after = selective_recurrence(x, dt, A, B, C, D, state)
    got, there = selective_scan(x, dt, A, B, C, D, state)
    assert close(got, want) and close(there, after)


@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_a_convolution_in_pieces_is_one_over_the_whole(kernel):
    u, weight, bias = torch.randn(30, 6), torch.randn(kernel, 6), torch.randn(6)
    padded = torch.nn.functional.pad(u.T[None], (kernel - 1, 0))
    want = torch.nn.functional.conv1d(padded, weight.T[:, None], bias, groups=6)[0].T
    state, ys = torch.zeros(kernel - 1, 6), []
    for piece in u.split([1, 9, 2, 18]):
        y, state = conv_scan(piece, weight, bias, state)
        ys.append(y)
    assert close(torch.cat(ys), want)
    states, ys = torch.zeros(1, kernel - 1, 6), []
    for token in u.split(1):
        y, states = conv_step(token, weight, bias, states)
        ys.append(y)
    assert close(torch.cat(ys), want) and torch.equal(states[0], state)


TOKENS = Sequences(torch.tensor([2, 5, 4]), torch.tensor([2, 3, 4]), torch.arange(4))
"""Three sequences with a token each: two in blocks of their own, one that goes on in another block."""
MANY = Sequences(torch.arange(1, 45).flip(0), torch.arange(1, 45).flip(0), torch.arange(45))
"""Enough for a thread to claim several parts at once, and fewer the last time."""
PIECES = [
    Sequences(torch.tensor([-1]), torch.tensor([1]), torch.tensor([0, 5]), single=False, fresh=True),
    Sequences(torch.tensor([5]), torch.tensor([3]), torch.tensor([0, 7]), single=False),
    Sequences(torch.tensor([2]), torch.tensor([2]), torch.tensor([0, 1]), single=False),
]
SHAPES = {"ssd": (4, 8, 32), "selective": (5, 48), "delta": (4, 8, 12), "conv": (3, 640), "gates": (2, 640)}


def recurrence(kind: str, ops, tokens: int, dtype: torch.dtype, device: str = "cpu"):
    """A call of one of the ops on random numbers, whose views lie in one matmul's output as those of a layer do."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape, scale=1.0):
        return (torch.rand(shape, generator=generator) * 2 - 1).mul(scale).to(device)

    def split(*sizes):
        u = random(tokens, sum(sizes), scale=3).to(dtype)
        return u.split(sizes, 1)

    if kind == "ssd":
        _, dt, x = split(9, 4, 160)
        bias, limits = random(4), torch.tensor([0.1, 2.0], device=device)
        fixed = Fixed(bias, -random(4).abs() * 8, random(4), limits)
        return lambda *where: ops.ssd(x.contiguous(), dt, fixed, 2, *where)
    if kind == "selective":
        x, z, B, C, dt = split(48, 48, 5, 5, 48)
        A, bias, D = -random(5, 48).abs() * 8, random(48), random(48)
        return lambda *where: ops.selective(x.contiguous(), dt.contiguous(), B, C, z, Fixed(bias, A, D), *where)
    if kind == "delta":
        qkv, b, a = split(2 * 2 * 8 + 4 * 12, 4, 4)
        fixed = Fixed(random(4), -random(4).abs())
        return lambda *where: ops.delta(qkv.contiguous(), b, a, fixed, 2, *where)
    x, before, after = split(640, 640, 640)
    taps = SHAPES[kind][0] + 1
    gates = (before, after) if kind == "gates" else None
    bias = None if gates else random(640)
    return lambda *where: ops.conv(x, random(taps, 640), bias, *where, gates=gates)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_cpu_kernel_is_the_recurrence_on_states_in_blocks(kind):
    """In bf16; whole models are float32. The states lie in the second half of a cache."""
    pytest.importorskip("numba")
    from minivllm.models.ops.states_cpu import NumbaCPUStateOps

    shape, dtype = SHAPES[kind], torch.bfloat16
    spec = MambaSpec(shapes=((2048,), shape), dtypes=(torch.float32,) * 2, block_size=4, dtype=dtype)
    for where in (TOKENS, MANY, *PIECES):
        got, blocks = [], torch.arange(45)
        for ops in (StateOps(), NumbaCPUStateOps()):
            view = StateView(torch.zeros(2, 45, 8192, dtype=torch.uint8), spec, 1)
            view.write(blocks, torch.randn(45, *shape, generator=torch.Generator().manual_seed(1)))
            y = recurrence(kind, ops, int(where.begins[-1]), dtype)(view, where)
            got.append((y, view.read(blocks)))
        (want, after), (mine, there) = got
        assert mine.dtype == want.dtype and close(there, after)
        last_bits = 2.0**-8 if want.dtype == torch.bfloat16 else 0.0
        assert close(mine.float(), want.float(), last_bits)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SHAPES)
def test_a_gpu_kernel_is_the_recurrence_on_states_in_blocks(kind):
    cuda = pytest.importorskip("minivllm_kernels.cuda.ops")
    if (reason := cuda.device_unsupported(torch.device("cuda"))) is not None:
        pytest.skip(reason)
    from minivllm.models.ops.states_cuda import NumbaCudaStateOps

    shape = SHAPES[kind]
    spec = MambaSpec(shapes=((2048,), shape), dtypes=(torch.float32,) * 2, block_size=4, dtype=torch.float32)
    for given in (TOKENS, *PIECES):
        parts = {name: getattr(given, name).cuda() for name in ("read", "write", "begins")}
        where, got = replace(given, **parts), []
        for ops in (StateOps(), NumbaCudaStateOps()):
            view = StateView(torch.zeros(2, 6, 8192, dtype=torch.uint8, device="cuda"), spec, 1)
            states = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1)).cuda()
            view.write(torch.arange(6, device="cuda"), states)
            y = recurrence(kind, ops, int(given.begins[-1]), torch.float32, "cuda")(view, where)
            got.append((y, view.read(torch.arange(6, device="cuda"))))
        (want, after), (mine, there) = got
        assert close(there, after) and close(mine, want)


@pytest.mark.parametrize(("gate_first", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_kernel_gates_and_norms_each_group(gate_first, dtype):
    pytest.importorskip("numba")
    from minivllm.models.ops.states_cpu import NumbaCPUStateOps

    torch.manual_seed(0)
    assert torch.equal(
        NumbaCPUStateOps().contiguous(torch.arange(60.0).view(3, 20)[:, 2:14]), torch.arange(60.0).view(3, 20)[:, 2:14]
    )
    y, u, weight = torch.randn(7, 3, 24), torch.randn(7, 100, dtype=dtype), torch.randn(3 if gate_first else 1, 24)
    want, got = (
        ops.gated_norm(y.clone(), u[:, 5:77], weight, 1e-5, gate_first) for ops in (StateOps(), NumbaCPUStateOps())
    )
    assert close(got.float(), want.float(), 2.0**-8 if dtype == torch.bfloat16 else 0.0)


@pytest.mark.parametrize(("first", "count"), [(0, 3), (7, 3), (7, 5), (7, 1)])
def test_a_ring_keeps_the_states_of_as_many_tokens_as_it_has_blocks(first, count):
    spec, table = replace(SPEC, ring=4), [5, 6, 7, 8]
    plan = plan_states(batch([0, count], [first + count], [table]), spec, CPU)
    if count == 1:
        assert (plan.decodes.read.tolist(), plan.decodes.write.tolist()) == ([table[6 % 4]], [table[7 % 4]])
    elif first and count <= 4:
        assert [tuple(p) for p in plan.pieces] == [
            (i, i + 1, table[(first + i - 1) % 4], table[(first + i) % 4]) for i in range(count)
        ]
    else:
        read = table[(first - 1) % 4] if first else -1
        assert [tuple(p) for p in plan.pieces] == [(0, count, read, table[(first + count - 1) % 4])]


def batch(starts: list[int], lens: list[int], table: list[list[int]]) -> AttentionBatch:
    arrays = [np.array(x, np.int32) for x in (starts, lens, table)]
    return AttentionBatch(*arrays, np.zeros(starts[-1], np.int64))


def test_a_request_that_starts_where_another_of_the_step_writes_comes_after_it():
    """The second has one token left; the third decodes, and its block is its own."""
    plan = plan_states(batch([0, 6, 7, 8], [6, 5, 7], [[1, 2], [1, 3], [9, 4]]), SPEC, CPU)
    assert (plan.rows.tolist(), plan.decodes.read.tolist(), plan.decodes.write.tolist()) == ([7], [4], [4])
    assert [tuple(piece) for piece in plan.pieces] == [(0, 4, -1, 1), (4, 6, 1, 2), (6, 7, 1, 3)]


def test_single_tokens_that_depend_on_each_other_are_not_worked_on_together():
    """The first fills block 1, from which the second goes on in the same step."""
    plan = plan_states(batch([0, 1, 2], [4, 5], [[1, 0], [1, 3]]), SPEC, CPU)
    assert plan.rows.tolist() == [0] and [tuple(piece) for piece in plan.pieces] == [(1, 2, 1, 3)]


def test_no_checkpoint_is_written_to_a_null_block():
    plan = plan_states(batch([0, 14], [16], [[7, 0, 0, 8]]), SPEC, CPU)  # two computed before
    assert [tuple(piece) for piece in plan.pieces] == [(0, 2, 7, 7), (2, 14, 7, 8)]


@pytest.mark.parametrize("shape", [(1, 5, 192), (2, 5, 24, 1, 4), (2, 5, 16, 2, 3)])
def test_states_lie_in_a_cache_of_any_layout(shape):
    """The first part of the state crosses from one half of the layout to the other."""
    dtype = torch.uint8 if shape[0] == 1 else torch.float32
    cache = torch.full(shape, 77, dtype=dtype)
    views = [StateView(cache, SPEC, part) for part in range(2)]
    blocks, states = torch.tensor([3, 1]), [torch.randn(2, *shape) for shape in SPEC.shapes]
    for view, state in zip(views, states, strict=True):
        view.write(blocks, state)
    assert all(torch.equal(view.read(blocks), state) for view, state in zip(views, states, strict=True))
    others = torch.full(shape, 77, dtype=dtype)
    assert torch.equal(cache[:, [0, 2, 4]], others[:, [0, 2, 4]])


def test_pages_of_attention_and_states_are_unified():
    attention, state = KVCacheSpec("full", 16, 2, 8, None, 2), KVCacheSpec("state", 16, 1, 3000, None, 1)
    size = unify_block_size([attention, state], 16)
    assert size == 48  # 1,024 bytes every 16 tokens
    specs = [KVCacheSpec("full", size, 2, 8, None, 2), state, state]
    groups = make_kv_cache_groups(specs)
    assert [group.spec.bytes_per_block for group in groups] == [3072] * len(groups)
    with pytest.raises(ValueError, match="different sizes.*larger block_size"):
        make_kv_cache_groups([attention, state])


BLOCKS = {"mamba2": 8, "lfm2": 14, "qwen3-next": 13, "granite-hybrid": 15, "mamba": 8, "jamba": 10, "bamba": 8}
"""Few enough that requests are preempted."""
SETTINGS = {
    "plain": {},
    "preempted": {"mamba_cache_mode": "all", "max_num_batched_tokens": 17, "max_num_seqs": 8},
    "swapped": {
        "num_cpu_blocks": 40,
        "preemption_mode": "swap",
        "max_num_batched_tokens": 11,
        "max_num_seqs": 8,
        "mamba_cache_mode": "align",
    },
}
PROMPTS = [prompt(n, seed=n) for n in (1, 5, 44, 61)]
PROMPTS += [PROMPTS[-1] + prompt(9, seed=3), PROMPTS[-1] + prompt(1, seed=9)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@cache
def wanted(name: str) -> list[list[int]]:
    return [hf_generate(name, tokens, 12) for tokens in PROMPTS]


def generate(engine, aborted: bool) -> list[list[int]]:
    """All prompts at once; and, if asked for, others that are aborted: one while it waits, one in its prompt, one that answers."""
    ends = {1: "waits", 3: "prompt", 9: "answers"} if aborted else {}
    for name in ends.values():
        engine.add_request(name, {"prompt_token_ids": PROMPTS[2] + prompt(7, seed=len(name))}, GREEDY)
    for i, tokens in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": tokens}, GREEDY)
    found, step = {}, 0
    while engine.has_unfinished_requests():
        found |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step()}
        step += 1
        engine.abort_request(ends.get(step, "nobody"))
    return [found[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("mamba2", "plain"),
        *((name, "preempted") for name in STATES),
        *(pytest.param(name, "swapped", marks=[] if name == "mamba2" else pytest.mark.slow) for name in STATES),
    ],
)
def test_generates_what_transformers_does(name, setting, tiny_model_path):
    """Twice: the second time prefixes hit, on a checkpoint and off it, and others are aborted in between."""
    torch.set_num_threads(1)
    more = {"num_gpu_blocks": BLOCKS[name]} if setting != "plain" else {}
    with LLM(str(tiny_model_path(name)), dtype="float32", max_model_len=96, **SETTINGS[setting] | more) as llm:
        for aborted in (False, True):
            assert generate(llm.llm_engine, aborted) == wanted(name)
        scheduler = llm.llm_engine.core.scheduler
        assert (scheduler.kv_cache_manager.stats.hit_tokens > 0) == (setting != "plain")
        assert (scheduler.num_preemptions > 0) == bool(more)


@pytest.mark.parametrize("name", STATES)
def test_logits_of_a_ragged_batch_in_chunks_of_1_to_64_tokens(name):
    model, decoder = hf_model(name), make_decoder(hf_model(name), BACKEND)
    texts = {"long": prompt(66, seed=4), "short": prompt(21, seed=5), "one": prompt(1, seed=6)}
    with torch.inference_mode():
        want = {key: model(torch.tensor([text])).logits[0] for key, text in texts.items()}
    for chunk in (1, 7, 16, 63, 64):
        paged = PagedDecoder(decoder)
        for key, text in texts.items():
            paged.add(key, text)
        while todo := {
            k: min(chunk, len(t) - paged.computed[k]) for k, t in texts.items() if paged.computed[k] < len(t)
        }:
            for key, got in paged.step(todo).items():
                last = paged.computed[key]
                assert logits_equal(got, want[key][last - len(got) : last])


@cache
def wide(name: str):
    """A model of sizes that the matmuls' kernels take, and without experts."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE}
    if name == "mamba":
        config = AutoConfig.for_model("mamba", state_size=16, time_step_rank=16, **sizes)
    else:
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "intermediate_size": 64}
        types = {"layer_types": ["linear_attention"], "mlp_only_layers": [0]}
        config = AutoConfig.for_model("qwen3_next", **sizes, **heads, **dims, **types)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "wide mamba", "wide delta"])
def test_decodes_are_one_launch_and_the_same_to_the_bit(name):
    pytest.importorskip("numba")
    model = wide(name.removeprefix("wide ")) if name.startswith("wide") else hf_model(name)
    decoder, found = make_decoder(model, "numba_cpu"), []
    for one_launch in (True, False):
        paged = PagedDecoder(decoder)
        if not one_launch:
            decoder._captured = None
        for length in (9, 20):
            paged.add(str(length), prompt(length, seed=length))
        steps = [{"9": 5, "20": 15}, {"9": 1, "20": 1}, {"20": 1}, {"20": 1, "9": 1}, {"9": 2, "20": 1}]
        found.append([torch.cat(list(paged.step(step).values())) for step in steps])
        if one_launch:
            assert decoder.captured.problem is None and not decoder.captured.refused
            assert {rows for rows, _ in decoder.captured._programs} == {1, 2}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_state_takes_one_block_at_any_length(tiny_model_path):
    with LLM(str(tiny_model_path("mamba2")), dtype="float32", max_model_len=96) as llm:
        engine, used = llm.llm_engine, set()
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        engine.add_request("r", {"prompt_token_ids": prompt(3)}, SamplingParams(max_tokens=80, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
            used.add(sum(block.ref_cnt > 0 for block in pool.blocks[1:]))
        assert used == {0, len(engine.core.scheduler.kv_cache_manager.groups)}


class Guesses:
    """Drafts the next tokens of an answer, every third of them wrong."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers

    def propose(self, requests, view):
        return [self.guess(request) for request in requests]

    def guess(self, request):
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        said = len(request.token_ids) - len(prompt)
        return [t if i % 3 else (t + 1) % 250 for i, t in enumerate(self.answers[prompt]) if said <= i < said + 3]


@pytest.mark.parametrize("name", ["mamba2", "qwen3-next"])
def test_rejected_drafts_are_taken_back_out_of_states(name, tiny_model_path):
    torch.set_num_threads(1)
    prompts = [prompt(n, seed=n) for n in (1, 5, 44)]
    want = [hf_generate(name, tokens, 12) for tokens in prompts]
    guesses = Guesses({tuple(p): w for p, w in zip(prompts, want, strict=True)})
    drafts = {"method": guesses, "num_speculative_tokens": 3, "dynamic_length": False}
    llm = LLM(str(tiny_model_path(name)), dtype="float32", max_model_len=96, speculative_config=drafts)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in outputs] == want
    stats = llm.llm_engine.core.scheduler.spec_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "mamba_cache_mode": "all"},
            "only the last states are kept, so mamba_cache_mode='all'",
        ),
        ({"kv_cache_dtype": "fp8"}, "has no keys and values"),
        ({"mamba_cache_mode": "all", "enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode must be one of"),
    ],
)
def test_refusals_name_the_argument(change, message, tiny_model_path):
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_model_path("mamba2")), **change)


def test_a_model_without_states_has_no_cache_mode(tiny_model_path):
    with pytest.raises(ValueError, match="has no state-space layers"):
        LLM(str(tiny_model_path("llama")), mamba_cache_mode="all")


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_proposer_with_a_cache_of_its_own_is_refused(method):
    args, model = SimpleNamespace(speculative=SimpleNamespace(method=method)), SimpleNamespace(name="m")
    with pytest.raises(ValueError, match=f"model 'm' has state-space layers, for which method '{method}' is not"):
        _check_drafts(args, model, "none")
