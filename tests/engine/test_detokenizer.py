"""Streamed text equals the one-shot decode: random tokens, tricky strings, several kinds of tokenizers."""

import functools
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from minivllm.engine.detokenizer import (
    ByteDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
    byte_of,
    is_byte_level,
)
from minivllm.models.tokenizer import get_tokenizer

TRICKY = [
    "",
    " ",
    "  leading and trailing  ",
    "你好，世界。今天天气很好。",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👋🏽 🇫🇷",
    "e\u0301 o\u0308 n\u0303 \u1e63\u0307 combining",
    "नमस्ते दुनिया مرحبا שלום ไทย",
    "\ufffd the sign itself \ufffd",
    "tab\tnew\nline\r\nend",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9d1\U0001f3fb\u200d\U0001f4bb",
    "don't , . ! ? 's",
]
CORPUS = [
    "Hello world, this is a test. 12345 it's fine!",
    "你好，世界。",
    "👩‍👩‍👧‍👦 é à ñ",
    "Привет мир",
    "नमस्ते",
    "def f(x):\n    return x\t\n",
] * 20


def streamed(detokenizer: Any, ids: list[int]) -> str:
    return "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])


def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    backend.add_tokens(
        [AddedToken("<tool>", special=False), AddedToken("café", special=False), AddedToken("日本", special=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def sentencepiece_like() -> Any:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    pieces = ["▁", "▁the", "▁cat", "ing", "▁▁", *"abcdefghijklmnopqrstuvwxyz.,", "你", "é"]
    for token in [f"<0x{b:02X}>" for b in range(256)] + pieces:
        vocab[token] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def wordpiece() -> Any:
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##ing", "##s", "play", "un", "##believ", "##able", ",", "."]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


published = functools.cache(get_tokenizer)  # Gemma's takes seconds


@pytest.fixture(scope="module")
def smollm2():
    return published("smollm2")


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def real(request):
    return published(request.param)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece_like", "wordpiece", "byt5"])
def other(request):
    makers = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like, "wordpiece": wordpiece}
    return ByT5Tokenizer() if request.param == "byt5" else makers[request.param]()


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_5000_random_sequences(smollm2, skip_special_tokens):
    factory, rng = DetokenizerFactory(smollm2), random.Random(0)
    for _ in range(5000):
        ids = [rng.randrange(len(smollm2) + 3) for _ in range(rng.randrange(1, 40))]  # three ids that no token has
        got = streamed(factory(skip_special_tokens=skip_special_tokens), ids)
        assert got == smollm2.decode(ids, skip_special_tokens=skip_special_tokens), ids


def test_random_sequences_of_bytes_only(smollm2):
    """Single-byte tokens: nearly everything is broken UTF-8."""
    factory, rng = DetokenizerFactory(smollm2), random.Random(1)
    single = [i for i in range(len(smollm2)) if len(smollm2.convert_ids_to_tokens(i)) == 1]
    for _ in range(2000):
        ids = [rng.choice(single) for _ in range(rng.randrange(1, 30))]
        assert streamed(factory(), ids) == smollm2.decode(ids), ids


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_strings(smollm2, text):
    ids = smollm2.encode(text)
    assert streamed(DetokenizerFactory(smollm2)(), ids) == text


def test_nothing_broken_is_ever_shown(smollm2):
    """Of a sound text no piece holds U+FFFD, and no piece ends inside a character."""
    for text in TRICKY:
        if "\ufffd" not in text:
            detokenizer = DetokenizerFactory(smollm2)()
            assert all("\ufffd" not in detokenizer.push(i) for i in smollm2.encode(text)), text


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_other_tokenizers(other, skip_special_tokens):
    factory, rng = DetokenizerFactory(other), random.Random(2)
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    for _ in range(300 if isinstance(other, ByT5Tokenizer) else 1500):
        ids = [rng.randrange(len(other)) for _ in range(rng.randrange(1, 30))]
        got = streamed(factory(skip_special_tokens=skip_special_tokens), ids)
        assert got == other.decode(ids, **options), ids


def test_text_goes_on_from_the_prompt():
    """The first space of an answer is lost without the prompt as context."""
    tokenizer = sentencepiece_like()
    factory = DetokenizerFactory(tokenizer)
    prompt, answer = tokenizer.convert_tokens_to_ids(["▁the"]), tokenizer.convert_tokens_to_ids(["▁cat", "."])
    assert streamed(factory(prompt), answer) == " cat."
    assert streamed(factory(), answer) == "cat."
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(259, len(tokenizer)) for _ in range(12)]
        whole, start = tokenizer.decode(ids), tokenizer.decode(ids[:5])
        assert streamed(factory(ids[:5]), ids[5:]) == whole[len(start) :]


def test_which_kind_of_detokenizer(smollm2):
    assert is_byte_level(smollm2) and isinstance(DetokenizerFactory(smollm2)(), ByteDetokenizer)
    for tokenizer in (sentencepiece_like(), wordpiece(), ByT5Tokenizer()):
        assert not is_byte_level(tokenizer) and isinstance(DetokenizerFactory(tokenizer)(), WindowDetokenizer)


def test_one_token_alone(smollm2):
    factory = DetokenizerFactory(smollm2)
    assert factory.token_text(smollm2.encode(" Paris")[0]) == " Paris"
    assert factory.token_text(smollm2.eos_token_id) == smollm2.eos_token


def test_byte_tokens():
    assert byte_of("<0xE4>") == 0xE4 and byte_of("<0x0a>") == 10
    assert [byte_of(token) for token in ("<0xZZ>", "<|x|>", "", "<tool>")] == [None] * 4


SIGNS = ["🫖", "👩‍👩‍👧‍👦", "é", "你好", "\nnext", " line", "a", "\ufffd", "𝔘𝔫𝔦"]


class Mixture:
    """Ids as a model may sample them: broken characters, special tokens, ids that no token has, and words."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        self.rng = rng
        self.spelled = tokenizer("".join(SIGNS), add_special_tokens=False).input_ids
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        bytes_ = tokenizer.convert_tokens_to_ids(["<0x41>", "<0xE2>", "<0xF0>", "<0x9F>"])
        self.kinds = [range(len(tokenizer) + 3), self.spelled, special]
        self.kinds += [bytes_] * (None not in bytes_ and tokenizer.unk_token_id not in bytes_)

    def draw(self) -> list[int]:
        at = self.rng.randrange(len(self.spelled))
        ids = [self.rng.choice(self.rng.choice(self.kinds)) for _ in range(self.rng.randrange(1, 16))]
        return self.spelled[at : at + self.rng.randrange(12)] + ids


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_a_stream_goes_on_exactly_where_the_text_of_the_prompt_ends(real, skip_special_tokens):
    """Prompt and output cut anywhere, in a character too: what is shown of both is the one-shot decode of both."""
    factory, rng = DetokenizerFactory(real), random.Random(7)
    options = {"skip_special_tokens": skip_special_tokens}
    mixture, changed = Mixture(real, rng), 0
    for _ in range(1000):
        ids = mixture.draw()
        cut = rng.randrange(len(ids) + 1)
        prompt, got = factory.settled_text(ids[:cut], **options), streamed(factory(ids[:cut], **options), ids[cut:])
        whole = real.decode(ids, clean_up_tokenization_spaces=False, **options)
        if whole.startswith(prompt):
            assert prompt + got == whole, (ids, cut)
        else:  # a byte of the output made the whole run of bytes unreadable, what the prompt has of it too
            changed += 1
            assert whole.endswith(got) and got.startswith("\ufffd"), (ids, cut)
    assert changed == 0 if factory.is_byte_level else changed < 50


@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
@pytest.mark.parametrize("known", range(1, 4))
def test_a_character_that_the_prompt_begins_is_not_lost(model, known):
    tokenizer = published(model)
    ids = tokenizer("Sign: 🫖\nnext line", add_special_tokens=False).input_ids
    cut = next(i for i in range(len(ids)) if "\ufffd" in tokenizer.decode(ids[: i + 1])) + known
    factory = DetokenizerFactory(tokenizer)
    assert factory.settled_text(ids[:cut]) + streamed(factory(ids[:cut]), ids[cut:]) == "Sign: 🫖\nnext line"


def test_every_special_token_is_skipped_and_ends_no_run_of_bytes():
    gemma = published("gemma3-270m")
    ids = gemma.convert_tokens_to_ids(["<0x41>", "<end_of_turn>", "<0xE2>"])
    assert streamed(DetokenizerFactory(gemma)(), ids) == gemma.decode(ids, skip_special_tokens=True) == "\ufffd" * 2
    outside = [ids[0], len(gemma) + 2, ids[2]]  # the model has more rows than the tokenizer has tokens
    assert streamed(DetokenizerFactory(gemma)(), outside) == "\ufffd" * 2
