"""Imports run downhill only: the arrows of the house, read from the source, and what an import really loads."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMERIC = {"attention", "models", "sampling"}

# Part of the package -> the parts that it may import, besides itself. `minivllm_kernels` is the other package.
DOWNHILL: dict[str, set[str]] = {
    "core": set(),
    "book": {"core", "viz", "minivllm_kernels"},  # puzzles run kernels
    "lab": {"core"},
    "viz": {"core", "lab"},
    "attention": {"core", "minivllm_kernels"},
    "models": {"core", "attention", "minivllm_kernels"},
    "sampling": {"core"},
    "lora": {"core", "models", "minivllm_kernels"},
    "multimodal": {"core", "attention", "models"},
    "spec_decode": {"core", *NUMERIC},
    "runtime": {"core", *NUMERIC, "lora", "multimodal", "spec_decode", "minivllm_kernels"},  # the CPU's features
    "engine": {"core", *NUMERIC, "lora", "multimodal", "spec_decode", "runtime"},
    "serving": {"core", *NUMERIC, "lora", "multimodal", "runtime", "engine", "viz"},  # its dashboard
    "bench": {"core", "lab", *NUMERIC, "lora", "runtime", "engine", "serving"},
    "minivllm_kernels": set(),
    "literate": set(),  # works where nothing is installed
}
TOP = {"__init__", "cli", "commands", "demo"}  # these may import every part
TORCH_FREE = {"core", "lab", "book", "literate", "minivllm_kernels"}
KERNEL_DOORS = {  # of attention, models and lora: an AttentionBackend, a LayerOps and a LinearMethod alone
    *("minivllm.attention.numba_cpu", "minivllm.attention.numba_cuda"),
    *("minivllm.models.ops.numba_cpu", "minivllm.models.ops.states_cpu", "minivllm.models.ops.captured"),
    *("minivllm.models.linear.cpu", "minivllm.models.linear.quantized", "minivllm.models.linear.cuda"),
    "minivllm.lora.linear",
}
TORCH_DOOR = {"minivllm_kernels.cuda.ops"}  # the kernels behind torch calls; nothing else of the kernels may need it
HEAVY = {"torch", "transformers", "tokenizers", "huggingface_hub"}
# besides the standard library; pandas, pyarrow and ray when asked for
CORE_MAY_IMPORT = {"numpy", "pandas", "pyarrow", "ray", "minivllm"}


def modules() -> list[Path]:
    return sorted([*(ROOT / "minivllm").glob("**/*.py"), *(ROOT / "kernels").glob("**/*.py")])


def part_of(name: str) -> str:
    """`minivllm.core.request` -> `core`; `minivllm` -> `__init__`; `minivllm_kernels.x` -> `minivllm_kernels`."""
    package, *rest = name.split(".")
    return package if package == "minivllm_kernels" else rest[0] if rest else "__init__"


def name_of(path: Path) -> str:
    base = ROOT / "kernels" if path.is_relative_to(ROOT / "kernels") else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST, name: str) -> set[str]:
    """Full names of the modules that a module imports, anywhere in it, by statements or by strings; a relative import counts as one of its package."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(name.split(".")[: -node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            found |= {f"{source}.{alias.name}" for alias in node.names} if source == "minivllm" else {source}
    return found | imported_by_strings(tree)


IMPORTERS = {"import_module", "__import__", "find_spec"}


def imported_by_strings(tree: ast.AST) -> set[str]:
    """Modules of ours that are named in strings (`"minivllm.x.y"`, `"minivllm.x:name"`, `f"minivllm.x.{y}"`), where something is imported by its name."""
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called}
    if not names & IMPORTERS:
        return set()
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {
        match.group(1)
        for text in strings
        if (match := re.fullmatch(r"(minivllm(?:_kernels)?(?:\.\w+)*)\.?(?::\w+)?", text))
    }
    return named - {"minivllm", "minivllm_kernels"}


def graph() -> dict[str, set[str]]:
    """Which module imports which, of ours."""
    paths = {name_of(path): path for path in modules()}
    edges = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text())
        submodules = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        edges[name] = (imported(tree, name) | submodules) & paths.keys() - {name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules each of which imports, directly or not, all the others of its group."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen, todo = set[str](), [start]
        while todo:
            for other in edges[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        reach[start] = seen
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in edges if name in reach[name]
    }
    return sorted(map(set, groups), key=sorted)


def violations(path: Path, source: str) -> list[str]:
    """The imports of a module that run uphill."""
    name = name_of(path)
    part = part_of(name)
    if part in TOP:
        return []
    wrong = []
    for target in sorted(imported(ast.parse(source), name)):
        ours = target.split(".")[0] in {"minivllm", "minivllm_kernels"}
        if ours and part_of(target) not in DOWNHILL[part] | {part}:
            wrong.append(f"{name} imports {target}")
        if (
            part in {"attention", "models", "lora"}
            and part_of(target) == "minivllm_kernels"
            and name not in KERNEL_DOORS
        ):
            wrong.append(f"{name} imports {target}, and is none of the doors to the kernels")
        if part in TORCH_FREE and name not in TORCH_DOOR and target.split(".")[0] in HEAVY:
            wrong.append(f"{name} imports {target}, which is not light")
        if part in {"core", "lab"} and target.split(".")[0] not in CORE_MAY_IMPORT | sys.stdlib_module_names:
            wrong.append(f"{name} imports {target}: the core is the standard library and numpy")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=lambda path: name_of(path))
def test_imports_run_downhill(path):
    part = part_of(name_of(path))
    assert part in DOWNHILL or part in TOP, f"the house has no room called {part}: add it to DESIGN and to this test"
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("minivllm/core/x.py", "import json, numpy as np\nfrom minivllm.core.request import Request", 0),
        ("minivllm/core/x.py", "from minivllm.engine.llm import LLM", 1),
        ("minivllm/core/x.py", "def f():\n    from minivllm import engine", 1),
        ("minivllm/core/x.py", "from ..sampling import params", 1),
        ("minivllm/core/x.py", "from . import request", 0),
        ("minivllm/core/x.py", "def f():\n    import torch", 2),
        ("minivllm/core/x.py", "import tqdm", 1),
        ("minivllm/sampling/x.py", "import torch\nimport minivllm.runtime.model_runner", 1),
        ("minivllm/engine/x.py", "from minivllm_kernels import decode", 1),
        ("minivllm/attention/x.py", "from minivllm_kernels import decode", 1),
        ("minivllm/attention/numba_cuda.py", "from minivllm_kernels import decode", 0),
        ("minivllm/models/decoder.py", "def f():\n    from minivllm_kernels.cpu import program", 1),
        ("minivllm/models/ops/numba_cpu.py", "from minivllm_kernels.cpu import program", 0),
        ("minivllm/sampling/x.py", "from minivllm_kernels.cpu import program", 1),
        ("kernels/minivllm_kernels/x.py", "from minivllm.core.request import Request\nimport torch", 2),
        ("minivllm/cli.py", "from minivllm.engine.llm import LLM", 0),
        ("minivllm/core/x.py", 'import importlib\nimportlib.import_module("minivllm.viz.page")', 1),
        ("minivllm/core/x.py", 'from importlib import import_module\nimport_module(f"minivllm.viz.{name}")', 1),
        ("minivllm/core/x.py", '__import__("minivllm.viz")', 1),
        ("minivllm/core/x.py", 'HOMES = {"a": "minivllm.engine.llm:LLM"}\nimport_module(HOMES["a"])', 1),
        ("minivllm/core/x.py", 'words = "see minivllm.viz"', 0),
    ],
)
def test_the_law_sees_an_arrow_that_runs_up(module, source, count):
    assert len(violations(ROOT / module, source)) == count


# Circles that are still there. Take out what is solved; add none.
KNOWN_CIRCLES = [
    {"minivllm_kernels.cpu.attention", "minivllm_kernels.cpu.tile_attention"},
    {
        "minivllm.models.cpu_linear",
        "minivllm.models.cpu_quantized",
        "minivllm.models.gpu_linear",
        "minivllm.models.linear",
    },
    {"minivllm.models.cpu_pointwise", "minivllm.models.layers"},
    {"minivllm.models.cpu_step", "minivllm.models.decoder"},
]


def test_no_modules_import_each_other():
    """Neither at the top of a module nor inside a function nor by name."""
    new = [group for group in circles(graph()) if not any(group <= known for known in KNOWN_CIRCLES)]
    assert new == []


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [{"a", "b", "c"}]


MOST_LINES = {"minivllm": 80, "minivllm_kernels": 120}  # of a function
# Functions that are still longer, and how long they may be at most. Take out what is shorter now; add none.
LONG_FUNCTIONS = {
    "minivllm.core.config.resolve": 91,
    "minivllm_kernels.cuda.decode.decode_mma": 260,
    "minivllm_kernels.cuda.decode.mma_split_kv": 344,
    "minivllm_kernels.cuda.prefill.mma_tiles": 223,
}


def long_functions(name: str, tree: ast.AST) -> dict[str, int]:
    lengths = {
        f"{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {function: lines for function, lines in lengths.items() if lines > MOST_LINES[name.split(".")[0]]}


def test_functions_are_short():
    found: dict[str, int] = {}
    for path in modules():
        found |= long_functions(name_of(path), ast.parse(path.read_text()))
    assert {name: lines for name, lines in found.items() if lines > LONG_FUNCTIONS.get(name, 0)} == {}


def test_the_folder_kernels_is_no_package():
    """Hugging Face has a package of that name, and transformers imports it."""
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels/__init__.py").exists()


def test_notebooks_do_not_run_beside_a_folder_called_kernels():
    assert [path for path in (ROOT / "nbs").glob("**/kernels") if path.is_dir()] == []


def loaded_by(statements: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter has loaded after some statements."""
    code = f"import sys\n{statements}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def importing(*parts: str) -> str:
    return "\n".join(f"import {name_of(path)}" for path in modules() if part_of(name_of(path)) in parts)


@pytest.mark.parametrize("part", ["core", "lab", "literate"])
def test_light_parts_load_nothing_heavy(part):
    """Neither torch nor pandas: frames and files of traces are imported when they are asked for."""
    assert loaded_by(importing(part)) & (HEAVY | {"pandas", "pyarrow", "matplotlib"}) == set()


def test_the_package_itself_is_lazy():
    assert loaded_by("import minivllm") & (HEAVY | {"numpy"}) == set()


def test_kernels_load_no_torch():
    statements = [line for line in importing("minivllm_kernels").splitlines() if line.split()[1] not in TORCH_DOOR]
    assert statements
    assert loaded_by("\n".join(statements)) & (HEAVY | {"minivllm"}) == set()


def test_the_public_names_exist():
    import minivllm

    assert {name: getattr(minivllm, name).__name__ for name in minivllm.__all__ if name != "__version__"} == {
        name: name for name in minivllm.__all__ if name != "__version__"
    }
    assert set(minivllm.__all__) <= set(dir(minivllm))


def test_an_unknown_name_says_what_there_is():
    import minivllm

    with pytest.raises(AttributeError, match="module 'minivllm' has no attribute 'LLMM'; it has LLM"):
        _ = minivllm.LLMM


def test_no_folder_of_notebooks_hides_a_package():
    """A notebook's own folder is searched first: a folder `nbs/kernels` there would be imported by transformers as its own."""
    folders = {path.name for path in (ROOT / "nbs").iterdir() if path.is_dir() and path.name.isidentifier()}
    installed = {name for names in packages_distributions().items() for name in names[:1]}
    assert folders & ({"kernels", "minivllm", "minivllm_kernels"} | installed | sys.stdlib_module_names) == set()
