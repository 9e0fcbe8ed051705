"""Cleaning keeps outputs and drops what changes from run to run."""

import copy
import json

import nbformat
import pytest

from minivllm.literate import clean, notebook

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def used() -> dict:
    """A notebook as Jupyter leaves it after a run."""
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": "a\n"},
        {"output_type": "stream", "name": "stdout", "text": ["b\n"]},
        {"output_type": "stream", "name": "stderr", "text": "c\n"},
        {
            "output_type": "execute_result",
            "execution_count": 7,
            "metadata": {},
            "data": {"text/plain": "1\n2", "application/json": {"a": "b\nc"}},
        },
        {
            "output_type": "display_data",
            "metadata": {"x": 1},
            "data": {VIEW: {"model_id": "f00"}, "text/html": "<b>\n</b>", "image/png": "AA=="},
        },
        {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["t\n", "u"]},
    ]
    metadata = {"execution": {"iopub.execute_input": "2026"}, "tags": ["keep"], "collapsed": True}
    code = {
        "cell_type": "code",
        "id": "a",
        "execution_count": 7,
        "metadata": metadata,
        "source": "x = 1\nx",
        "outputs": outputs,
    }
    prose = {"cell_type": "markdown", "id": "b", "metadata": {}, "source": "ä → β"}
    language = {"name": "python", "version": "3.11.9", "codemirror_mode": {"name": "ipython"}}
    kernel = {"name": "my-venv", "display_name": "My venv", "language": "python"}
    top = {"widgets": {VIEW: {"state": {}}}, "language_info": language, "kernelspec": kernel, "title": "kept"}
    return {"cells": [code, prose], "metadata": top, "nbformat": 4, "nbformat_minor": 5}


def test_outputs_stay_and_volatile_metadata_goes(used):
    before = copy.deepcopy(used)
    done = clean.cleaned(used)
    assert used == before
    code = done["cells"][0]
    assert code["metadata"] == {"tags": ["keep"]}
    assert code["execution_count"] is None
    expected = copy.deepcopy(before["cells"][0]["outputs"])
    expected[0:2] = [{"output_type": "stream", "name": "stdout", "text": "a\nb\n"}]
    expected[2]["execution_count"] = None
    del expected[3]["data"][VIEW]
    assert code["outputs"] == expected
    assert done["cells"][1] == before["cells"][1]
    assert done["metadata"] == {**clean.METADATA, "title": "kept"}


def test_the_spelling_is_the_one_of_jupyter(used):
    done = clean.cleaned(used)
    assert clean.notebook_text(done) == nbformat.writes(nbformat.from_dict(done)) + "\n"
    nbformat.validate(nbformat.reads(clean.notebook_text(done), as_version=4))


def test_cleaning_twice_changes_nothing(repo, run, used):
    path = repo.root / "nbs/used.ipynb"
    path.write_text(json.dumps(used))
    assert run("clean") == "cleaned nbs/used.ipynb\n"
    once = path.read_text()
    assert run("clean") == ""
    assert path.read_text() == once
    run("check")


@pytest.mark.parametrize("indent", [None, 2])
def test_another_spelling_is_not_clean(repo, used, indent):
    path = repo.root / "nbs/used.ipynb"
    for text, expected in [
        (clean.notebook_text(clean.cleaned(used)), True),
        (clean.notebook_text(used), False),
        (json.dumps(json.loads(clean.notebook_text(clean.cleaned(used))), indent=indent), False),
    ]:
        assert clean.is_clean(notebook.parse_notebook(text, "nbs/used.ipynb", path)) == expected
        assert (clean.notebook_text(clean.cleaned(json.loads(text))) == text) == expected


def test_clean_leaves_notebooks_of_other_folders_alone(repo, run, used):
    for name in ("a", "b"):
        notebook.write(repo.root / f"nbs/{name}/x.ipynb", json.dumps(used))
    assert run("clean", "nbs/a") == "cleaned nbs/a/x.ipynb\n"
    assert json.loads(repo.read("nbs/b/x.ipynb")) == used
