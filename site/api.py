"""The pages of the reference: one for each module, one for each package, read off the docstrings by Sphinx."""

import ast
import importlib
from pathlib import Path

from book import toctree

from minivllm.literate import write

# The packages, from the core outwards, and what each is for. A module of no package here is "around".
PACKAGES = {
    "core": "Request, block pool, KV cache, policy, scheduler, trace. Standard library and numpy alone.",
    "lab": "Workloads, cost models, simulation, replay, comparison. No torch.",
    "viz": "Views of a run: live in a notebook, in a page without a kernel, as figures.",
    "attention": "Attention over the paged cache: the protocol, and the backends.",
    "models": "One decoder for many families; loading; the tokenizer.",
    "lora": "Adapters: PEFT folders, slots, the linear layer that applies them.",
    "multimodal": "Pictures and embeddings in a prompt: inputs, processors, encoders.",
    "sampling": "Parameters, transforms of the logits, the draw.",
    "spec_decode": "Speculative decoding: proposers of draft tokens, the rejection sampler.",
    "runtime": "Input batch, model runner, executor.",
    "engine": "From prompt to text: `EngineCore`, `LLMEngine`, `LLM`, `AsyncLLM`.",
    "serving": "The OpenAI protocol, tools, reasoning, metrics; a client; batches.",
    "bench": "`minivllm bench`: throughput, latency, load on a server.",
    "commands": "What `minivllm chat`, `complete` and the others do.",
    "book": "What the chapters' exercises are checked with.",
    "literate": "The toolchain: notebooks to modules and back. Standard library alone.",
    "around": "The command line, the demonstration.",
    "kernels": "`minivllm_kernels`: kernels in numba for GPUs and CPUs, importable without torch.",
}


def modules(root: Path) -> dict[str, Path]:
    """The modules with anything in them, by name."""
    found = {}
    for package in (root / "minivllm", root / "kernels/minivllm_kernels"):
        for path in sorted(package.rglob("*.py")):
            if path.read_text(encoding="utf-8").strip():
                name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
                found[name] = path
    return found


def package_of(module: str) -> str:
    """The entry of `PACKAGES` under which a module stands."""
    top, *rest = module.split(".")
    if top == "minivllm_kernels":
        return "kernels"
    return rest[0] if rest and rest[0] in PACKAGES else "around"


def summary(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n", 1)[0].rstrip(".")


def exports_only(path: Path) -> bool:
    """Whether a module only hands on what others define: the first page of a package."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return path.name == "__init__.py" and not any(
        isinstance(node, kinds) and not node.name.startswith("__") for node in tree.body
    )


def handed_on(name: str, path: Path) -> list[tuple[str, str]]:
    """(name, module) of what a package's `__init__.py` imports and has in its `__all__`, the imports for type checkers included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = importlib.import_module(name).__all__
    return [
        (alias.name, str(node.module))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("minivllm.")
        for alias in node.names
        if alias.name in public
    ]


def module_page(name: str, path: Path, chapter: str | None) -> str:
    """The page of one module, in reStructuredText."""
    lines = [name, "=" * len(name), ""]
    if chapter is not None:
        lines += [f"Told, and exported, by :doc:`its chapter <{chapter.removesuffix('.ipynb')}>`.", ""]
    if exports_only(path) and (names := handed_on(name, path)):
        lines += ["What one imports from here:", ""]
        lines += [f"- :py:obj:`~{module}.{thing}` of :doc:`{module} </api/{module}>`" for thing, module in names]
    else:
        lines += [f".. automodule:: {name}", "   :members:"]
        if path.name == "__init__.py":  # what its `__all__` hands on from elsewhere is not this module's
            lines.append("   :ignore-module-all:")
    return "\n".join([*lines, ""])


def package_page(package: str, found: dict[str, Path]) -> str:
    """The page of a package: its modules."""
    name = {"kernels": "minivllm_kernels", "around": "Around the engine"}.get(package, f"minivllm.{package}")
    rows = [f"| [`{module}`](/api/{module}.rst) | {summary(path)} |" for module, path in found.items()]
    head = [f"# {name}", "", PACKAGES[package], "", "| module | |", "|---|---|"]
    return "\n".join([*head, *rows, "", toctree(found)])


def first_page() -> str:
    """The page of all packages."""
    rows = [f"| [{package}](/api/{package}.md) | {what} |" for package, what in PACKAGES.items()]
    return "\n".join(
        [
            "# API reference",
            "",
            "Made from the docstrings. `[source]` beside a name shows its code on this site, and every module's page names the chapter of the book",
            "that tells it. A package imports only from the packages above it in this table (`viz` and `lab` from `core` alone).",
            "",
            "| package | |",
            "|---|---|",
            *rows,
            "",
            "A first script needs `from minivllm import LLM, SamplingParams`: [`minivllm`](/api/minivllm.rst).",
            "",
            toctree(PACKAGES),
        ]
    )


def make_api(root: Path, target: Path, chapters: dict[str, str]) -> None:
    """Write the reference into `target`. `chapters`: the page of the chapter that exports each module."""
    found = modules(root)
    for name, path in found.items():
        write(target / f"{name}.rst", module_page(name, path, chapters.get(name)))
    for package in PACKAGES:
        write(
            target / f"{package}.md",
            package_page(package, {n: p for n, p in found.items() if package_of(n) == package}),
        )
    write(target / "index.md", first_page())
