"""Literate notebooks to Python modules and back: what other packages import."""

# Generated from nbs/literate/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from minivllm.literate.clean import notebook_text
from minivllm.literate.fold import method
from minivllm.literate.jupyter import load_ipython_extension, post_save_hook, pre_save_hook, unload_ipython_extension
from minivllm.literate.notebook import Notebook, joined, notebook_paths, parse_notebook, read_book, read_notebook, write

__all__ = [
    "Notebook", "joined", "load_ipython_extension", "method", "notebook_paths", "notebook_text",
    "parse_notebook", "post_save_hook", "pre_save_hook", "read_book", "read_notebook",
    "unload_ipython_extension", "write",
]  # fmt: skip
