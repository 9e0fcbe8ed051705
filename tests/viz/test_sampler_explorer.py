"""The sampler explorer: what its page computes is what the Python sampler computes, whatever the sliders say."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import tiny_model_path, tiny_tokenizer

from minivllm import LLM, SamplingParams
from minivllm.core.events import TraceHeader
from minivllm.core.trace import Trace
from minivllm.runtime.sample_record import SampleRecord
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.transforms import each_row, standard_stages
from minivllm.viz import SamplerExplorer
from minivllm.viz.sampler_explorer import STAGES

__all__ = ["tiny_model_path"]
VOCABULARY = 260
TOKENIZER = tiny_tokenizer()


def record(seed: int = 11, output: tuple[int, ...] = (40, 41, 40), **params) -> SampleRecord:
    """A token whose logits are random; the tokens of its text among the likeliest, so that penalties show."""
    logits = np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)
    logits[[40, 41, 50]] = 5.0, 4.5, 4.8
    return SampleRecord(logits, SamplingParams(**params), (50, 51, 50), output, 2**63 + 5)


def read_table(page) -> list[tuple[str, int]]:
    """Stage names and how many tokens each left, as the page shows them."""
    heads = page.locator(".mv-odds thead th").all()[1:]
    return [
        (h.evaluate("e => e.firstChild.data"), int(h.locator(".mv-kept").inner_text().split()[0].replace(",", "")))
        for h in heads
    ]


def expect(page, shown: SampleRecord, **more) -> None:
    """The page shows what the Python sampler says of this record."""
    table = shown.explain(**more)
    page.wait_for_function(f"document.querySelector('.mv-card').dataset.token === '{table.token_id.iloc[-1]}'")
    assert read_table(page) == [(row.stage, row.kept) for row in table.iloc[:-1].itertuples()]


def slide(page, name: str, value: float) -> None:
    page.get_by_label(name, exact=True).fill(str(value))


PARAMS = {
    "plain": {},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "all": {
        "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "logit_bias": {50: 1.5, 7: 6.0}, "min_tokens": 9, "stop_token_ids": [41],
    },
    "allowed": {"allowed_token_ids": [1, 2, 40, 50]},
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
def test_the_page_shows_the_stages_and_the_token_of_the_python_sampler(name, open_page, tmp_path):
    shown = record(**PARAMS[name])
    expect(open_page(SamplerExplorer(shown).save(tmp_path / "x.html")), shown)


def test_sliders_say_what_would_have_been(open_page, tmp_path):
    shown = record(temperature=0.8, top_k=30)
    page = open_page(SamplerExplorer(shown, tokenizer=TOKENIZER).save(tmp_path / "x.html"))
    wish = {"temperature": 0.8, "top_k": 30}
    for name, value in [("temperature", 1.5), ("top_k", 7), ("min_p", 0.05), ("top_p", 0.6), ("repetition_penalty", 1.5),
                        ("frequency_penalty", -0.5), ("presence_penalty", 2.0), ("temperature", 0.0)]:  # fmt: skip
        wish[name] = value
        slide(page, name, value)
        expect(page, replace(shown, params=SamplingParams(**wish)))
    page.get_by_role("button", name="as recorded").click()
    expect(page, shown)


def test_another_seed_draws_another_token(open_page, tmp_path):
    shown = record(temperature=1.5)
    page = open_page(SamplerExplorer(shown).save(tmp_path / "x.html"))
    tokens = set()
    for seed in range(shown.seed + 1, shown.seed + 6):
        page.get_by_role("button", name="draw again").click()
        expect(page, replace(shown, seed=seed))
        tokens.add(page.locator(".mv-card").get_attribute("data-token"))
    assert len(tokens) > 1
    page.get_by_label("seed").fill("-3")
    expect(page, replace(shown, seed=-3))
    page.get_by_label("seed").fill("three")
    assert page.get_by_label("seed").get_attribute("aria-invalid") == "true"
    expect(page, replace(shown, seed=-3))


def test_the_chosen_token_is_marked_and_its_piece_of_the_draw_holds_u(open_page, tmp_path):
    shown = record(temperature=0.9, top_p=0.8)
    page = open_page(SamplerExplorer(shown, tokenizer=TOKENIZER).save(tmp_path / "x.html"))
    text = TOKENIZER.decode([int(shown.explain().token_id.iloc[-1])])
    assert text in page.locator("tr.mv-chosen th").inner_text() and text in page.locator(".mv-verdict").inner_text()
    needle, piece = (page.locator(name).bounding_box() for name in (".mv-needle", ".mv-piece.mv-chosen"))
    assert piece["x"] - 2 <= needle["x"] <= piece["x"] + piece["width"] + 2


def test_the_keyboard_moves_sliders_and_is_told_of_it(open_page, tmp_path):
    shown = record(temperature=0.8, top_k=30)
    page = open_page(SamplerExplorer(shown).save(tmp_path / "x.html"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "range"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    expect(page, replace(shown, params=SamplingParams(temperature=0.81, top_k=30)))
    page.wait_for_function("document.querySelector('.mv-live[role=status]').textContent.includes('top_k 30')")


def test_a_grammar_can_be_switched_off(open_page, tmp_path):
    grammar = GrammarCompiler(TOKENIZER, VOCABULARY)
    shown = record(output=(), structured_outputs={"choice": ["yes", "no"]})
    page = open_page(SamplerExplorer(shown, tokenizer=TOKENIZER, grammar=grammar).save(tmp_path / "x.html"))
    expect(page, shown, grammar=grammar)
    assert dict(read_table(page))["grammar"] == 2
    page.get_by_label("grammar").uncheck()
    expect(page, replace(shown, params=SamplingParams()))
    second = replace(shown, output_token_ids=tuple(TOKENIZER.encode("ye")))
    view = SamplerExplorer(second, tokenizer=TOKENIZER, grammar=grammar)
    expect(open_page(view.save(tmp_path / "y.html")), second, grammar=grammar)
    assert "'s'" in view.describe()
    grammar.shutdown()


def test_float16_is_smaller_and_says_what_it_approximates(open_page, tmp_path):
    shown = record(temperature=0.9, top_p=0.9)
    view = SamplerExplorer(shown, precision="float16")
    page = open_page(view.save(tmp_path / "x.html"))
    rounded = replace(shown, logits=shown.logits.astype(np.float16).astype(np.float32))
    expect(page, rounded)
    assert "rounded to float16" in page.locator(".mv-note").inner_text()
    large = replace(shown, logits=np.random.default_rng(0).normal(0, 2, 30_000).astype(np.float32))
    sizes = [len(SamplerExplorer(large, precision=p).to_html(program=False)) for p in ("float32", "float16")]
    assert sizes[1] < 0.6 * sizes[0] and sizes[0] < 6 * 30_000


def test_the_page_knows_the_stages_of_the_sampler():
    assert tuple(stage.name for stage in standard_stages()) == STAGES


@pytest.fixture(scope="module")
def tiny(tiny_model_path):
    with LLM(str(tiny_model_path("llama")), dtype="float32", num_gpu_blocks=64) as llm:
        yield llm


def test_a_model_is_asked_for_the_token(tiny):
    params = SamplingParams(temperature=0.9, top_k=20, seed=3)
    view = SamplerExplorer(tiny, "hello", params, step=2)
    with tiny.record(samples=True) as trace:
        (output,) = tiny.generate(["hello"], params.clone(max_tokens=8), use_tqdm=False)
    assert view.explain().token_id.iloc[-1] == output.outputs[0].token_ids[2]
    same = SamplerExplorer(tiny, trace=trace, request=output, step=2)
    assert same.data().bytes() == view.data().bytes()
    assert same.explain().equals(tiny.explain(trace, output, 2))
    # one request only: no need to name it
    assert SamplerExplorer(tiny, trace=trace, step=2).summary() == view.summary()
    text = view.summary()
    assert "Output token 2, after “hello" in text and "top_k" in text and "drawn with u" in text


def test_a_figure_and_a_notebook_output(tiny):
    view = SamplerExplorer(tiny, "hello", SamplingParams(temperature=0.9, top_k=20, seed=3))
    axes = view.plot()
    assert any("▶" in label.get_text() for label in axes.get_yticklabels())
    assert view.to_png()[:4] == b"\x89PNG"
    bundle = view._repr_mimebundle_()
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= set(bundle)


def double(logits, view):
    return logits * 2


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: SamplerExplorer("llm"), TypeError, "shows a SampleRecord or asks an LLM, got str"),
        (lambda: SamplerExplorer(record(), precision="int8"), ValueError, "one of float32, float16, got 'int8'"),
        (lambda: SamplerExplorer(record(), "a prompt"), ValueError, "prompt does not go with a record"),
        (lambda: SamplerExplorer(record(logits_processors=[double])), NotImplementedError, r"logits_processors \(double\)"),
        (lambda: SamplerExplorer(record(structured_outputs={"regex": "a"})), ValueError, "give its compiler"),
    ],
)  # fmt: skip
def test_a_wrong_source_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_wrong_wish_to_a_model_is_named(tiny):
    with pytest.raises(ValueError, match="needs a prompt, or a trace"):
        SamplerExplorer(tiny)
    with pytest.raises(ValueError, match="shows one completion; params ask for 2"):
        SamplerExplorer(tiny, "x", SamplingParams(n=2))
    with pytest.raises(ValueError, match=r"ended after 1 tokens; there is no token 5"):
        SamplerExplorer(tiny, "x", SamplingParams(stop_token_ids=list(range(264))), step=5)
    with pytest.raises(ValueError, match="tokenizer does not go with a model"):
        SamplerExplorer(tiny, "x", tokenizer=TOKENIZER)
    empty = Trace(TraceHeader())
    with pytest.raises(ValueError, match="it has no samples"):
        SamplerExplorer(tiny, trace=empty)
    with pytest.raises(KeyError, match=r"record\(samples=True\)"):
        SamplerExplorer(tiny, trace=empty, request="0")


def test_an_engine_with_stages_of_its_own_is_refused(tiny_model_path):
    path = str(tiny_model_path("llama"))
    wrong = pytest.raises(NotImplementedError, match="the stages double, which a page cannot compute")
    with LLM(path, dtype="float32", num_gpu_blocks=64, logits_processors=[each_row(double)]) as llm, wrong:
        SamplerExplorer(llm, "x")
