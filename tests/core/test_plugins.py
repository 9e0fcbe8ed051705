"""Plugins by entry points: found, restricted, and skipped when they fail."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm.cli import main
from minivllm.core import plugins
from minivllm.core.policy import FCFS, POLICIES, Priority, ignores_priority, register_policy
from minivllm.models.linear.layer import TorchLinear, register_quantization

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


def registrations():
    """What each registry is filled with, and what it must refuse: an object in the place of what makes one, mostly."""
    from minivllm.attention.select import register_backend
    from minivllm.core.config import KVCacheRules, register_kv_cache_kind
    from minivllm.core.speculative import register_proposer
    from minivllm.lab.readers import register_reader
    from minivllm.lora.resolver import register_lora_resolver
    from minivllm.models.linear.layer import register_linear_method
    from minivllm.models.mixers.base import MixerSpec, register_mixer
    from minivllm.models.quantization.formats import register_format
    from minivllm.runtime.executors.select import register_executor
    from minivllm.runtime.kv_connectors import register_kv_connector
    from minivllm.sampling.transforms import register_transform
    from minivllm.serving.reasoning import register_reasoning_parser
    from minivllm.serving.tools import register_tool_parser
    from minivllm.viz import register_view

    yield register_policy, ("x", 3), "policy 'x': expected a class that inherits from Policy, or a function .*, got 3"
    yield register_policy, ("x", FCFS()), "got <.*FCFS"
    yield register_policy, ("x", dict), "inherits from Policy.*<class 'dict'>"
    yield register_policy, (3, FCFS), "the name of a policy must be text, got 3"
    yield register_backend, ("x", 3), "inherits from AttentionBackend"
    yield register_backend, ("x", "no colon"), "got 'no colon'"
    yield register_linear_method, ("x", dict), "inherits from LinearMethod"
    yield register_quantization, ("x", 3, 8), "inherits from LinearMethod"
    yield register_executor, ("x", 3), "expected a class, or a function that makes one, got 3"
    yield register_proposer, ("x", 3), "speculative method 'x': expected a class, or a function"
    yield register_lora_resolver, ("x", 3), "LoRA resolver 'x': expected"
    yield register_transform, ("x", 3), "transform 'x': expected"
    yield register_reader, ("x", len, 3), "workload format 'x': expected"
    yield register_kv_connector, ("x", dict, dict), "inherits from KVConnector"
    yield register_kv_connector, ("x", 3, 3), "worker side of KV connector 'x'"
    yield register_kv_cache_kind, ("x", KVCacheRules), "expected an object of a class that inherits from KVCacheRules"
    yield register_view, ("X", 3), "view 'X': expected the name of its module, got 3"
    yield register_mixer, (dict,), "a spec: expected a class that inherits from MixerSpec"
    yield register_mixer(MixerSpec), (dict,), "inherits from Mixer,"
    for register, base in (
        (register_format, "Format"), (register_tool_parser, "ToolParser"), (register_reasoning_parser, "ReasoningParser")
    ):  # fmt: skip
        yield register("x"), (dict,), f"x: expected a class that inherits from {base}, got <class 'dict'>"
        yield register, (dict,), f"a {base} is registered under names in parentheses"
        yield register, (), f"a {base} is registered under names in parentheses"


def test_registries_refuse_what_cannot_be_used_later():
    for register, arguments, message in registrations():
        with pytest.raises(TypeError, match=message):
            register(*arguments)
        assert "x" not in POLICIES
    with pytest.raises(ValueError, match="bits must be above 0, got 0"):
        register_quantization("x", TorchLinear, bits=0)


def test_a_policy_by_name():
    with pytest.raises(ValueError, match="policy 'fcfs' exists already"):
        register_policy("fcfs", FCFS)
    assert [name for name in POLICIES if not ignores_priority(name)] == ["priority"]
    assert ignores_priority(FCFS()) and not ignores_priority(Priority())
    assert not ignores_priority(type("Mine", (FCFS,), {})())
