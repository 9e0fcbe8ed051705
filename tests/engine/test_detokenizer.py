"""Streamed text equals the one-shot decode: random tokens, tricky strings, several kinds of tokenizers."""

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from minivllm.engine.detokenizer import (
    ByteDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
    is_byte_level,
    is_byte_token,
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


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return get_tokenizer(smollm2_path)


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
    assert is_byte_token("<0xE4>") and not any(map(is_byte_token, ["<0xE4", "<|x|>", None, "", "<tool>"]))
