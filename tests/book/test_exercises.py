"""Exercises in the notebooks: each begins blank, and behind it, folded, are a solution and wrong answers that nbval tries."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from puzzles import load_puzzles

from minivllm.literate import notebook_paths

ROOT = Path(__file__).parents[2]

WITHOUT = {
    "index": "the first page",
    "literate/index": "tells the chapters behind it",
    "literate/source": "is a tool for the chapters behind it",
    "literate/notebook": "is a tool for the chapters behind it",
    "literate/render": "has its exercise in the chapter before it",
    "literate/sync": "a reader tries it on a branch of their own",
    "literate/module": "has its exercise in literate/write_back",
    "literate/clean": "has nothing to guess",
    "literate/check": "a reader tries it on a chapter of their own",
    "literate/jupyter": "needs a server",
    "literate/cli": "is a list of commands",
    "book/paging": "is puzzles, with a checker of their own",
    "book/kernel_puzzles": "is puzzles, with a checker of their own",
    "core/events": "lists the events; the exercises on them are in core/trace and core/trace_tables",
    "core/recorder": "is the part of the scheduler that records; the exercises are in core/trace",
    "core/ray_cluster": "its exercises kill processes",
    "runtime/executors/ray_executor": "its exercises are to be measured on a cluster",
    "runtime/executors/external": "its exercises are about a program in several processes",
    "core/request_queue": "is the part of the scheduler that waits; the exercises are in core/scheduler",
    "core/views": "is ten lines that keep the core from importing the views",
    "lora/store": "loads and keeps what the chapters before it made; the exercises are there",
    "models/families/registry": "is a table of families; the exercise is in models/families/dense",
    "models/families/deepseek": "puts together parts whose exercises are in models/mixers",
    "core/encoder_cache": "has its exercise in recipes/see_digits",
    "models/families/media": "is a table of families; the exercise is in recipes/see_digits",
    "multimodal/audio": "is a part of what a model that hears puts together; see recipes/see_digits for one that sees",
    "multimodal/encoder": "is a part of what recipes/see_digits puts together; the exercise is there",
    "multimodal/fetch": "is a part of what recipes/see_digits puts together; the exercise is there",
    "multimodal/images": "is a part of what recipes/see_digits puts together; the exercise is there",
    "multimodal/inputs": "is a part of what recipes/see_digits puts together; the exercise is there",
    "multimodal/outputs": "is a part of what recipes/see_digits puts together; the exercise is there",
    "multimodal/processor": "is a part of what recipes/see_digits puts together; the exercise is there",
    "numba_kernels/cuda/drafts": "has its exercise in runtime/device_drafts",
    "numba_kernels/cuda/prefill_hopper": "needs a GPU",
    "serving/lora": "is a list of routes",
    "serving/ray_app": "needs a cluster",
    "runtime/kv_connectors": "moves what core/kv_connector decides; the exercise is there",
    "serving/pd_proxy": "puts together what core/kv_connector has the exercise on",
    "commands/quantize": "is a command; the exercise is in numba_kernels/cpu/matmul/quantized",
    "core/plugins": "is a table of entry points; a guide writes one",
    "lora/resolver": "finds adapters; the exercises are in the chapters before it",
    "models/fallback": "calls the code of transformers",
    "models/families/encoders": "is a table of families; the exercise is in runtime/pooler",
    "models/linear/grouped": "has its exercise in numba_kernels/cpu/matmul/quantized",
    "models/linear/scaled": "has its exercise in numba_kernels/cpu/matmul/quantized",
    "models/mixers/conv": "has its exercise in models/families/state",
    "models/mixers/delta": "has its exercise in models/families/state",
    "models/mixers/encoder": "has its exercise in runtime/pooler",
    "models/mixers/mamba2": "has its exercise in models/families/state",
    "models/mixers/scan": "has its exercise in models/families/state",
    "models/mixers/state": "has its exercise in attention/state",
    "models/ops/states": "has its exercise in models/families/state",
    "models/ops/states_cpu": "has its exercise in models/families/state",
    "models/ops/states_cuda": "has its exercise in models/families/state",
    "models/pooling": "reads a folder; the exercise is in runtime/pooler",
    "models/quantization/blocks": "lists layouts; the exercise is in numba_kernels/cpu/matmul/quantized",
    "models/quantization/codes": "lists layouts; the exercise is in numba_kernels/cpu/matmul/quantized",
    "models/quantization/compressed": "lists layouts; the exercise is in numba_kernels/cpu/matmul/quantized",
    "models/quantization/formats": "lists layouts; the exercise is in numba_kernels/cpu/matmul/quantized",
    "models/quantization/gptq": "has its exercise in recipes/rounding",
    "models/quantization/writers": "writes the layouts of the chapters before it",
    "numba_kernels/cpu/scan": "has its exercise in models/families/state",
    "numba_kernels/cuda/scan": "has its exercise in models/families/state",
    "runtime/executors/select": "is a table of executors; the exercise is in runtime/executors/mp",
    "runtime/executors/worker": "is the other end of runtime/executors/mp; the exercise is there",
    "serving/pooling": "is a list of routes",
    "viz/tables": "generates a table for the browser",
}
"""Chapters without an `@Exercise`, and why."""

ONE_WRONG = {"check_enough": "is a yes or a no"}
"""Exercises with a single wrong answer, and why."""

STARTED = {"check_without"}
"""Begins with the whole model, from which the reader is to leave something out."""


def source(cell: dict) -> str:
    return "".join(cell["source"])


def folded(cell: dict) -> bool:
    """Whether neither JupyterLab nor the site shows the cell's code."""
    return source(cell).startswith("#| hide") and cell["metadata"].get("jupyter", {}).get("source_hidden", False)


def said(cell: dict) -> str:
    """The text of a cell's stored outputs."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", []) for output in cell["outputs"]]
    return "\n".join("".join(part) for part in parts)


@cache
def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


CHECKER = r"^@Exercise\n(?:async )?def (\w+)\("


def exercises() -> list[tuple[Path, str]]:
    """(notebook, checker) of every exercise."""
    return [
        (path, name)
        for path in notebook_paths(ROOT)
        for cell in code_cells(path)
        for name in re.findall(CHECKER, source(cell), re.MULTILINE)
    ]


EACH = pytest.mark.parametrize(("path", "name"), exercises(), ids=lambda x: x if isinstance(x, str) else x.stem)


def test_there_are_enough_of_them():
    blocks, kernels = load_puzzles("paging"), load_puzzles("kernel_puzzles")
    assert len(blocks) >= 12 and len(kernels) >= 12
    assert len(exercises()) + len(blocks) + len(kernels) >= 40


def test_every_chapter_has_one_or_a_reason():
    chapters = {path.relative_to(ROOT / "nbs").with_suffix("").as_posix(): path for path in notebook_paths(ROOT)}
    judged = {path for path, _ in exercises()}
    assert {name for name, path in chapters.items() if path not in judged} == set(WITHOUT)


@EACH
def test_the_reader_begins_with_a_blank(path, name):
    tries = [c for c in code_cells(path) if re.search(rf"^{name}\(", source(c), re.MULTILINE) and not folded(c)]
    assert tries, "no cell asks the reader"
    started = "no answer yet" not in said(tries[0])
    assert started == (name in STARTED), "an answer stands there already, or no longer"


@EACH
def test_the_checker_is_folded_away(path, name):
    (checker,) = (
        cell for cell in code_cells(path) if re.search(rf"^(async )?def {name}\(", source(cell), re.MULTILINE)
    )
    assert folded(checker)


@EACH
def test_a_solution_and_wrong_answers_are_folded_away_and_tried(path, name):
    cells = code_cells(path)
    proofs = [cell for cell in cells if f"{name}.accepts(" in source(cell) or f"{name}.rejects(" in source(cell)]
    assert proofs and all(folded(cell) for cell in proofs)
    text = "\n".join(source(cell) for cell in proofs)
    assert f"{name}.accepts(" in text
    assert text.count(f"{name}.rejects(") >= (1 if name in ONE_WRONG else 2)
