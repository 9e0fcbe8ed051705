"""What the notebooks have stored as output: results, and nothing that only tells how far a cell is."""

import json
import re
from pathlib import Path

import pytest

from minivllm.literate import notebook_paths

ROOT = Path(__file__).parents[2]
BAR = re.compile(r"\d%\||\d+(?:\.\d+)?(?:it/s|s/it)\b|\?it/s|\r(?!\n)")


def text(output: dict) -> str:
    """What a stream printed, or how a result reads without its picture: a widget's bar is plain there too."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", []))


@pytest.mark.parametrize("path", notebook_paths(ROOT), ids=lambda path: path.stem)
def test_no_output_is_a_progress_bar(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [cell["id"] for cell in cells for output in cell["outputs"] if BAR.search(text(output))]
    assert shown == [], "switch the bar off in these cells: `use_tqdm=False`, `disable_progress_bar()`"


@pytest.mark.parametrize(
    ("printed", "bar"),
    [
        ("Loading weights:   0%|          | 0/272 [00:00<?, ?it/s]", True),
        ("100%|█████| 4/4 [00:02<00:00,  1.79it/s]", True),
        ("12 requests [00:03,  3.1s/it]", True),
        ("step 1\rstep 2", True),
        ("| 40% | of copy |", False),
        ("two lines\r\n", False),
    ],
)
def test_a_bar_is_known_by_its_looks(printed, bar):
    assert bool(BAR.search(printed)) == bar
