"""Numbers in prose: each is computed or stated by a cell of the same notebook, or is a premise that is named here."""

import json
import re
from pathlib import Path

import pytest

from minivllm.literate import notebook_paths

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w/])")
NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$[^$]*\$|\]\([^)]*\)|https?://\S+|^\s*(?:\*\*)?\d+\.(?:\*\*)? |^#+ \d+\. ",
    re.DOTALL | re.MULTILINE,
)
LARGEST_SMALL = 16  # up to here a number counts things that one sees
YEAR = re.compile(r"(19|20)\d\d")

# Premises of a question, sizes that a format or a law sets, names of standards. Nothing here was measured.
PREMISES = {
    "core/kv_events": "0.32",
    "core/trace": "312",
    "recipes/scheduling_policy": "600",
    "models/hub": "32",
    "models/gguf": "0.00001",
    "sampling/random": "256",
    "sampling/state": "500 50000",
    "sampling/transforms": "150 150000",
    "sampling/logprobs": "100 400 50000",
    "sampling/automaton": "50000",
    "numba_kernels/cuda/planning": "16000",
    "numba_kernels/cuda/all_reduce": "36 73",
    "numba_kernels/cuda/wgmma": "9.0",
    "numba_kernels/cuda/decode": "132 256",
    "numba_kernels/cuda/fp8": "8.9 65504",
    "numba_kernels/cpu/planning": "700",
    "numba_kernels/cpu/attention": "200",
    "runtime/model_runner": "40",
    "runtime/decode_graphs": "200",
    "engine/input_processor": "19",
    "engine/detokenizer": "150000",
    "serving/generation": "200",
    "serving/tools": "135",
    "bench/serve": "20",
    "models/families/encoders": "514 512",
    "models/linear/grouped": "128",
    "models/linear/scaled": "256 448 128 60",
    "models/quantization/blocks": "256 8.5 4.5 5.5 4.25",
    "models/quantization/codes": "64 17",
    "models/quantization/compressed": "128",
    "multimodal/images": "50 400",
    "recipes/rounding": "4096",
    "recipes/see_digits": "92 100 80",
    "runtime/machine": "2024.2",
    "spec_decode/draft_model": "17",
    "viz/palette": "4.5 0.12",
}


def plain(number: str) -> str:
    return number.replace(",", "").replace("_", "").rstrip(".")


def told_by_cells(cells: list[dict]) -> set[str]:
    """Every number in the code and the text outputs of a notebook."""
    texts = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        texts.append("".join(cell["source"]))
        for output in cell["outputs"]:
            texts.append("".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/plain", "")))
    return {plain(number) for text in texts for number in re.findall(r"\d[\d,_]*(?:\.\d+)?", text)}


def stray(cells: list[dict], premises: str = "") -> list[str]:
    """Numbers in the prose, exercises left out, that come from nowhere, each with the words around it."""
    known, found = told_by_cells(cells) | set(premises.split()), []
    for cell in cells:
        text = "".join(cell["source"])
        exercise = cell.get("id", "").startswith("exercise") or re.match(r"(## Exercise|\*\*\d+\.|\d+\. )", text)
        if cell["cell_type"] != "markdown" or exercise:
            continue
        prose = NOT_PROSE.sub(" ", text)
        for match in NUMBER.finditer(prose):
            number = plain(match[0])
            small = number.isdigit() and int(number) <= LARGEST_SMALL
            if not (small or number in known or YEAR.fullmatch(number)):
                found.append(f"{match[0]} in: {' '.join(prose[max(0, match.start() - 40) : match.end() + 30].split())}")
    return found


def cells_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["cells"]


@pytest.mark.parametrize("path", notebook_paths(ROOT), ids=lambda path: path.stem)
def test_numbers_in_prose_come_from_cells(path):
    name = path.relative_to(ROOT / "nbs").with_suffix("").as_posix()
    assert stray(cells_of(path), PREMISES.get(name, "")) == []


def test_no_premise_is_named_in_vain():
    for name, numbers in PREMISES.items():
        cells = cells_of(ROOT / "nbs" / f"{name}.ipynb")
        lost = [
            number
            for number in numbers.split()
            if not any(w.startswith(f"{number} in") for w in map(plain, stray(cells)))
        ]
        assert lost == [], f"{name} has no stray {lost}"


@pytest.mark.parametrize(
    ("prose", "code", "count"),
    [
        ("It is 3.7 times as fast.", "", 1),
        ("It is 3.7 times as fast.", "print(3.7)", 0),
        ("A batch of 1,024 tokens.", "n = 1024", 0),
        ("A batch of 1,024 tokens.", "n = 10240", 1),
        ("Four of 16, with `size=99`, since 2023, see [this](page_77.ipynb) and $x^{88}$.", "", 0),
        ("**2.** How many of 500?", "", 0),
        ("About 40 % less.", "", 1),
    ],
)
def test_the_search_finds_what_is_stray(prose, code, count):
    cells = [{"cell_type": "markdown", "source": prose}, {"cell_type": "code", "source": code, "outputs": []}]
    assert len(stray(cells)) == count
