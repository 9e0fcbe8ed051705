"""Tokenizer loading and chat templates."""

# Generated from nbs/models/tokenizer.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from minivllm.models.hub import EMBEDDED_MODELS, resolve_model
from minivllm.models.loading import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# tokenizer.json says everything, no class adds to it
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def get_tokenizer(
    name: str | Path, download_dir: str | Path | None = None, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer of a local folder, a model alias, or a hub id (only the tokenizer's files are downloaded).

    The result is what `transformers.AutoTokenizer` gives. Where the folder names no class, it is loaded without
    AutoTokenizer, whose import alone takes as long as everything else here.

    Raises `ValueError` if there is no tokenizer, if it is not a fast one, or if it needs code from the hub.
    """
    folder = find_tokenizer(name, download_dir, revision)
    if folder is None:
        return _load("AutoTokenizer", str(name), cache_dir=download_dir, revision=revision)
    return _load("PreTrainedTokenizerFast" if _is_generic(folder) else "AutoTokenizer", str(folder))


def find_tokenizer(
    name: str | Path, download_dir: str | Path | None = None, revision: str | None = None
) -> Path | None:
    """The folder of a tokenizer, without reading it; None for a hub id. Raises ValueError for a folder without one."""
    folder = Path(name).expanduser()
    if str(name) in EMBEDDED_MODELS or folder.suffix == ".gguf":
        folder = resolve_model(name, download_dir, revision)
    if not folder.is_dir():
        return None
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"{folder} holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    return folder


def _is_generic(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not config.is_file():
        return False
    return read_json(config).get("tokenizer_class") in GENERIC_CLASSES


def packages_distributions() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions`, from what the distributions say: no file of theirs is looked for."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = re.findall(r"(?m)^Name: *(.*?)\s*$", distribution.read_text("METADATA") or "")[:1]
        packages = set((distribution.read_text("top_level.txt") or "").split())
        if not packages:
            lines = (distribution.read_text("RECORD") or "").splitlines()
            tops = {line.partition(",")[0].strip('"').partition("/")[::2] for line in lines}
            packages = {top if below else inspect.getmodulename(top) or top for top, below in tops}
        for package in packages:
            if "." not in package and package != "__pycache__":
                found.setdefault(package, []).extend(name)
    return found


def _import_transformers() -> ModuleType:
    """Import transformers. Version 5.17, for one, asks at its import which distribution each package belongs to, which takes as long as the rest."""
    usual = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = packages_distributions
    try:
        return importlib.import_module("transformers")
    finally:
        importlib.metadata.packages_distributions = usual


def _load(loader: str, name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    transformers = _import_transformers()
    try:
        tokenizer = getattr(transformers, loader).from_pretrained(name, trust_remote_code=False, **kwargs)
    except Exception as error:  # it comes from the files, and the tokenizers library raises bare Exceptions
        raise ValueError(f"cannot load a tokenizer from {name}: {type(error).__name__}: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"{name}: {type(tokenizer).__name__} is not a fast tokenizer (no tokenizer.json); not implemented"
        )
    return tokenizer


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any
) -> tuple[str, list[int]]:
    """Render one conversation with the model's chat template; return the text and its token ids.

    `options`: see `render_chat_template`, which also says what is raised.
    """
    text = render_chat_template(tokenizer, messages, **options)
    return text, tokenizer.encode(text, add_special_tokens=False)  # the template has written bos and the like as text


def render_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """The text of one conversation.

    Args:
        messages: Dicts with `role` and `content`.
        chat_template: Replaces the model's own.
        continue_final_message: Leave the last message open, for the model to go on.
        template_kwargs: Variables that the template may use.

    Raises:
        ValueError: The model has no template, or the template refuses the messages or has no use for a variable.
        TypeError: They are not messages.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so this is a model for plain text: "
            "use generate(), or give chat_template"
        )
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other: open a new turn or go on with the last"
        )
    _check_messages(messages)
    if not _READS_PARTS.search(str(tokenizer.get_chat_template(chat_template, tools=tools))):
        messages = [_with_one_text(i, message) for i, message in enumerate(messages)]
    _check_variables(tokenizer, chat_template, template_kwargs if tools is None else template_kwargs | {"tools": tools})
    try:
        text: Any = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else list(tools),
            **template_kwargs,
        )
    except Exception as error:  # a template is a program, and may fail like one
        whose = "given" if chat_template else f"of {tokenizer.name_or_path}"
        raise ValueError(f"the chat template {whose} refuses these messages: {error}") from error
    return text


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise TypeError(f"a conversation is a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("a conversation needs at least one message, got an empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"message {i} must be a dict with a role such as 'user', got {message!r}")


_READS_PARTS = re.compile(r"""\[['"]text['"]\]|\.text\b|=\s*['"]text['"]""")
"""What a template writes to get at the text of a part of a message."""


def _with_one_text(i: int, message: dict[str, Any]) -> dict[str, Any]:
    """A content in parts as one text, as in vLLM, for a template that knows no parts."""
    if not isinstance(parts := message.get("content"), (list, tuple)):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'message {i}: this model reads text alone, in parts {{"type": "text", "text": ...}}; got {part!r}'
            )
    return {**message, "content": "\n".join(part["text"] for part in parts)}


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """The variables that a template reads from outside."""
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # Hugging Face's own tag says nothing here
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(plain)))
    except TemplateError:  # rendering will say what is wrong
        return frozenset(re.findall(r"\w+", template))


def _check_variables(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, given: dict[str, Any]) -> None:
    """A template ignores variables that it does not know, tools too: here that is an error."""
    known = _variables(str(tokenizer.get_chat_template(chat_template, tools=given.get("tools"))))
    for name in given:
        if name not in known:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} has no use for {name!r}, it would be ignored"
            )
