"""Captured steps on a CPU: the same to the bit as layer by layer, and never a step of another model than the one at hand."""

import pytest
import torch
from paged import PagedDecoder, make_decoder
from tiny_models import (
    _SIZES,
    STATES,
    TINY_MODELS,
    VOCAB_SIZE,
    hf_model,
    randomise,
    tiny_model_path,  # noqa: F401 - a fixture
)

pytest.importorskip("numba")
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.attention.numba_cpu import NumbaCPUBackend
from minivllm.core.module import Module, capture_problem
from minivllm.models.layers import RMSNorm
from minivllm.models.linear.cpu import few_rows
from minivllm.models.linear.layer import Linear
from minivllm.models.mixers.mlp import GatedMLP
from minivllm.models.ops.captured import CapturedCPUSteps
from minivllm.models.ops.numba_cpu import NumbaCPUOps
from minivllm_kernels.cpu.matmul.layout import host_tiles
from minivllm_kernels.cpu.program import Program

_CAPTURED = ("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3")
_CANNOT = ("llama4", "qwen3-moe", "qwen2-moe", "qwen3-next-attention", *STATES)
"""Experts; queries that depend on their positions; states."""
CAN = [name for name in TINY_MODELS if name.startswith(_CAPTURED) and name not in _CANNOT]


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return {str(n): torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths}


def logits(decoder, one_launch, steps, seed=0):
    """The logits of some steps of a few requests. steps: [{request: tokens}]."""
    paged = PagedDecoder(decoder, seed=seed)
    if not one_launch:
        decoder._captured = None
    for name, tokens in prompts(40, 20, 31).items():
        paged.add(name, tokens)
    return [torch.cat(list(paged.step(step).values())) for step in steps]


STEPS = [{"40": 14}, {"40": 1, "20": 1}, {"40": 1, "20": 1, "31": 5}, {"40": 1, "20": 1}, {"31": 1}]


def same(decoder, steps=STEPS):
    return all(
        torch.equal(a, b) for a, b in zip(logits(decoder, True, steps), logits(decoder, False, steps), strict=True)
    )


@pytest.fixture
def captured(monkeypatch):
    """For which numbers of rows steps were captured."""
    captured, capture = [], CapturedCPUSteps._capture

    def watched(self, rows, *rest):
        result = capture(self, rows, *rest)
        if result is not None:
            captured.append(rows)
        return result

    monkeypatch.setattr(CapturedCPUSteps, "_capture", watched)
    return captured


@pytest.mark.parametrize("name", CAN)
def test_the_same_to_the_bit(name, captured):
    """Prompts, decodes and both together; biases, windows, rotations that depend on the length, several cache groups."""
    assert same(make_decoder(hf_model(name), "numba_cpu"))
    assert captured == [14, 2, 7, 1]


def test_the_same_to_the_bit_where_a_rotation_is_stretched(captured):
    names = [str(n) for n in range(88, 95)]  # the limit is 64
    decoder = make_decoder(hf_model("llama-rope-dynamic"), "numba_cpu")

    def step(paged):
        return torch.cat(list(paged.step(dict.fromkeys(names, 1)).values()))

    runs = []
    for one_launch in (True, False):
        paged = PagedDecoder(decoder, seed=0)
        if not one_launch:
            decoder._captured = None
        for name, tokens in prompts(*map(int, names)).items():
            paged.add(name, tokens)
            paged.step({name: 80})
        runs.append([step(paged) for _ in range(8)])
    assert captured == [7] and all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_same_to_the_bit_in_bf16(captured):
    """Sizes that fill tiles, if the CPU has a unit for them."""
    config = LlamaConfig(**_SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4})
    model = LlamaForCausalLM(config).eval()
    randomise(model)
    decoder = make_decoder(model, "numba_cpu", dtype=torch.bfloat16)
    assert same(decoder)
    few = few_rows(torch.bfloat16, host_tiles())
    assert captured == [rows for rows in (14, 2, 7, 1) if rows <= few]


class Rows:
    """A decoder whose logits are what `forward` gave."""

    def __init__(self, decoder):
        self.decoder, self.compute_logits = decoder, lambda hidden: hidden

    def __getattr__(self, name):
        return getattr(self.decoder, name)


def test_streams_that_are_kept_for_a_proposer(captured):
    decoder = make_decoder(hf_model("llama"), "numba_cpu")
    size, steps = decoder.spec.hidden_size, STEPS[1:]
    plain = logits(Rows(decoder), True, steps)
    decoder.taps = (2, 0)
    kept, paged = logits(Rows(decoder), True, steps), PagedDecoder(Rows(decoder), seed=0)
    assert captured == [2, 7, 1] * 2
    decoder._captured = None
    for name, tokens in prompts(40, 20, 31).items():
        paged.add(name, tokens)
    for step, without, rows in zip(steps, plain, kept, strict=True):
        assert torch.equal(rows, torch.cat(list(paged.step(step).values())))
        assert rows.shape[1] == 3 * size and torch.equal(rows[:, :size], without)
    first = torch.tensor([tokens[0] for name, tokens in prompts(40, 20).items()])
    assert torch.equal(kept[0][:, 2 * size :], decoder.embedding[first])


@pytest.mark.parametrize("kernel", ["int8", "int4_32"])
def test_quantized_matmuls(kernel):
    assert same(make_decoder(hf_model("llama"), "numba_cpu", linear_method=kernel))


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("llama", {"linear_method": "torch"}, "torch computes linear"),
        ("gemma3", {}, "torch computes rms_norm"),
        ("olmo2", {}, "torch computes rms_norm"),
        ("granite", {}, "torch computes mul"),
        ("glm", {}, "torch computes mul"),
        ("cohere", {}, "torch computes layer_norm"),
        ("mixtral", {}, "MoE is not declared capturable"),
    ],
)
def test_what_a_decoder_lacks_is_said(name, options, problem):
    decoder = make_decoder(hf_model(name), "numba_cpu", **options)
    logits(decoder, True, STEPS)
    problems = {decoder.captured.problem, *decoder.captured.refused.values()} - {None}
    assert len(problems) == 1 and problem in problems.pop()


@pytest.mark.parametrize("backend", ["sdpa", "reference", "numba_cpu_invariant"])
def test_without_the_ops_of_numba_nothing_is_captured(backend):
    decoder = make_decoder(hf_model("llama"), backend)
    PagedDecoder(decoder)
    assert decoder.captured is None


def test_an_attention_backend_of_ones_own_is_called():
    class Watched(NumbaCPUBackend):
        called = 0

        def attend(self, *args):
            Watched.called += 1
            return super().attend(*args)

    decoder = make_decoder(hf_model("llama"), Watched())
    logits(decoder, True, STEPS[:1])
    assert Watched.called == len(decoder.layers)
    logits(decoder, True, STEPS[:1])
    assert Watched.called == 2 * len(decoder.layers)


# ---- a model that changes between two steps


@pytest.fixture
def decoder():
    return make_decoder(hf_model("llama"), "numba_cpu")


def before_and_after(decoder, change):
    """Logits of a step after a change, with one launch and without; and of the step without the change."""
    results = []
    for one_launch in (True, False):
        paged = PagedDecoder(decoder)
        paged.add("r", prompts(20)["20"])
        if not one_launch:
            decoder._captured = None
        before = paged.step({"r": 5})["r"]
        undo = change(decoder)
        results.append(paged.step({"r": 5})["r"])
        undo()
        paged.computed["r"] = 5
        unchanged = paged.step({"r": 5})["r"]
    assert before.isfinite().all()
    return *results, unchanged


def exchange(owner, name, new):
    """Set an attribute; gives a function that takes it back."""
    missing = object()
    kept = vars(owner).get(name, missing) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, new)
    return lambda: delattr(owner, name) if kept is missing else setattr(owner, name, kept)


def as_class(cls, part):
    """The same part, of another class."""
    new = cls.__new__(cls)
    vars(new).update(vars(part))
    return new


def leave_out_a_layer(decoder):
    last = decoder.layers.pop()
    return lambda: decoder.layers.append(last)


def swap_layers(decoder):
    decoder.layers[0], decoder.layers[1] = decoder.layers[1], decoder.layers[0]
    return lambda: swap_layers(decoder)


def double_weight(linear, method):
    kept = linear.weight.clone()
    linear.use(method, 2 * kept)
    return lambda: linear.use("cpu", kept)


def other_weight(decoder):
    return double_weight(decoder.layers[1].mlp.down, "cpu")


def matmul_by_torch(decoder):
    return double_weight(decoder.layers[3].mixer.o, "torch")


class Doubled(GatedMLP):
    """Twice what the MLP says."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def another_class(decoder):
    layer = decoder.layers[2]
    return exchange(layer, "mlp", as_class(Doubled, layer.mlp))


def another_method(decoder):
    original = GatedMLP.__call__
    return exchange(GatedMLP, "__call__", lambda self, x: 2 * original(self, x))


def another_norm(decoder):
    norm = decoder.layers[1].mlp_norm
    return exchange(norm, "weight", 2 * norm.weight)


def another_activation(decoder):
    return exchange(decoder.layers[0].mlp, "activation", "relu")


def halved(original):
    return lambda self, *args: original(self, *args) / 2


def another_backend_of_a_layer(decoder):
    class Halved(NumbaCPUBackend):
        attend = halved(NumbaCPUBackend.attend)

    return exchange(decoder.layers[1].mixer, "backend", Halved())


def another_attend(decoder):
    return exchange(NumbaCPUBackend, "attend", halved(NumbaCPUBackend.attend))


def another_attend_of_one_backend(decoder):
    attend = decoder.backend.attend
    return exchange(decoder.backend, "attend", lambda *args: attend(*args) / 2)


def another_class_of_a_linear_layer(decoder):
    class Halved(Linear):
        __call__ = halved(Linear.__call__)

    mixer = decoder.layers[0].mixer
    return exchange(mixer, "qkv", as_class(Halved, mixer.qkv))


def a_linear_layer_in_a_wrapper(decoder):
    mlp = decoder.layers[0].mlp
    down = mlp.down
    return exchange(mlp, "down", lambda x: down(x) / 2)


def a_function_for_an_mlp(decoder):
    return exchange(decoder.layers[2], "mlp", torch.zeros_like)


def a_function_for_a_layer(decoder):
    kept = decoder.layers[1]
    decoder.layers[1] = lambda x, residual, *rest: (x, residual)

    def undo():
        decoder.layers[1] = kept

    return undo


def another_call_of_linear_layers(decoder):
    return exchange(Linear, "__call__", halved(Linear.__call__))


def another_method_of_the_ops(decoder):
    return exchange(NumbaCPUOps, "gated_linear", lambda self, x, *rest: halved(gated)(self, x, *rest))


gated = NumbaCPUOps.gated_linear


def other_ops_of_a_block(decoder):
    class Halved(NumbaCPUOps):
        gated_linear = halved(NumbaCPUOps.gated_linear)

    return exchange(decoder.layers[0].mlp, "ops", Halved())


def a_method_of_a_linear_layer(decoder):
    down = decoder.layers[0].mlp.down

    class Halved(type(down.method)):
        apply = halved(type(down.method).apply)

    return exchange(down, "method", as_class(Halved, down.method))


def a_forward_hook(decoder):
    return decoder.layers[2].mlp.register_forward_hook(lambda module, args, output: output / 2)


def a_forward_hook_of_a_layer(decoder):
    return decoder.layers[0].register_forward_hook(lambda module, args, output: (output[0] / 2, output[1]))


def another_last_norm(decoder):
    class Halved(RMSNorm):
        def add(self, x, residual):
            x, residual = super().add(x, residual)
            return x / 2, residual

    return exchange(decoder, "final_norm", as_class(Halved, decoder.final_norm))


def a_norm_of_results(decoder):
    layer = decoder.layers[1]
    return exchange(layer, "mlp_post_norm", layer.mlp_norm)


def a_layer_without_positions(decoder):
    kept = decoder.ropes[0]
    decoder.ropes[0] = None

    def undo():
        decoder.ropes[0] = kept

    return undo


CHANGES = [leave_out_a_layer, swap_layers, other_weight, matmul_by_torch, another_norm, another_activation]
CODE = [another_class, another_method, another_backend_of_a_layer, another_attend, another_attend_of_one_backend]
CODE += [another_class_of_a_linear_layer, a_linear_layer_in_a_wrapper, another_call_of_linear_layers, another_last_norm]
CODE += [a_function_for_an_mlp, a_function_for_a_layer, another_method_of_the_ops, other_ops_of_a_block]
CODE += [a_method_of_a_linear_layer, a_forward_hook, a_forward_hook_of_a_layer]


@pytest.mark.parametrize("change", [*CHANGES, *CODE, a_norm_of_results, a_layer_without_positions])
def test_a_changed_model_computes_what_it_is_now(decoder, change):
    with_launch, without, unchanged = before_and_after(decoder, change)
    assert torch.equal(with_launch, without) and not torch.equal(with_launch, unchanged)


@pytest.mark.parametrize("change", CODE)
def test_code_of_ones_own_counts_also_if_it_was_there_before(decoder, change):
    undo = change(decoder)
    try:
        with_launch, without = (logits(decoder, one_launch, STEPS[:1])[0] for one_launch in (True, False))
    finally:
        undo()
    assert torch.equal(with_launch, without)
    assert not torch.equal(with_launch, logits(decoder, True, STEPS[:1])[0])


def test_bound_in_inference_mode_and_stepped_outside(decoder):
    with torch.inference_mode():
        paged = PagedDecoder(decoder)
    decoder.embedding.requires_grad_()
    paged.add("r", prompts(20)["20"])
    got = PagedDecoder.step.__wrapped__(paged, {"r": 5})["r"]  # without its own inference mode
    assert got.isfinite().all()


def test_a_plan_for_fewer_threads_is_executed_by_that_many(decoder, monkeypatch):
    threads, entered = torch.get_num_threads(), []
    monkeypatch.setattr(Program, "__call__", lambda self, n: entered.append(n))
    paged = PagedDecoder(decoder)
    plan = paged._plan
    try:
        torch.set_num_threads(1)
        paged._plan = lambda *args: (torch.set_num_threads(1), plan(*args), torch.set_num_threads(2))[1]
        paged.add("r", prompts(20)["20"])
        paged.step({"r": 5})
    finally:
        torch.set_num_threads(threads)
    assert entered == [1]


def test_one_step_at_a_time(decoder, monkeypatch):
    """A second thread that comes in the middle of a step is told so, and the first one's step is unharmed."""
    paged, told = PagedDecoder(decoder), []
    launch = Program.__call__

    def interrupted(program, threads):
        with pytest.raises(RuntimeError, match="one step at a time") as error:
            decoder.captured.run(torch.tensor([1]), torch.tensor([0]), paged.caches, [])
        told.append(error)
        launch(program, threads)

    monkeypatch.setattr(Program, "__call__", interrupted)
    paged.add("r", prompts(20)["20"])
    assert paged.step({"r": 5})["r"].isfinite().all() and len(told) == 1
    assert paged.step({"r": 1})["r"].isfinite().all()


def test_another_cache_is_written_to(decoder):
    """Programs hold addresses of a cache: a second one must not end up in the first."""
    tokens, results = prompts(20)["20"], []
    first = PagedDecoder(decoder)
    for paged in (first, PagedDecoder(decoder, seed=1), first):
        paged.add("r", tokens)
        results.append(torch.cat([paged.step({"r": n})["r"] for n in (5, 1, 1)]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_another_number_of_threads_gets_memory_for_each(decoder):
    threads, results = torch.get_num_threads(), []
    paged = PagedDecoder(decoder)
    try:
        for n in (1, 6, 2):
            torch.set_num_threads(n)
            paged.add("r", prompts(20)["20"])
            results.append(paged.step({"r": 6})["r"])
            assert decoder.captured._scratch._pieces[-1].nbytes >= n * 4 * 8 * 72, "rows widened, for each thread"
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_linear_layers_changed_after_binding(decoder):
    paged = PagedDecoder(decoder)
    paged.add("r", prompts(20)["20"])
    paged.step({"r": 5})
    assert decoder.captured.problem is None
    for linear in decoder.linears():
        linear.use("torch")
    paged.step({"r": 5})
    assert "torch computes linear" in decoder.captured.refused[5]


def test_more_rows_than_one_layer_has_a_kernel_for_are_not_tried(decoder, monkeypatch):
    """Otherwise each number of rows would be computed up to that layer, and then again without a program."""
    tried, capture = [], CapturedCPUSteps._capture
    monkeypatch.setattr(
        CapturedCPUSteps, "_capture", lambda self, rows, *rest: tried.append(rows) or capture(self, rows, *rest)
    )
    decoder.layers[2].mlp.down.method.max_rows = 5
    logits(decoder, True, [{"40": 5}, {"40": 6}, {"20": 5, "31": 2}])
    assert tried == [5] and decoder.captured.refused == {} and decoder.captured.problem is None
    decoder.layers[2].mlp.down.use("cpu")  # with its own number again
    most = few_rows(torch.float32, False)
    logits(decoder, True, [{"40": 6}, {"20": most}, {"31": most + 1}])
    assert tried == [5, 6, most] and decoder.captured.refused == {}


def test_a_step_costs_nothing_to_look_for_changes(decoder, monkeypatch):
    """Parts are looked at when something was changed, and never again until something else is."""
    looked = []
    monkeypatch.setattr(
        Module, "all_parts", lambda self, all_parts=Module.all_parts: looked.append(1) or all_parts(self)
    )
    paged = PagedDecoder(decoder)
    paged.add("r", prompts(20)["20"])
    for _ in range(5):
        paged.step({"r": 1})
    assert looked == [1]
    decoder.layers[0].mlp.note = "changed"
    paged.step({"r": 1})
    assert looked == [1, 1]


def test_a_hook_sees_every_step_and_leaves_nothing_behind(decoder):
    seen, paged = [], PagedDecoder(decoder)
    paged.add("r", prompts(20)["20"])
    paged.step({"r": 5})
    remove = decoder.layers[2].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[0]))
    paged.step({"r": 3})
    paged.step({"r": 3})
    assert seen == [3, 3] and decoder.captured.problem == "GatedMLP has a function that was replaced"
    remove()
    paged.step({"r": 3})
    assert seen == [3, 3] and decoder.captured.problem is None and capture_problem(decoder) is None


def test_eager_lasts(decoder):
    decoder.eager = True
    PagedDecoder(decoder)
    decoder.process_weights_after_loading()
    assert decoder.captured is None


def test_enforce_eager_launches_kernel_by_kernel(tiny_model_path):  # noqa: F811
    params, answers = SamplingParams(temperature=0, max_tokens=6), []
    options = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 40}
    for eager in (False, True):
        llm = LLM(str(tiny_model_path("llama")), enforce_eager=eager, **options)
        model = llm.llm_engine.core.executor.runner.model
        assert (model.captured is None) == eager
        answers.append([list(o.outputs[0].token_ids) for o in llm.generate(["ab", "c"], params, use_tqdm=False)])
    assert answers[0] == answers[1]
