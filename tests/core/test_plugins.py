"""Plugins by entry points: found, restricted, and skipped when they fail."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm.cli import main
from minivllm.core import plugins
from minivllm.core.policy import FCFS, POLICIES, Priority, ignores_priority, register_policy

SOURCES = {
    "pl_calls": "from minivllm.core import plugins\ncalls = []\ndef register():\n    calls.append(len(plugins.load_plugins()))\n",
    "pl_missing": "import a_package_that_nobody_has\n",
    "pl_raises": "def register():\n    raise RuntimeError('a new kind of error')\n",
    "pl_leaves": "import sys\nsys.exit(3)\n",
    "pl_value": "register = 7\n",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Five packages with a plugin each, in a process that has not looked for plugins yet."""
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package-{name}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{name} = {name}:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_plugins", None)
    monkeypatch.delenv("MINIVLLM_PLUGINS", raising=False)
    yield
    for name in SOURCES:
        sys.modules.pop(name, None)


def found() -> dict[str, plugins.Plugin]:
    return {plugin.name: plugin for plugin in plugins.load_plugins() if plugin.name in SOURCES}


def test_one_that_fails_is_named_and_skipped(installed, caplog):
    problems = {name: plugin.problem for name, plugin in found().items()}
    assert problems.pop("pl_calls") is None
    assert problems == {
        "pl_missing": "ModuleNotFoundError: No module named 'a_package_that_nobody_has'",
        "pl_raises": "RuntimeError: a new kind of error",
        "pl_leaves": "SystemExit: 3",
        "pl_value": "TypeError: 'int' object is not callable",
    }
    named = {name for name in SOURCES if f"plugin {name!r} of package-{name} 2.0 is skipped" in caplog.text}
    assert named == problems.keys()


def test_each_is_called_once_also_if_it_asks_for_plugins_itself(installed):
    import pl_calls

    first = found()
    assert found() == first and len(pl_calls.calls) == 1
    plugin = first["pl_calls"]
    assert (plugin.value, plugin.package, plugin.version) == ("pl_calls:register", "package-pl_calls", "2.0")


@pytest.mark.parametrize(
    ("value", "loaded"), [("pl_calls", {"pl_calls"}), ("", set()), (" pl_calls , other", {"pl_calls"})]
)
def test_the_environment_restricts(installed, monkeypatch, caplog, value, loaded):
    monkeypatch.setenv("MINIVLLM_PLUGINS", value)
    plugins_found = found()
    assert {name for name, plugin in plugins_found.items() if plugin.problem is None} == loaded
    assert {p.problem for n, p in plugins_found.items() if n not in loaded} == {"not in MINIVLLM_PLUGINS"}
    assert ("names 'other'" in caplog.text) == ("other" in value)


def test_the_command_lists_them(installed, capsys):
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("pl_calls")]
    assert row == ["pl_calls", "package-pl_calls", "2.0", "pl_calls:register", "loaded"]
    assert any(line.startswith("pl_raises") and "a new kind of error" in line for line in lines)


def test_a_policy_by_name():
    with pytest.raises(ValueError, match="policy 'fcfs' exists already"):
        register_policy("fcfs", FCFS)
    assert [name for name in POLICIES if not ignores_priority(name)] == ["priority"]
    assert ignores_priority(FCFS()) and not ignores_priority(Priority())
    assert not ignores_priority(type("Mine", (FCFS,), {})())
