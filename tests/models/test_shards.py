"""The parts of a decoder give together what the whole gives. Ranks are threads here; `tests/runtime/test_parallel.py` has processes."""

import math
import queue

import pytest
import torch
from paged import PagedDecoder, make_decoder
from thread_ranks import Board, ThreadGroup, on_ranks
from tiny_models import STATES, TINY_MODELS, hf_config, hf_model, tiny_model_path

from minivllm.core.config import EngineArgs, KVCacheGroup, KVCacheSpec, stage_groups, stage_layers
from minivllm.core.module import capture_problem
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config
from minivllm.models.linear.layer import Shard
from minivllm.models.mixers.moe import ExpertLoads, MoE, MoESpec
from minivllm.models.parallel import Share, Stage, TensorGroup
from minivllm.runtime.executor import plan_engine

__all__ = ["tiny_model_path"]


@pytest.fixture(autouse=True)
def one_thread():
    """These matmuls are too small to share out; on a busy machine waiting for each other takes most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PROMPT = torch.randint(0, 250, (41,), generator=torch.Generator().manual_seed(5)).tolist()


class ThreadStage(Stage):
    """A stage whose neighbours are threads. pipes: a queue between each two stages of one rank."""

    def __init__(self, layers: range, index: int, pipes: list[queue.Queue]) -> None:
        super().__init__(layers, index == 0, index == len(pipes))
        self.index, self.pipes = index, pipes

    def send(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        self.pipes[self.index].put((x.clone(), residual.clone()))

    def receive(self, tokens: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.pipes[self.index - 1].get(timeout=120)
        assert x.shape == (tokens, like.shape[-1]) and x.dtype == like.dtype
        return x, residual


def logits_of(decoder: Decoder) -> torch.Tensor:
    """A prompt in two chunks."""
    paged = PagedDecoder(decoder)
    paged.add("a", PROMPT)
    return torch.cat([paged.step({"a": 30})["a"], paged.step({"a": 11})["a"]])


def test_a_group_gives_an_adder_what_it_takes(monkeypatch):
    class Doubles:
        takes = staticmethod(lambda x: x.numel() < 5)

        def __call__(self, x):
            x *= 2

    left = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: left.append((x, group)))
    group, small, large = TensorGroup(Share(0, 2), "these", Doubles()), torch.ones(2, 2), torch.ones(5)
    assert group.all_reduce(small) is small and group.all_reduce(large) is large
    assert small.tolist() == [[2, 2], [2, 2]] and large.tolist() == [1] * 5
    assert [(x is large, whose) for x, whose in left] == [(True, "these")] and group.calls == 2


@torch.inference_mode()
def want(name: str) -> torch.Tensor:
    return hf_model(name)(torch.tensor([PROMPT])).logits[0]


NORM_OVER_ALL = ("olmo2", "olmo3", "olmoe")
CASES = [(name, 2) for name in TINY_MODELS if name not in (*NORM_OVER_ALL, *STATES)]
CASES += [("falcon", 3), ("falcon-sequential", 6)]
FAST = ("llama-tied-biased", "phi3", "gpt-oss", "deepseek-v3", "qwen2-moe", "falcon", "gpt-neox")


@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(*case, marks=[] if case[0] in FAST and case[1] == 2 else [pytest.mark.slow]) for case in CASES],
)
def test_ranks_give_transformers_logits_and_hold_what_was_computed(name, size):
    spec = spec_from_config(hf_config(name).to_dict())
    share = Share(0, size)
    shapes = spec.weight_shapes(share)
    backend = "reference" if name == "gemma2" else "sdpa"  # a soft cap on scores is what sdpa has no room for

    def run(group: ThreadGroup):
        decoder = make_decoder(hf_model(name), backend, group=group)
        held = sum(math.prod(linear.weight.shape) for linear in decoder.linears())
        return logits_of(decoder), held, group.calls, decoder.attention_specs(8)[0].num_kv_heads

    results = on_ranks(size, run)
    for logits, held, calls, kv_heads in results:
        torch.testing.assert_close(logits, want(name), atol=3e-4, rtol=3e-4)
        assert torch.equal(logits, results[0][0]), "every rank must have the same bits"
        blocks = sum(layer.mixer is not None for layer in spec.layers) * 2
        assert calls == 2 * (1 + blocks + 1)
        outside = (spec.names.embedding, spec.names.head, spec.names.positions)
        matrices = sum(math.prod(s) for n, s in shapes.items() if len(s) == 2 and n not in outside and "kv_b" not in n)
        assert held == matrices
        whole = spec.layers[0].mixer.attention_spec(8, torch.float32, None).num_kv_heads
        assert kv_heads == max(1, whole // size)


@pytest.mark.parametrize("name", FAST)
def test_a_rank_can_be_captured_where_the_whole_model_can(name):
    """As the graphs of a GPU are. On a CPU the ranks add up between the kernels of a step, so each is launched by itself."""
    alone = PagedDecoder(make_decoder(hf_model(name), "numba_cpu")).decoder
    problem = capture_problem(alone)
    assert (problem is None) == (spec_from_config(hf_config(name).to_dict()).layers[-1].mlp.__class__ is not MoESpec)

    def run(group: ThreadGroup):
        decoder = PagedDecoder(make_decoder(hf_model(name), "numba_cpu", group=group)).decoder
        return capture_problem(decoder), decoder.captured

    assert alone.captured is not None and on_ranks(2, run) == [(problem, None)] * 2


ODD = [  # model, ranks, (query heads, key-value heads) of a rank, what is padded
    ("llama-9-heads", 2, (6, 2), "9 query heads padded to 12 (+33%), 3 key-value heads padded to 4 (+33%)"),
    ("llama-9-heads", 4, (3, 1), "9 query heads padded to 12 (+33%), 3 key-value heads padded to 4 (+33%)"),
    ("llama-9-heads", 8, (2, 1), "9 query heads padded to 16 (+78%), 3 key-value heads padded to 4 (+33%), 100 numbers inside the MLP padded to 104 (+4%)"),
    ("phi3", 4, (2, 1), "6 query heads padded to 8 (+33%)"),
    ("gpt-oss", 3, (3, 1), "6 query heads padded to 9 (+50%), 2 key-value heads padded to 3 (+50%), 100 numbers inside the MLP padded to 102 (+2%)"),
    ("deepseek-v3", 4, (2, 1), "6 query heads padded to 8 (+33%)"),
    ("gpt-neox", 4, (2, 2), "6 query heads padded to 8 (+33%), 6 key-value heads padded to 8 (+33%)"),
]  # fmt: skip
TINY_MODELS.setdefault("llama-9-heads", ("llama", {**TINY_MODELS["llama-tied-biased"][1], "num_attention_heads": 9, "num_key_value_heads": 3}))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size", "heads", "padding"),
    [pytest.param(*case, marks=[] if case[:2] in (("llama-9-heads", 2), ("phi3", 4)) else [pytest.mark.slow]) for case in ODD],
)  # fmt: skip
def test_heads_that_do_not_divide_are_padded(name, size, heads, padding):
    """The logits of transformers, on ranks that all have as much; adapters are cut as the weights are."""
    spec = spec_from_config(hf_config(name).to_dict())
    assert spec.padding(Share(0, size)) == padding
    shapes, outside = spec.weight_shapes(Share(0, size)), (spec.names.embedding, spec.names.head)

    def run(group: ThreadGroup):
        decoder = make_decoder(hf_model(name), "sdpa", group=group)
        held = sum(math.prod(linear.weight.shape) for linear in decoder.linears())
        attention = decoder.attention_specs(8)[0]
        return logits_of(decoder), held, (attention.num_heads, attention.num_kv_heads)

    expected, results = want(name), on_ranks(size, run)
    for logits, held, mine in results:
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)
        assert torch.equal(logits, results[0][0]) and mine == heads
        assert held == sum(
            math.prod(s) for n, s in shapes.items() if len(s) == 2 and n not in outside and "kv_b" not in n
        )


def test_padded_heads_are_quantized_when_they_are_loaded():
    """A row of zeros has no scale: what comes out is finite, and near what whole weights give."""
    for method in ("torch_int8", "torch_int4_32"):

        def run(group: ThreadGroup, method=method):
            return logits_of(make_decoder(hf_model("llama-9-heads"), "sdpa", group=group, linear_method=method))

        exact = want("llama-9-heads")
        alone = logits_of(make_decoder(hf_model("llama-9-heads"), "sdpa", linear_method=method))
        for logits in on_ranks(4, run):
            assert (logits - exact).norm() < 1.2 * (alone - exact).norm()


@pytest.mark.parametrize(("queries", "keys"), [(9, 3), (71, 1), (6, 2), (32, 8), (16, 16), (15, 5)])
def test_every_head_is_on_a_rank_beside_its_key_value_head(queries, keys):
    for size in range(1, 20):
        found = []
        for rank in range(size):
            q, k, copies = Share(rank, size).heads(queries, keys)
            found += range(q.start, q.start + q.length)
            each = q.room // k.room
            assert q.room == each * k.room and (copies == 1 or k.room == 1)
            for i in range(q.length):
                assert k.start + i // each == (q.start + i) // (queries // keys) < k.start + k.length
        assert found == list(range(queries))


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_ranks_that_hold_whole_experts(name):
    def run(group: ThreadGroup):
        decoder = make_decoder(hf_model(name), "sdpa", group=group)
        return logits_of(decoder), [len(layer.mlp.experts) for layer in decoder.layers if hasattr(layer.mlp, "experts")]

    expected = want(name)
    for logits, experts in on_ranks(2, run, by_expert=True):
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)
        assert set(experts) == {4}


@pytest.mark.parametrize(
    ("name", "size", "backend"),
    [
        ("mixtral", 2, "sdpa"),
        ("qwen2-moe", 4, "numba_cpu"),
        pytest.param("qwen2-moe", 4, "numba_cpu_invariant", marks=pytest.mark.slow),
        *[pytest.param(*case, "sdpa", marks=pytest.mark.slow) for case in (("deepseek-v3", 4), ("gpt-oss", 2), ("llama4", 2))],
    ],
)  # fmt: skip
def test_tokens_travel_to_experts_and_back(name, size, backend):
    """Also where a rank has no token: a step of one follows. What is sent is what was computed, and the loads are of all tokens."""
    spec = spec_from_config(hf_config(name).to_dict())
    shared = spec.weight_shapes(Share(0, size, True, True)), spec.weight_shapes(Share(0, size, True))
    assert sum(map(math.prod, shared[0].values())) > sum(map(math.prod, shared[1].values())) or "moe" not in name

    def run(group: ThreadGroup):
        decoder = make_decoder(hf_model(name), backend, group=group)
        blocks = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoE)]
        loads, paged = ExpertLoads(decoder), PagedDecoder(decoder)
        loads.switch(True)
        paged.add("a", PROMPT)
        logits, seen = [], []
        for tokens in (30, 10, 1):
            logits.append(paged.step({"a": tokens})["a"])
            seen.append([counts.tolist() for _, counts in loads.take()])
        return torch.cat(logits), blocks, seen, group.bytes, [block.capturable for block in blocks]

    expected, results = want(name), on_ranks(size, run, by_expert=True, all_to_all=True)
    for logits, blocks, seen, _, capturable in results:
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)
        assert torch.equal(logits, results[0][0]) and seen == results[0][2] and not any(capturable)
        top = blocks[0].spec.router.top_k
        assert [[sum(counts) for counts in step] for step in seen] == [[n * top] * len(blocks) for n in (30, 10, 1)]
    hidden, layers = 72 * 4, spec.num_layers
    travels = sum(2 * n * top * hidden for n in (30, 10, 1)) * len(blocks)
    gathered = sum(size * -(-n // size) * hidden for n in (30, 10, 1)) * len(blocks)
    sums = (1 + 2 * layers - len(blocks)) * 41 * hidden * size
    assert sum(sent for *_, sent, _ in results) == travels + gathered + sums + 41 * -(-264 // size) * 4 * size


@pytest.mark.parametrize(
    ("name", "width", "depth"),
    [("llama-tied-biased", 1, 2), ("gemma3", 1, 3), ("cohere", 2, 2), ("gpt2", 1, 4), ("deepseek-v3", 2, 2)],
)
def test_stages_give_transformers_logits(name, width, depth):
    """Pipeline stages, of one rank or two each: bit for bit what the layers give in one place."""
    spec = spec_from_config(hf_config(name).to_dict())
    layers, expected = stage_layers(spec.num_layers, depth), want(name)
    pipes = [[queue.Queue() for _ in range(depth - 1)] for _ in range(width)]
    boards = [Board(width) for _ in range(depth)]

    def run(group: ThreadGroup):
        index, rank = divmod(group.share.rank, width)
        stage = ThreadStage(layers[index], index, pipes[rank])
        group = ThreadGroup(Share(rank, width), boards[index]) if width > 1 else None
        decoder = make_decoder(hf_model(name), "sdpa", group=group, stage=stage)
        if not stage.is_last:
            decoder.compute_logits = lambda hidden: hidden
        held = {name for name, _ in decoder.targets()}
        assert held == set(spec.stage_shapes(layers[index]))
        logits = logits_of(decoder)
        return logits if stage.is_last else None

    *others, logits = on_ranks(width * depth, run)
    assert all(other is None for other in others[: width * (depth - 1)])
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)
    if width == 1:
        assert torch.equal(logits, logits_of(make_decoder(hf_model(name), "sdpa")))


def test_layers_of_stages():
    assert [list(r) for r in stage_layers(5, 2)] == [[0, 1, 2], [3, 4]]
    assert [len(r) for r in stage_layers(30, 4)] == [7, 8, 8, 7]
    assert [len(r) for r in stage_layers(4, 4)] == [1, 1, 1, 1] and stage_layers(3, 1) == [range(3)]
    with pytest.raises(ValueError, match="pipeline_parallel_size=3: the model has 2 layers"):
        stage_layers(2, 3)
    groups = (
        KVCacheGroup(KVCacheSpec("full", 16, 1, 8), (0, 2, 4)),
        KVCacheGroup(KVCacheSpec("full", 16, 1, 8), (1, 3, 5)),
    )
    assert [g.layers for g in stage_groups(groups, range(3))] == [(0, 2), (1,)]
    with pytest.raises(ValueError, match="async_scheduling is not implemented with pipeline_parallel_size"):
        EngineArgs(pipeline_parallel_size=2, async_scheduling=True)


def test_what_cannot_be_split_is_refused_by_name(tiny_model_path):
    def split(name: str, size: int, **more):
        return spec_from_config({**hf_config(name).to_dict(), **more}).weight_shapes(Share(0, size))

    with pytest.raises(ValueError, match="a norm over all heads"):
        split("olmo2", 3)
    for name in STATES:
        with pytest.raises(ValueError, match="cannot be split among ranks"):
            split(name, 2)
    with pytest.raises(ValueError, match="8 experts cannot be split among 3"):
        spec_from_config(hf_config("mixtral").to_dict()).layers[0].mlp.split(Share(0, 3, True))
    with pytest.raises(ValueError, match="enable_expert_parallel needs tensor_parallel_size"):
        EngineArgs(enable_expert_parallel=True)
    with pytest.raises(ValueError, match="enable_expert_parallel needs a mixture of experts, and '.*llama' has none"):
        plan_engine(
            EngineArgs(model=str(tiny_model_path("llama")), tensor_parallel_size=2, enable_expert_parallel=True)
        )
    with pytest.raises(ValueError, match="all2all_backend='all_to_all' needs enable_expert_parallel"):
        EngineArgs(tensor_parallel_size=2, all2all_backend="all_to_all")
    with pytest.raises(ValueError, match="all2all_backend must be .*allgather_reducescatter.*all_to_all.*'naive'"):
        EngineArgs(tensor_parallel_size=2, enable_expert_parallel=True, all2all_backend="naive")
    for method in ("draft_model", "eagle", "eagle3"):
        with pytest.raises(ValueError, match=f"method '{method}' is implemented for one rank"):
            EngineArgs(
                tensor_parallel_size=2,
                speculative_config={"method": method, "model": "x", "num_speculative_tokens": 2},
            )
    with pytest.raises(ValueError, match="need distributed_executor_backend='mp'"):
        EngineArgs(tensor_parallel_size=2, distributed_executor_backend="uni")


def test_shares_cover_every_row_once():
    for rows, size in ((264, 5), (7, 4), (3, 4), (16, 4)):
        spans = [Share(rank, size).rows(rows) for rank in range(size)]
        assert [i for start, n in spans for i in range(start, start + n)] == list(range(rows))
    for rank, length, want in (
        (3, 16, [(6, 2, 2), (10, 2, 2), (14, 2, 2)]),  # 2 key-value heads of 2 rows, each on 2 ranks
        (1, 8, [(1, 1, 1), (4, 1, 1), (6, 1, 1)]),  # two outputs in a number
    ):
        q, k, _ = Share(rank, 4).heads(4, 2)
        assert Shard(rank, 4, "outputs", {"qkv": (q, k, k)}).of("qkv", length) == want
    q, k, _ = Share(1, 2).heads(9, 3)  # the second of 2 ranks has 3 of its 6 query heads, and 1 of 2 key-value heads
    shard, rows = Shard(1, 2, "outputs", {"qkv": (q, k, k)}), torch.arange(1, 31)
    assert shard.cut("qkv", rows, 0).tolist() == [*range(13, 19), *[0] * 6, 23, 24, 0, 0, 29, 30, 0, 0]


def test_kv_bytes_of_a_rank():
    spec = spec_from_config(hf_config("llama").to_dict())
    one = spec.kv_cache_specs(16, 4, Share(0, 2))[0]
    assert one == KVCacheSpec("full", 16, 1, 16, None, 4)
    falcon = spec_from_config(hf_config("falcon").to_dict())
    assert falcon.kv_cache_specs(16, 4, Share(1, 3))[0].num_kv_heads == 1
