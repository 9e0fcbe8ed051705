"""Incremental detokenization: UTF-8 safe, byte-level BPE and windowed."""

# Generated from nbs/engine/detokenizer.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import codecs
import json
import os.path
import re
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = [
    "ByteDetokenizer", "Detokenizer", "DetokenizerFactory", "WindowDetokenizer", "byte_alphabet", "byte_of",
    "is_byte_level",
]  # fmt: skip


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as in GPT-2's byte-level BPE: printable Latin-1 is itself, the rest is moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that `skip_special_tokens` drops: all that were added as special, not only those with a role (bos, eos, ...)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it adds to the text, for a byte-level tokenizer; entries are made on first use."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        super().__init__()
        self.backend = tokenizer.backend_tokenizer
        self.alphabet = byte_alphabet()
        self.skipped = special_token_ids(tokenizer) if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self.skipped else self.backend.id_to_token(token_id)
        if token is None:
            piece = b""
        elif all(char in self.alphabet for char in token):
            piece = bytes(self.alphabet[char] for char in token)
        else:
            piece = token.encode()
        self[token_id] = piece
        return piece


class Detokenizer(Protocol):
    """Turns tokens into text as they come.

    The pieces of ``push`` and the last ``flush``, joined, are the one-shot decode. With a prompt they continue its text, and begin
    with the character that it leaves unfinished, if there is one: see `DetokenizerFactory.settled_text`.
    """

    def push(self, token_id: int) -> str:
        """Text that became certain with this token (often a word, sometimes nothing)."""
        ...

    def flush(self) -> str:
        """The text still held back; call it once, at the end."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: a table lookup and an incremental UTF-8 decoder."""

    def __init__(self, pieces: TokenBytes, prompt_token_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = pieces[token_id] + tail
            if len(tail) >= 3:  # an unfinished character has at most three bytes
                break
        self._decode(tail)

    def push(self, token_id: int) -> str:
        return self._decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other tokenizer: decode a window of the last tokens and show what is new (the idea of TGI and vLLM).

    Args:
        tokenizer: any Hugging Face tokenizer.
        prompt_token_ids: its last tokens are the first context of the window.
        special: the ids that ``skip_special_tokens`` drops, if they are known already.
        decode_options: for ``tokenizer.decode``.

    Attributes:
        num_settled: tokens of the prompt before a character that it leaves unfinished.
    """

    CONTEXT = 6

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int] = (),
        special: frozenset[int] | None = None,
        **decode_options: Any,
    ) -> None:
        self._tokenizer, self._options = tokenizer, decode_options
        skip = decode_options.get("skip_special_tokens", True)
        self._skipped = (special_token_ids(tokenizer) if special is None else special) if skip else frozenset()
        context, run = self._last_tokens(prompt_token_ids)
        unfinished = _num_unfinished(bytes(run.values()))
        self.num_settled = list(run)[-unfinished] if unfinished else len(prompt_token_ids)
        self._window = [*context, *(prompt_token_ids[at] for at in run)]
        self._read = len(self._window) - unfinished
        self._shown = self.decode(self._window[: self._read])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, **self._options) if token_ids else ""

    def _token(self, token_id: int) -> str | None:
        """Its vocabulary entry; None if it has no text: such a token does not even end a run of bytes."""
        return None if token_id in self._skipped else self._tokenizer.convert_ids_to_tokens(token_id)

    def push(self, token_id: int) -> str:
        if (token := self._token(token_id)) is None:
            return ""
        self._window.append(token_id)
        if byte_of(token) is not None:
            return ""
        text = self.decode(self._window)
        piece = _after(self._shown, text)
        if not piece or text.endswith("\ufffd"):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = self.decode(self._window)
        return piece

    def flush(self) -> str:
        return _after(self._shown, self.decode(self._window))

    def _last_tokens(self, token_ids: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """The last tokens that have text: CONTEXT of them, and {place: byte} of the whole run of byte tokens after those."""
        context: list[int] = []
        run: dict[int, int] = {}
        for at in range(len(token_ids) - 1, -1, -1):
            if (token := self._token(token_ids[at])) is None:
                continue
            if not context and (byte := byte_of(token)) is not None:
                run[at] = byte
                continue
            context.append(token_ids[at])
            if len(context) == self.CONTEXT:
                break
        return context[::-1], dict(reversed(run.items()))


def byte_of(token: str) -> int | None:
    """The byte that a vocabulary entry such as ``<0xE4>`` spells; None for any other entry."""
    return int(token[3:5], 16) if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) else None


def _num_unfinished(data: bytes) -> int:
    """How many bytes at the end begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def _after(shown: str, text: str) -> str:
    """What ``text`` has after ``shown``, or, if a byte has changed what was shown, from the first difference on."""
    return text[len(os.path.commonprefix([shown, text])) :]


class DetokenizerFactory:
    """Makes one detokenizer per request and remembers, per tokenizer, what they share."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.is_byte_level = is_byte_level(tokenizer)
        self.special = special_token_ids(tokenizer)
        self._tables: dict[bool, TokenBytes] = {}
        self._texts: dict[int, str] = {}

    def __call__(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        if self.is_byte_level:
            return ByteDetokenizer(self._table(skip_special_tokens), prompt_token_ids)
        options: dict[str, Any] = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if not getattr(self.tokenizer, "is_fast", False):  # only tokenizers in Python know this option
            options["spaces_between_special_tokens"] = spaces_between_special_tokens
        return WindowDetokenizer(self.tokenizer, prompt_token_ids, self.special, **options)

    def _table(self, skip_special_tokens: bool) -> TokenBytes:
        if skip_special_tokens not in self._tables:
            self._tables[skip_special_tokens] = TokenBytes(self.tokenizer, skip_special_tokens)
        return self._tables[skip_special_tokens]

    def settled_text(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a prompt up to a character that it leaves unfinished: what a stream after it continues."""
        if self.is_byte_level:
            table = self._table(skip_special_tokens)
            return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(table[i] for i in prompt_token_ids))
        window = self(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(window, WindowDetokenizer)
        return window.decode(prompt_token_ids[: window.num_settled])

    def token_text(self, token_id: int) -> str:
        """One token alone as text, as logprobs show it; pieces of a character are U+FFFD."""
        if token_id not in self._texts:
            self._texts[token_id] = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return self._texts[token_id]


def is_byte_level(tokenizer: Any) -> bool:
    """Whether the tokenizer decodes by GPT-2's byte alphabet and nothing else."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps] == ["ByteLevel"]
