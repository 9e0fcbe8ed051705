"""When does a token become text?

The model gives one token at a time.
"""

# Generated from nbs/engine/detokenizer.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=57273daf31bc module=7a3cb71ef350

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = [
    "ByteDetokenizer",
    "Detokenizer",
    "DetokenizerFactory",
    "TokenBytes",
    "WindowDetokenizer",
    "byte_alphabet",
    "is_byte_level",
    "is_byte_token",
]


# %% nbs/engine/detokenizer.ipynb #byte_alphabet
def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as in GPT-2's byte-level BPE: printable Latin-1 is itself, the rest is moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


# %% nbs/engine/detokenizer.ipynb #TokenBytes
class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it adds to the text, for a byte-level tokenizer; entries are made on first use."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        super().__init__()
        self.backend = tokenizer.backend_tokenizer
        self.alphabet = byte_alphabet()
        added = self.backend.get_added_tokens_decoder()
        self.skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = piece = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        token = None if token_id in self.skipped else self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if all(char in self.alphabet for char in token):
            return bytes(self.alphabet[char] for char in token)
        return token.encode()


# %% nbs/engine/detokenizer.ipynb #Detokenizer
class Detokenizer(Protocol):
    """Turns tokens into text as they come. The pieces of ``push`` and the last ``flush``, joined, are the one-shot decode."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token (often a word, sometimes nothing)."""
        ...

    def flush(self) -> str:
        """The text still held back; call it once, at the end."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: a table lookup and an incremental UTF-8 decoder."""

    def __init__(self, pieces: TokenBytes) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


# %% nbs/engine/detokenizer.ipynb #WindowDetokenizer
class WindowDetokenizer:
    """For every other tokenizer: decode a window of the last tokens and show what is new (the idea of TGI and vLLM).

    ``prompt_token_ids``: the prompt; its last tokens are the first context of the window.
    """

    CONTEXT = 6

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int] = (), **decode_options: Any) -> None:
        self._tokenizer = tokenizer
        self._options = decode_options
        skip = decode_options.get("skip_special_tokens", True)
        self._skipped = set(tokenizer.all_special_ids) if skip else set()
        self._window = list(prompt_token_ids[-self.CONTEXT :])
        self._shown = self._decode()
        self._read = len(self._window)
        self._in_byte_run = False

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, **self._options) if self._window else ""

    # %% nbs/engine/detokenizer.ipynb #WindowDetokenizer-push
    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        if token_id not in self._skipped:
            self._in_byte_run = is_byte_token(self._tokenizer.convert_ids_to_tokens(token_id))
        if self._in_byte_run:
            return ""
        text = self._decode()
        piece = text[len(self._shown) :]
        if not piece or text.endswith("\ufffd"):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = self._decode()
        return piece

    # %% nbs/engine/detokenizer.ipynb #WindowDetokenizer-flush
    def flush(self) -> str:
        return self._decode()[len(self._shown) :]


# %% nbs/engine/detokenizer.ipynb #is_byte_token
def is_byte_token(token: str | None) -> bool:
    """Whether a vocabulary entry spells one byte, such as ``<0xE4>``."""
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


# %% nbs/engine/detokenizer.ipynb #DetokenizerFactory
class DetokenizerFactory:
    """Makes one detokenizer a request and remembers, per tokenizer, what they share."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.is_byte_level = is_byte_level(tokenizer)
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
            return ByteDetokenizer(self._table(skip_special_tokens))
        options: dict[str, Any] = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if not getattr(self.tokenizer, "is_fast", False):  # only tokenizers in Python know this option
            options["spaces_between_special_tokens"] = spaces_between_special_tokens
        return WindowDetokenizer(self.tokenizer, prompt_token_ids, **options)

    def _table(self, skip_special_tokens: bool) -> TokenBytes:
        if skip_special_tokens not in self._tables:
            self._tables[skip_special_tokens] = TokenBytes(self.tokenizer, skip_special_tokens)
        return self._tables[skip_special_tokens]

    def token_text(self, token_id: int) -> str:
        """One token alone as text, as logprobs show it; pieces of a character are U+FFFD."""
        if token_id not in self._texts:
            self._texts[token_id] = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return self._texts[token_id]


# %% nbs/engine/detokenizer.ipynb #is_byte_level
def is_byte_level(tokenizer: Any) -> bool:
    """Whether the tokenizer decodes by GPT-2's byte alphabet and nothing else."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps] == ["ByteLevel"]
