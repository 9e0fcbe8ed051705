"""LoRA resolvers: find the adapter of a name that is not served yet, in a folder or on the hub."""

# Generated from nbs/lora/resolver.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from minivllm.core.plugins import register
from minivllm.lora.adapter import CONFIG, WEIGHTS, LoRARequest

logger = logging.getLogger("minivllm.lora")

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


def is_plain_name(name: str) -> bool:
    """Whether a name is a relative path in its shortest form: letters, digits and `_.=+-`, parts separated by `/`, none of which begins with a dot."""
    return len(name) <= 256 and all(_PART.fullmatch(part) for part in name.split("/"))


class LoRAResolver(Protocol):
    """Finds adapters by name. The interface is vLLM's."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of this name, or None if this resolver has none. The server gives it a number."""
        ...


class FolderResolver:
    """Adapters in the folders of one folder, by their path in it. A link that leaves the folder is refused.

    Raises:
        ValueError: there is no such folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser().resolve()
        if not self.folder.is_dir():
            raise ValueError(f"lora_resolvers: there is no folder {folder!r}")

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return await asyncio.to_thread(self._find, lora_name)

    def _find(self, name: str) -> LoRARequest | None:
        if not is_plain_name(name):
            return None
        found = (self.folder / name).resolve()
        if not found.is_relative_to(self.folder):
            logger.warning("adapter %r is refused: it is a link that leaves %s", name, self.folder)
            return None
        return LoRARequest(name, 1, str(found)) if (found / CONFIG).is_file() else None


class HubResolver:
    """Adapters of one repository of the Hugging Face hub: `owner/name`, or `owner/name/folder` for one of several in it.

    Raises:
        ValueError: the text is not of the form `owner/name`.
    """

    def __init__(self, repo: str) -> None:
        self.repo = repo
        if not is_plain_name(repo) or repo.count("/") != 1:
            raise ValueError(f"lora_resolvers: hub= needs the owner/name of a repository, got {repo!r}")

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not is_plain_name(lora_name) or not f"{lora_name}/".startswith(f"{self.repo}/"):
            return None
        return await asyncio.to_thread(self._download, lora_name)

    def _download(self, name: str) -> LoRARequest | None:
        from huggingface_hub import snapshot_download

        inside = name.removeprefix(self.repo).strip("/")
        wanted = [f"{inside}/{file}".strip("/") for file in (CONFIG, WEIGHTS)]
        try:
            folder = Path(snapshot_download(self.repo, allow_patterns=wanted)) / inside
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("the hub has not given adapter %r: %s: %s", name, type(error).__name__, error)
            return None
        return LoRARequest(name, 1, str(folder)) if (folder / CONFIG).is_file() else None


_RESOLVERS: dict[str, Callable[[str], LoRAResolver]] = {"folder": FolderResolver, "hub": HubResolver}


def register_lora_resolver(kind: str, make: Callable[[str], LoRAResolver]) -> None:
    """Let `--lora-resolvers kind=argument` name a resolver. `make`: takes the argument, and raises ValueError if it is wrong.

    Raises:
        ValueError: the name is taken.
        TypeError: `make` is neither a class nor a function.
    """
    register(_RESOLVERS, "LoRA resolver", kind, make)


def make_resolvers(given: Sequence[str]) -> list[LoRAResolver]:
    """The resolvers that texts of the form `kind=argument` name. Raises ValueError."""
    found = []
    for text in given:
        kind, _, argument = text.partition("=")
        if kind not in _RESOLVERS or not argument:
            raise ValueError(
                f"lora_resolvers: each must be kind=argument, kinds: {', '.join(_RESOLVERS)}; got {text!r}"
            )
        found.append(_RESOLVERS[kind](argument))
    return found
