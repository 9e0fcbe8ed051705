"""The page of benchmark results, made of whatever `benchmarks/results` holds."""

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minivllm.literate import write

ABOUT = (
    "Stored results, each with the machine that it was taken on. Figures of different machines, or of different days on a shared machine,"
    " do not compare: look at the ratios within a run. `make bench` runs what runs without a GPU, `make gpu` the rest."
)
# Keys under which a benchmark names the machine that it ran on.
MACHINE = ("machine", "card", "device", "cpu", "gpu")


def shown(value: Any) -> str:
    """A value as it stands in a table."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def is_plain(value: Any) -> bool:
    """Whether a value fits into a cell of a table."""
    if isinstance(value, list):
        return len(value) <= 12 and all(is_plain(item) and not isinstance(item, list) for item in value)
    return not isinstance(value, dict)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """A Markdown table."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(map(shown, row)) + " |" for row in rows), ""]


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A row whose nested objects have become columns `outer.inner`."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        cells |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return cells


def objects(value: Any) -> list[dict[str, Any]]:
    """The values of an object, if all of them are objects of plain fields; else none."""
    found = list(value.values()) if isinstance(value, dict) else []
    return found if all(isinstance(one, dict) and all(map(is_plain, one.values())) for one in found) else []


def side_by_side(found: dict[str, dict[str, Any]]) -> list[str]:
    """A table of objects that have fields in common, a column for each."""
    fields = dict.fromkeys(field for one in found.values() for field in one)
    return table(["field", *found], ([field, *(one.get(field) for one in found.values())] for field in fields))


def tables(value: Any, title: str = "") -> list[str]:
    """Tables of a JSON value: one of its plain fields, then one for each list of rows and each object in it."""
    lines = [f"**{title}**", ""] if title else []
    if len(objects(value)) > 1:
        return [*lines, *side_by_side(value)]
    if isinstance(value, list) and value and all(map(objects, value)):
        return [line for i, one in enumerate(value, 1) for line in tables(one, f"{title} {i}")]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows = [flat(row) for row in value]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        return [*lines, *table(columns, ([row.get(key) for key in columns] for row in rows))]
    if isinstance(value, list):
        return [*lines, shown(value), ""]
    plain = {key: item for key, item in value.items() if is_plain(item)}
    if plain:
        lines += table(["field", "value"], plain.items())
    for key, item in value.items():
        if key not in plain:
            lines += tables(item, f"{title}: {key}" if title else key)
    return lines


def machine_of(result: Any, path: Path) -> str:
    """The machine that a result names, or that its file is named after (`BENCHMARK-MACHINE.json`)."""
    if isinstance(result, dict):
        for key in MACHINE:
            named = result.get(key)
            if isinstance(named, dict):
                named = ", ".join(shown(part) for part in flat(named).values())
            if isinstance(named, str) and named:
                return named
    name = path.stem.partition("-")[2]
    if not name:
        raise ValueError(f"{path.name}: neither the file's name nor a key {', '.join(MACHINE)} tells the machine")
    return name.replace("-", " ")


def about(script: Path) -> str:
    """The first paragraph of a benchmark's docstring."""
    if not script.is_file():
        return ""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def spoken(name: str) -> str:
    """A benchmark's name as a heading has it. It stands in the headings of its machines too, so that no two are alike."""
    return name.replace("_", " ")


def section(path: Path, scripts: Path) -> list[str]:
    """What one file says."""
    result = json.loads(path.read_text(encoding="utf-8"))
    name = path.stem.partition("-")[0]
    script = next((s for s in (scripts / f"{name}.py", scripts / name / "run.py") if s.is_file()), None)
    made = f" Made by `python {script.relative_to(scripts.parent).as_posix()}`." if script else ""
    head = [f"### {spoken(name)}: {machine_of(result, path)}", ""]
    return [*head, f"Stored in `benchmarks/results/{path.name}`.{made}", "", *tables(result)]


def benchmark_page(results: Path, scripts: Path) -> str:
    """The whole page, a section for each benchmark and in it one for each machine."""
    lines = [
        "# Benchmarks",
        "",
        ABOUT,
        "",
    ]
    names: dict[str, list[Path]] = {}
    for path in sorted(results.glob("*.json")):
        names.setdefault(path.stem.partition("-")[0], []).append(path)
    for name, paths in names.items():
        script = next((s for s in (scripts / f"{name}.py", scripts / name / "run.py") if s.is_file()), None)
        lines += [f"## {spoken(name)}", ""]
        lines += [about(script), ""] if script else []
        for path in paths:
            lines += section(path, scripts)
    return "\n".join(lines)


def make_benchmarks(root: Path, target: Path) -> None:
    """Write the page into `target`."""
    write(target / "benchmarks.md", benchmark_page(root / "benchmarks/results", root / "benchmarks"))
