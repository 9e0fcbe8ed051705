import dataclasses

import pytest

from minivllm.core.config import (
    CacheConfig,
    EngineArgs,
    KVCacheSpec,
    MachineFacts,
    ModelFacts,
    SchedulerConfig,
    choose_dtype,
    make_kv_cache_groups,
    resolve,
)

LAYER = KVCacheSpec("full", 16, 2, 8, dtype_bytes=2)
MODEL = ModelFacts("m", "", 100, 4, 512, (LAYER,) * 4, 1000, "bfloat16")
CPU = MachineFacts("cpu", 10**9, 2 * 10**9, True, "sdpa", "because")


def config(machine=CPU, **kwargs):
    args = EngineArgs.from_kwargs(**kwargs)
    return resolve(
        args, MODEL, machine, choose_dtype(args.dtype, MODEL.checkpoint_dtype, machine.device, machine.has_bf16)
    )


def test_every_setting_is_explained():
    made = config(max_num_seqs=3)
    text = made.explain()
    for f in dataclasses.fields(EngineArgs):
        if getattr(made.args, f.name) is not None and getattr(made.args, f.name) != "auto":
            assert f.name in text, f.name
    assert {d.setting: d.why for d in made.decisions}["max_num_seqs"] == "asked for"
    assert config(max_num_seqs=3) == made


def test_steps_overlap_on_a_gpu_unless_asked_otherwise():
    gpu = dataclasses.replace(CPU, device="cuda")
    assert [config(m, async_scheduling=a).async_scheduling for m in (CPU, gpu) for a in (None, True, False)] == [
        False, True, False, True, True, False,
    ]  # fmt: skip
    assert config(gpu, speculative_config={"method": "ngram", "num_speculative_tokens": 4}).async_scheduling


@pytest.mark.parametrize(
    "kwargs, error, words",
    [
        ({"max_num_seq": 4}, TypeError, "max_num_seq.*did you mean 'max_num_seqs'"),
        ({"zzz": 4}, TypeError, "zzz.*known: model"),
        ({"dtype": "fp8"}, ValueError, "dtype must be one of.*'fp8'"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1.*0"),
        ({"num_gpu_blocks": 1}, ValueError, "at least 2"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": 1.5}, TypeError, "whole number.*1.5"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            ValueError,
            "max_num_batched_tokens .4. must be at least max_num_seqs .8.",
        ),
        ({"max_model_len": 513}, ValueError, "513 is longer than the model was made for .512."),
        ({"max_model_len": 512, "num_gpu_blocks": 10}, ValueError, "max_model_len=512 does not fit.*144 tokens"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100, "max_num_seqs": 4},
            ValueError,
            "enable_chunked_prefill=False",
        ),
        ({"gpu_memory_utilization": 0.0}, ValueError, "gpu_memory_utilization must be in"),
        ({"kv_cache_memory_bytes": 10}, ValueError, "no room for the KV cache"),
        ({"watermark": 1.0}, ValueError, "watermark must be in"),
        ({"hf_overrides": "{}"}, TypeError, "hf_overrides must be a dict"),
        ({"kv_events_replay_endpoint": "tcp://x"}, ValueError, "needs kv_events_endpoint"),
        ({"preemption_mode": "swap"}, ValueError, "needs num_cpu_blocks"),
        ({"num_cpu_blocks": 9}, ValueError, 'num_cpu_blocks=9 needs preemption_mode="swap"'),
        ({"long_prefill_token_threshold": -1}, ValueError, "long_prefill_token_threshold must be at least 0"),
    ],
)
def test_bad_settings_are_named(kwargs, error, words):
    with pytest.raises(error, match=words):
        config(**kwargs)


def test_a_value_of_another_type_is_refused():
    for f in dataclasses.fields(EngineArgs):
        for value in (b"x", 1j):
            with pytest.raises((TypeError, ValueError), match=rf"{f.name} must be .*got {value!r}$"):
                EngineArgs(**{f.name: value})
        if f.type in ("bool", "int", "float"):
            with pytest.raises(TypeError, match=f"{f.name} must be .* got 'no'"):
                EngineArgs(**{f.name: "no"})
    with pytest.raises(TypeError, match="seed must be a whole number, got True"):
        EngineArgs(seed=True)
    with pytest.raises(TypeError, match="async_scheduling must be True or False or None, got 1"):
        EngineArgs(async_scheduling=1)


def test_a_small_pool_shortens_requests_instead_of_dead_locking():
    made = config(num_gpu_blocks=10)
    assert made.scheduler.max_model_len == 144
    assert "max_model_len" in made.explain()


def test_it_says_who_adds_up():
    by_kernel = dataclasses.replace(CPU, sums_by_peers=True, sums_by_peers_why="they can")
    assert "disable_custom_all_reduce" in config(by_kernel, tensor_parallel_size=2).explain()
    for machine, value in ((CPU, True), (by_kernel, False)):
        found = [
            d for d in config(machine, tensor_parallel_size=2).decisions if d.setting == "disable_custom_all_reduce"
        ]
        assert [(d.value, d.why) for d in found] == [(value, machine.sums_by_peers_why)]


def test_no_more_blocks_than_can_be_used():
    made = config(max_num_seqs=2)
    assert made.cache.num_gpu_blocks == 2 * 512 // 16 + 1


def test_budget_alone_lowers_max_num_seqs():
    assert config(max_num_batched_tokens=16).scheduler.max_num_seqs == 16


def test_gpu_memory_leaves_out_what_others_use():
    gpu = MachineFacts("cuda", 70_000, 100_000, True, "sdpa", "because")
    per_block = 4 * LAYER.bytes_per_block
    assert config(gpu, gpu_memory_utilization=0.5).cache.num_gpu_blocks == (50_000 - 1000 - 30_000) // per_block


@pytest.mark.parametrize(
    "asked, checkpoint, device, bf16, dtype",
    [
        ("float16", "float32", "cpu", True, "float16"),
        ("auto", "bfloat16", "cpu", False, "float32"),
        ("auto", "float32", "cpu", True, "bfloat16"),
        ("auto", "float16", "cuda", True, "float16"),
        ("auto", "float32", "cuda", True, "bfloat16"),
    ],
)
def test_dtype(asked, checkpoint, device, bf16, dtype):
    assert choose_dtype(asked, checkpoint, device, bf16).value == dtype


def test_groups_have_equally_many_layers():
    window = KVCacheSpec("sliding_window", 16, 2, 8, window=32, dtype_bytes=2)
    groups = make_kv_cache_groups([window] * 5 + [LAYER] + [window] * 5 + [LAYER])
    assert [g.layers for g in groups] == [(0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (5, 11)]


def test_groups_of_different_block_bytes_are_refused():
    with pytest.raises(ValueError, match="different sizes"):
        make_kv_cache_groups([LAYER, KVCacheSpec("full", 16, 4, 8)])
    with pytest.raises(ValueError, match="no layer that keeps anything"):
        make_kv_cache_groups([])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"kind": "round"},
        {"kind": "full", "window": 3},
        {"kind": "sliding_window"},
        {"kind": "sliding_window", "window": 0},
    ],
)
def test_bad_specs(kwargs):
    with pytest.raises(ValueError, match="KVCacheSpec"):
        KVCacheSpec(**{"block_size": 16, "num_kv_heads": 1, "head_dim": 8, **kwargs})


def test_configs_alone_are_usable():
    assert SchedulerConfig().max_num_batched_tokens == 2048
    assert CacheConfig().block_size == 16


def test_a_kind_of_cache_of_ones_own():
    """Sinks: the first tokens and a window. Registered, it is scheduled, shared and read like the built-in kinds."""
    from block_memory import Memory

    from minivllm.core.config import (
        KV_CACHE_KINDS,
        KVCacheConfig,
        KVCacheRules,
        KVCacheSpec,
        make_kv_cache_groups,
        register_kv_cache_kind,
    )
    from minivllm.core.request import Request
    from minivllm.core.scheduler import Scheduler

    class SinkRules(KVCacheRules):
        has_window = True

        def visible(self, spec, query, key):
            return key <= query and (key < dict(spec.options)["sinks"] or key > query - spec.window)

        def skipped(self, spec, num_computed_tokens):
            return dict(spec.options)["sinks"], max(0, num_computed_tokens - spec.window + 1)

    register_kv_cache_kind("sinks_of_a_test", SinkRules())
    try:
        spec = KVCacheSpec("sinks_of_a_test", 2, 1, 4, window=4, options=(("sinks", 3),))
        kv = KVCacheConfig(24, 2, make_kv_cache_groups([spec, KVCacheSpec("full", 2, 1, 4)]))
        config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=7, max_model_len=20)
        scheduler = Scheduler(config, CacheConfig(2, 24), kv)
        memory, given_back = Memory(scheduler), False
        for i in range(9):
            prompt = [0, 1, 2, 0, 1, 2, i % 2, 1, i, 2, 1]
            scheduler.add_request(Request(str(i), prompt, max_tokens=8))
        while scheduler.has_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, memory.execute(output))
            tables = scheduler.kv_cache_manager.groups[0].tables.values()
            ids = [[block.block_id for block in table] for table in tables]
            assert all(table[0] and table[1] for table in ids if len(table) > 1), "a sink was given back"
            given_back |= any(0 in table for table in ids)
        assert given_back and scheduler.kv_cache_manager.stats.hit_tokens > 0
    finally:
        del KV_CACHE_KINDS["sinks_of_a_test"]
    with pytest.raises(ValueError, match="built in"):
        register_kv_cache_kind("full", KVCacheRules())
    with pytest.raises(ValueError, match="full, sliding_window, chunked_local, .*; got 'sinks_of_a_test'"):
        KVCacheSpec("sinks_of_a_test", 2, 1, 4, window=4)
