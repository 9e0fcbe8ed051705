"""The code blocks of a Markdown page, and a program that runs them from top to bottom in one folder.

Above a block may stand `<!-- not run: REASON -->`, or `<!-- background: URL -->` for a server: the next block is run once URL answers.
"""

import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+): (?P<what>.*?) -->\n)?^```(?P<language>[^`\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARKS = ("not run", "background")


@dataclass(frozen=True)
class Block:
    """A fenced block. `line`: of its first line of code, from 1. `mark`, `what`: of the comment above it, or None."""

    language: str
    code: str
    line: int
    mark: str | None = None
    what: str | None = None


def read_blocks(text: str) -> list[Block]:
    """All fenced blocks of a page. Raises ValueError for a mark that is not known."""
    found = []
    for match in BLOCK.finditer(text):
        if match["mark"] not in (None, *MARKS):
            raise ValueError(f"unknown mark {match['mark']!r} above a block; known: {', '.join(MARKS)}")
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(match["language"], match["code"], line, match["mark"], match["what"]))
    return found


RUN = """
import subprocess, time, urllib.request
names, servers = {"__name__": "__main__"}, []
def wait(url, server):
    end = time.monotonic() + 120
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5)
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"nothing answers at {url}") from None
            time.sleep(0.2)
def python(code, place):
    exec(compile(code, place, "exec"), names)
def bash(code, url=None):
    if url is None:
        subprocess.run(["bash", "-euc", code], check=True)
    else:
        servers.append(subprocess.Popen(["bash", "-euc", "exec " + code]))
        wait(url, servers[-1])
try:
    STEPS
finally:
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait(60)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def program(page: Path) -> str:
    """A Python program that runs a page's Python and shell blocks. Its server takes a free port in place of 8000."""
    steps = []
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.mark == "not run":
            continue
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code  # errors name the line of the page
            steps.append(f"python({code!r}, {str(page)!r})")
        elif block.language == "bash":
            steps.append(f"bash({block.code!r}, {block.what!r})")
    body = "\n".join(steps) or "pass"
    return RUN.replace("    STEPS", textwrap.indent(body, "    ")).replace("8000", str(free_port()))


def run_page(page: Path, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a page's blocks in `folder`, where `minivllm` and `python` mean those of these tests."""
    tools = folder / "bin"
    tools.mkdir()
    for name, module in (("minivllm", "-m minivllm.cli"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -P {module} "$@"\n')
        (tools / name).chmod(0o755)
    script = folder / "page.py"
    script.write_text(program(page))
    environment = {**environment, "PATH": f"{tools}:{environment['PATH']}"}
    return subprocess.run(
        [sys.executable, "-P", str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
