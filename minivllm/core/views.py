"""Where the core asks for the views, which import the core."""

# Generated from nbs/core/views.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

_provider: Callable[[], Any] | None = None


def provide(views: Callable[[], Any]) -> None:
    """Set the function that imports the views. It is called whenever a view is asked for."""
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
