"""A real JupyterLab server, started as `make lab` starts it: what a save in the browser does to notebook and module."""

import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-this-test"
HEADERS = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}


def lab_command() -> list[str]:
    """The recipe of `lab` in the Makefile, run with this Python."""
    recipe = re.search(r"^lab:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    command = shlex.split(recipe[1].replace("\\\n", " "))
    assert command[:2] == ["$(BIN)/jupyter", "lab"]
    return [sys.executable, "-m", "jupyter", *command[1:]]


@pytest.fixture
def server(repo) -> Iterator[str]:
    """The address of the contents API of a server on the notebooks of a small repository."""
    repo.notebook(head="#| default_exp pool", a="#| export\nX = 1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--port-retries=0",
        f"--IdentityProvider.token={TOKEN}",
    ]
    log = repo.root / "server.log"
    with log.open("w") as written:
        process = subprocess.Popen([*lab_command(), *options], cwd=repo.root, stdout=written, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}/api/contents"
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(address, headers=HEADERS), timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, "the server did not start"
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def save(address: str, source: str) -> tuple[int, str]:
    """Read the notebook, change its cell as if it had been run, and save it. Status and answer of the server."""
    model: dict[str, Any] = json.load(
        urllib.request.urlopen(urllib.request.Request(f"{address}/demo.ipynb", headers=HEADERS))
    )
    model["content"]["cells"][2] |= {"source": source, "execution_count": 7}
    body = json.dumps({key: model[key] for key in ("type", "format", "content")}).encode()
    request = urllib.request.Request(f"{address}/demo.ipynb", body, HEADERS, method="PUT")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
def test_a_save_exports_the_module_and_an_error_names_its_place(repo, server, run):
    assert save(server, "#| export\nX = 2")[0] == 200
    assert "X = 2" in repo.read("minivllm/pool.py")
    assert repo.cell("a")["execution_count"] is None
    run("check")

    status, answer = save(server, "#| export\nX = (")
    assert status == 500
    assert "nbs/demo.ipynb #a line 2: '(' was never closed" in json.loads(answer)["message"]
    assert "X = 2" in repo.read("minivllm/pool.py")
