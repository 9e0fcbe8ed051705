"""A decoder's step by one launch: the same to the bit as kernel by kernel, and never a step of another model than the one at hand."""

import pytest
import torch
from paged import PagedDecoder, make_decoder
from tiny_models import (
    _SIZES,
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
from minivllm.models.cpu_linear import few_rows
from minivllm.models.cpu_step import CPUStep, step_problem
from minivllm.models.layers import GatedMLP, RMSNorm
from minivllm.models.linear import Linear
from minivllm_kernels.cpu.matmul.layout import host_tiles
from minivllm_kernels.cpu.program import Program

CAN = [name for name in TINY_MODELS if name != "gemma3"]


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return {str(n): torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths}


def logits(decoder, one_launch, steps, seed=0):
    """The logits of some steps of a few requests. steps: [{request: tokens}]."""
    paged = PagedDecoder(decoder, seed=seed)
    if not one_launch:
        decoder.cpu_step = None
    for name, tokens in prompts(40, 20, 31).items():
        paged.add(name, tokens)
    return [torch.cat(list(paged.step(step).values())) for step in steps]


STEPS = [{"40": 14}, {"40": 1, "20": 1}, {"40": 1, "20": 1, "31": 5}, {"40": 1, "20": 1}, {"31": 1}]


def same(decoder, steps=STEPS):
    return all(
        torch.equal(a, b) for a, b in zip(logits(decoder, True, steps), logits(decoder, False, steps), strict=True)
    )


@pytest.fixture
def noted(monkeypatch):
    """For which numbers of rows programs were made."""
    noted, note = [], CPUStep._note
    monkeypatch.setattr(CPUStep, "_note", lambda self, rows, *rest: noted.append(rows) or note(self, rows, *rest))
    return noted


@pytest.mark.parametrize("name", CAN)
def test_the_same_to_the_bit(name, noted):
    """Prompts, decodes and both together; biases, windows, rotations that depend on the length, several cache groups."""
    assert same(make_decoder(hf_model(name), "numba_cpu"))
    assert noted == [14, 2, 7, 1]


def test_the_same_to_the_bit_in_bf16(noted):
    """Sizes that fill tiles, if the CPU has a unit for them."""
    config = LlamaConfig(**_SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4})
    model = LlamaForCausalLM(config).eval()
    randomise(model)
    decoder = make_decoder(model, "numba_cpu", dtype=torch.bfloat16)
    assert same(decoder)
    few = few_rows(torch.bfloat16, host_tiles())
    assert decoder.cpu_step is None and noted == [rows for rows in (14, 2, 7, 1) if rows <= few]


@pytest.mark.parametrize("kernel", ["int8", "int4_32"])
def test_quantized_products(kernel):
    assert same(make_decoder(hf_model("llama"), "numba_cpu", linear_kernel=kernel))


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("llama", {"backend": "sdpa"}, "the attention backend is sdpa"),
        ("llama", {"backend": "numba_cpu_invariant"}, "the attention backend is numba_cpu_invariant"),
        ("llama", {"linear_kernel": "torch"}, "some products are not by numba"),
        ("gemma3", {}, "norms of a layer's results"),
    ],
)
def test_what_a_decoder_lacks_is_said(name, options, problem):
    decoder = make_decoder(hf_model(name), **{"backend": "numba_cpu"} | options)
    PagedDecoder(decoder)
    assert decoder.cpu_step is None and problem in (step_problem(decoder) or "")
    with pytest.raises(ValueError, match="a step cannot be one launch"):
        CPUStep(decoder)


def test_an_attention_backend_of_ones_own_is_called():
    class Watched(NumbaCPUBackend):
        called = 0

        def attend(self, *args):
            Watched.called += 1
            return super().attend(*args)

    decoder = make_decoder(hf_model("llama"), Watched())
    logits(decoder, True, STEPS[:1])
    assert Watched.called == len(decoder.layers)


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
            decoder.cpu_step = None
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
    for name in type(part).__slots__:
        setattr(new, name, getattr(part, name))
    return new


def leave_out_a_layer(decoder):
    kept = decoder.layers, decoder.layer_to_rope, decoder.layer_to_cache, decoder.layer_to_group
    decoder.layers, *lists = (x[:-1] for x in kept)
    decoder.layer_to_rope, decoder.layer_to_cache, decoder.layer_to_group = lists

    def undo():
        decoder.layers, decoder.layer_to_rope, decoder.layer_to_cache, decoder.layer_to_group = kept

    return undo


def swap_layers(decoder):
    decoder.layers[0], decoder.layers[1] = decoder.layers[1], decoder.layers[0]
    return lambda: swap_layers(decoder)


def double_weight(linear, kernel):
    kept = linear.weight.clone()

    def prepare(weight, kernel):
        linear._weight = weight
        linear.prepare(kernel)

    prepare(2 * kept, kernel)
    return lambda: prepare(kept, "auto")


def other_weight(decoder):
    return double_weight(decoder.layers[1].mlp.down, "auto")


def product_by_torch(decoder):
    return double_weight(decoder.layers[3].attention.o, "torch")


class Doubled(GatedMLP):
    """Twice what the MLP says."""

    __slots__ = ()

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
    return exchange(decoder.layers[0].mlp, "activation", torch.relu)


def halved(original):
    return lambda self, *args: original(self, *args) / 2


def another_backend_of_a_layer(decoder):
    class Halved(NumbaCPUBackend):
        attend = halved(NumbaCPUBackend.attend)

    return exchange(decoder.layers[1].attention, "backend", Halved())


def another_attend(decoder):
    return exchange(NumbaCPUBackend, "attend", halved(NumbaCPUBackend.attend))


def another_attend_of_one_backend(decoder):
    attend = decoder.backend.attend
    return exchange(decoder.backend, "attend", lambda *args: attend(*args) / 2)


def another_class_of_a_product(decoder):
    class Halved(Linear):
        __slots__ = ()
        __call__ = halved(Linear.__call__)

    attention = decoder.layers[0].attention
    return exchange(attention, "qkv", as_class(Halved, attention.qkv))


def a_product_in_a_wrapper(decoder):
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


def another_call_of_products(decoder):
    return exchange(Linear, "__call__", halved(Linear.__call__))


def another_last_norm(decoder):
    class Halved(RMSNorm):
        __slots__ = ()

        def add(self, x, residual):
            x, residual = super().add(x, residual)
            return x / 2, residual

    return exchange(decoder, "final_norm", as_class(Halved, decoder.final_norm))


def a_norm_of_results(decoder):
    layer = decoder.layers[1]
    return exchange(layer, "mlp_post_norm", layer.mlp_norm)


def a_layer_without_positions(decoder):
    return exchange(decoder, "ropes", [None])


CHANGES = [leave_out_a_layer, swap_layers, other_weight, product_by_torch, another_norm, another_activation]
CODE = [another_class, another_method, another_backend_of_a_layer, another_attend, another_attend_of_one_backend]
CODE += [another_class_of_a_product, a_product_in_a_wrapper, another_call_of_products, another_last_norm]
CODE += [a_function_for_an_mlp, a_function_for_a_layer]


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


def test_a_plan_for_fewer_threads_is_carried_out_by_so_many(decoder, monkeypatch):
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
            decoder.cpu_step(torch.tensor([1]), torch.tensor([0]), paged.caches, [])
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
            assert decoder.cpu_step._scratch._pieces[-1][0].nbytes >= n * 4 * 8 * 72, "rows widened, for each thread"
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_products_chosen_anew_after_binding(decoder):
    PagedDecoder(decoder)
    assert decoder.cpu_step is not None
    decoder.linear_kernel = "torch"
    decoder.prepare()
    assert decoder.cpu_step is None


def test_products_in_another_dtype_are_no_part_of_a_launch():
    config = LlamaConfig(**_SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4})
    decoder = make_decoder(LlamaForCausalLM(config).eval(), "numba_cpu", dtype=torch.bfloat16)
    PagedDecoder(decoder)
    wide = decoder.layers[0].mlp.down
    wide.prepare(wide=True)
    if getattr(wide._run, "out_dtype", decoder.dtype) == decoder.dtype:
        pytest.skip("no product gives float32 on this machine")
    assert not decoder.cpu_step.takes(1) and "another dtype" in step_problem(decoder)


def test_eager_lasts(decoder):
    decoder.eager = True
    PagedDecoder(decoder)
    decoder.prepare()
    assert decoder.cpu_step is None


def test_enforce_eager_launches_kernel_by_kernel(tiny_model_path):  # noqa: F811
    params, answers = SamplingParams(temperature=0, max_tokens=6), []
    options = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 40}
    for eager in (False, True):
        llm = LLM(str(tiny_model_path("llama")), enforce_eager=eager, **options)
        model = llm.llm_engine.core.executor.runner.model
        assert (model.cpu_step is None) == eager
        answers.append([list(o.outputs[0].token_ids) for o in llm.generate(["ab", "c"], params, use_tqdm=False)])
    assert answers[0] == answers[1]
