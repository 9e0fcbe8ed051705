"""Reasoning parsers: separate thoughts from content."""

# Generated from nbs/serving/reasoning.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from minivllm.core.plugins import registering
from minivllm.sampling.grammar import special_token_ids
from minivllm.serving.tool_parsers import held_back
from minivllm.serving.tools import literal


class ReasoningParser:
    """Divides an answer into thoughts and content: make one for each answer, `push` its text, then `end`.

    For another family, write a subclass and register it with `register_reasoning_parser`.
    ``prompt``: what the answer goes on from. Its last word counts if it is a tag: templates open and close thoughts so.
    """

    start: ClassVar[str] = "<think>"
    end_mark: ClassVar[str] = "</think>"
    always: ClassVar[bool] = False
    """Whether the model thinks first even if no opening tag says so."""
    special_tokens: ClassVar[bool] = False
    """Whether the tags are special tokens, so that these must be kept in the text."""

    def __init__(self, prompt: str) -> None:
        asked = prompt.rstrip()
        skips = asked.endswith(self.end_mark)
        self.thinking: bool | None = asked.endswith(self.start) or (False if skips else self.always or None)
        """Whether what comes next is a thought; None while only the text can tell."""
        self._buffer = ""
        self._at_start = not skips

    def push(self, text: str) -> tuple[str, str]:
        """Take more of the text; returns the thoughts and the content that are certain so far."""
        self._buffer += text
        if self._at_start:
            self._look_for_start()
        if self._at_start:
            return "", ""
        if not self.thinking:
            return "", self._take(len(self._buffer))
        at = self._buffer.find(self.end_mark)
        if at < 0:
            return self._take(len(self._buffer) - held_back(self._buffer, self.end_mark)), ""
        thought = self._take(at)
        self._take(len(self.end_mark))
        self.thinking = False
        return thought, self._take(len(self._buffer))

    def end(self) -> tuple[str, str]:
        """The text is over: returns the rest."""
        rest = self._take(len(self._buffer))
        return (rest, "") if self.thinking else ("", rest)

    def _look_for_start(self) -> None:
        begun = self._buffer.lstrip()
        if begun.startswith(self.start):
            self.thinking, self._buffer = True, begun[len(self.start) :]
        elif self.start.startswith(begun):
            return  # too short to tell
        self.thinking, self._at_start = bool(self.thinking), False

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def rules(self, body: Sequence[str], tokenizer: Any) -> list[str]:
        """Lark rules for thoughts followed by a text that ``body`` allows, itself rules that begin with ``start``."""
        if self.thinking is False:
            return list(body)
        special = self.end_mark in special_token_ids(tokenizer)
        thought = f"thought{'' if special else '[lazy]'}: THOUGHT {literal(self.end_mark, tokenizer)}"
        opening = f"opened: {literal(self.start, tokenizer)} thought SPACE"
        start = "opened | thought SPACE" if self.thinking else "opened?"
        first, *others = body
        spaces = ["THOUGHT: /(.|\\n)*/", "SPACE: /\\s*/"]
        return [f"start: ({start}) body" if self.thinking else f"start: {start} body",
                first.replace("start:", "body:", 1), thought, opening, *spaces, *others]  # fmt: skip


Parser = TypeVar("Parser", bound=type[ReasoningParser])
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {}


def register_reasoning_parser(*names: str) -> Callable[[Parser], Parser]:
    """Class decorator: make a `ReasoningParser` known under these names. Raises TypeError for any other class."""
    return registering(REASONING_PARSERS, ReasoningParser, names)


@register_reasoning_parser("qwen3")
class Qwen3ReasoningParser(ReasoningParser):
    """``<think>...</think>``, if the model writes it or the prompt has opened it."""


@register_reasoning_parser("deepseek_r1")
class DeepSeekR1ReasoningParser(ReasoningParser):
    """Thoughts from the beginning, to ``</think>``: a text without the mark is all thought."""

    always = True


@register_reasoning_parser("mistral")
class MistralReasoningParser(ReasoningParser):
    """``[THINK]...[/THINK]``."""

    start, end_mark = "[THINK]", "[/THINK]"
    special_tokens = True


def tokens_up_to(mark: str, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """The length of the shortest beginning of ``token_ids`` whose text contains ``mark``; the whole text must contain it."""
    return bisect_left(range(len(token_ids)), True, key=lambda count: mark in decode(token_ids[:count]))
