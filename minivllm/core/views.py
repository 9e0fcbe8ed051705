"""Where pictures come from.

How does the core draw a run, if nothing in it may know how to draw?
"""

# Generated from nbs/core/views.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=04a281cc0aa4 module=4bf3fcbd2510

from collections.abc import Callable
from typing import Any

__all__ = ["find", "provide"]


# %% nbs/core/views.ipynb #provide
_provider: Callable[[], Any] | None = None


def provide(views: Callable[[], Any]) -> None:
    """Say where views come from: a function that imports them, and is called when one is asked for first."""
    global _provider
    _provider = views


def find(name: str) -> Any:
    """A view, or a function that makes one, by its name.

    Raises:
        ImportError: no views were provided.
    """
    if _provider is None:
        raise ImportError(
            f"{name} belongs to the views, which nobody provided: import minivllm (or call minivllm.core.views.provide)"
        )
    return getattr(_provider(), name)
