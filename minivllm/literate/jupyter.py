"""Export on save: Jupyter server hooks, a file watcher, the magic `%autoexport`."""

# Generated from nbs/literate/jupyter.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.literate.clean import cleaned
from minivllm.literate.notebook import LiterateError, find_root, notebook_paths, read_notebook
from minivllm.literate.sync import export


def pre_save_hook(model: dict[str, Any], **_: Any) -> None:
    """Jupyter server hook: clean the notebook that is about to be written."""
    if model.get("type") == "notebook" and model.get("content"):
        model["content"] = cleaned(model["content"])


def post_save_hook(os_path: str, model: dict[str, Any], **_: Any) -> None:
    """Jupyter server hook: export the notebook that was written. Raises LiterateError, which JupyterLab shows."""
    if model.get("type") == "notebook":
        export_saved(Path(os_path))


def export_saved(path: Path) -> list[str]:
    """Export one notebook of the book, if it exports anything. Returns the paths written; raises the first error."""
    root = find_root(path.parent)
    if (root / "nbs") not in path.resolve().parents:
        return []
    notebook = read_notebook(path.resolve(), root)
    written, errors = export([notebook] if notebook.module else [], root)
    if errors:
        raise errors[0]
    return written


class Watcher:
    """Exports the notebooks under `nbs/` that change on disk: a thread that looks at their times twice a second."""

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        self.root = root
        self.say = say
        self.seen = self._times()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _times(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in notebook_paths(self.root)}

    def look(self) -> None:
        """Export what changed since the last look; say what was written or what is wrong."""
        now = self._times()
        changed = [path for path in now if now[path] != self.seen.get(path)]
        self.seen = now
        for path in changed:
            try:
                for name in export_saved(path):
                    self.say(f"exported {name}")
            except (LiterateError, OSError) as error:
                self.say(str(error))

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self.look()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


_watching: list[Watcher] = []


def autoexport(line: str = "") -> None:
    """The magic `%autoexport`: export notebooks as they are saved; `%autoexport off` ends it."""
    if line.strip() not in {"", "on", "off"}:
        raise ValueError(f"%autoexport takes nothing, 'on' or 'off', not {line.strip()!r}")
    while _watching:
        _watching.pop().stop()
    if line.strip() != "off":
        _watching.append(Watcher(find_root(Path.cwd())))
        _watching[0].start()


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minivllm.literate` defines the magic `%autoexport`."""
    ipython.register_magic_function(autoexport, "line", "autoexport")


def unload_ipython_extension(ipython: Any) -> None:
    autoexport("off")
