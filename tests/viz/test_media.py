"""Media in the tables and the views: which blocks and chunks hold them, and the picture beside the odds of a token."""

import numpy as np
import pytest
from tiny_vlms import picture, save_vlm

from minivllm import LLM, SamplingParams
from minivllm.core.encoder_cache import MultiModalFeatureSpec, PlaceholderRange
from minivllm.lab.cost import Constant
from minivllm.lab.simulation import simulate
from minivllm.lab.workload import WorkloadRequest
from minivllm.viz.block_map import BlockMap, media_blocks
from minivllm.viz.palette import LIGHT, owner_colour
from minivllm.viz.sampler_explorer import SamplerExplorer
from minivllm.viz.timeline import Timeline

GO = "(step) => { const cursor = [...globalThis.minivllmCursors.values()][0]; cursor.go(step); }"


def media(name, offset, count, kind="image"):
    return MultiModalFeatureSpec(name, kind, PlaceholderRange(offset, count))


REQUESTS = [
    WorkloadRequest("one", 0.0, (range(30),), range(8), mm_features=(media("a", 5, 10), media("b", 21, 3, "audio"))),
    WorkloadRequest("text", 0.0, (range(50, 70),), range(8)),
    WorkloadRequest("two", 0.05, (range(80, 110),), range(8), mm_features=(media("a", 9, 10),)),
]
CONFIG = {
    "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 64, "num_gpu_blocks": 40, "block_size": 4,
    "encoder_cache_size": 16, "max_num_encoder_input_tokens": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def trace():
    return simulate(REQUESTS, config=CONFIG, cost_model=Constant(per_step=0.01)).trace


def test_tables_name_the_tokens_of_media(trace):
    table = trace.to_pandas()["media"]
    rows = [row[:-1] for row in table.itertuples(index=False, name=None)]
    assert rows == [
        ("one", "image", 5, 15, 10, "a"),
        ("one", "audio", 21, 24, 3, "b"),
        ("two", "image", 9, 19, 10, "a"),
    ]
    encoded = [e.request for e in trace if e.kind == "encode"]
    assert encoded == ["one", "one"] and table.encoded.notna().tolist() == [True, True, False]


def test_a_block_with_media_lacks_a_corner(trace, open_page, tmp_path):
    step = next(i for i, state in trace.states() if all(r in state.requests for r in ("one", "two")) and state.requests["two"].tables[0])  # fmt: skip
    state = trace.at(step)
    tables = {name: its.tables[0] for name, its in state.requests.items()}
    marked = media_blocks(trace, state)
    assert marked == {*tables["one"][1:4], *tables["one"][5:6], *tables["two"][2:5]}
    page = open_page(BlockMap(trace).save(tmp_path / "blocks.html"))
    page.evaluate(GO, step)
    page.wait_for_timeout(100)
    corners = page.locator("canvas[data-pool=gpu]").evaluate(
        """(canvas) => {
          const { columns, pitch, inner } = Object.fromEntries(Object.entries(canvas.dataset).map(([k, v]) => [k, Number(v)]));
          const pixel = (i, d) => Array.from(canvas.getContext("2d").getImageData((i % columns) * pitch + d, Math.floor(i / columns) * pitch + d, 1, 1).data)
            .slice(0, 3).map((v) => v.toString(16).padStart(2, "0")).join("");
          return Array.from({ length: 40 }, (_, i) => [pixel(i, 0), pixel(i, inner - 1)].map((hex) => "#" + hex));
        }"""
    )
    numbers = {"one": 0, "text": 1, "two": 2}
    for name, table in tables.items():
        for block in table:
            ink = owner_colour(numbers[name])
            assert corners[block] == [ink, LIGHT["panel"] if block in marked else ink], (name, block)
    page.get_by_label("block number to pin").fill(str(tables["one"][3]))
    page.keyboard.press("Enter")
    assert "image, 3 tokens of 10" in page.locator("aside").inner_text()
    assert "holds tokens of a picture or clip" in page.locator(".mv-card").inner_text()


def test_chunks_with_media_are_marked_and_told(trace, open_page, tmp_path):
    view = Timeline(trace)
    rows = view.lanes.media
    assert [rows[rows[:, 1] == i, 2].sum() for i in range(3)] == [13, 0, 10]
    assert rows[:, 3].sum() == 13 and "23 tokens of media, 13 embeddings encoded" in view.describe()
    counts, number = {}, -1
    for event in trace.events:
        number += event[0] == "step"
        if event[0] == "encode":
            counts[number, event[1]] = counts.get((number, event[1]), 0) + event[4]
    for step, request, seen, encoded in rows.tolist():
        name = REQUESTS[request].request_id
        now, before = trace.at(step).requests[name], trace.at(step - 1).requests.get(name) if step else None
        start = before.num_computed_tokens if before else 0
        places = [f.mm_position for f in REQUESTS[request].mm_features]
        assert seen == sum(len({*range(start, now.num_computed_tokens)} & {*range(p.offset, p.end)}) for p in places)
        assert encoded == counts.get((step, name), 0)
    page = open_page(view.save(tmp_path / "timeline.html"), width=1000)
    lanes = "document.querySelector('.mv-timeline').lanes.lanes"
    step, request, seen, encoded = next(row for row in rows.tolist() if row[3])
    told = page.evaluate(f"{lanes}.describe({request}, {step})")
    assert f"({seen} of media, {encoded} embeddings encoded)" in told
    assert "tokens of media" in page.locator(".mv-card").inner_text()
    assert "encoder runs" in [text.get_text() for text in view.plot().child_axes[0].get_legend().get_texts()]


def test_the_picture_stands_beside_the_odds(open_page, tmp_path):
    with LLM(str(save_vlm("llava", tmp_path)), dtype="float32", num_gpu_blocks=64, max_model_len=128) as llm:
        prompt = {
            "prompt": "see <image>, then <image>!",
            "multi_modal_data": {"image": [picture(0), picture(1, 400, 40)]},
        }
        view = SamplerExplorer(llm, prompt, SamplingParams(temperature=0.9, seed=3), step=1)
        text_alone = SamplerExplorer(llm, "no picture", SamplingParams(temperature=0))
        assert llm.llm_engine.input_processor.media.pictures is None
    assert [p.size for p in view.pictures] == [(40, 30), (400, 40)] and text_alone.pictures == []
    assert (np.asarray(view.pictures[0]) == np.asarray(picture(0))).all()
    assert "after “see , then !" in view.summary() and "pictures: 40 x 30, 400 x 40" in view.summary()
    page = open_page(view.save(tmp_path / "token.html"))
    shown = page.locator(".mv-pictures img")
    assert shown.evaluate_all("(all) => all.map((i) => [i.naturalWidth, i.naturalHeight, i.alt])") == [
        [160, 120, "picture 1 of the prompt"],
        [160, 16, "picture 2 of the prompt"],
    ]
    assert len(view.plot().child_axes) == 2
