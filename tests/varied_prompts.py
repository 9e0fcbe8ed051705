"""32 prompts of 1 to 600 tokens: plain text in many scripts, chat, long."""

from typing import Any

import torch

PLAIN = [
    "A",
    "Hello",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees",
    '{"name": "Ada", "age": ',
    "    indented\n\n\n\ttext ",
    "La tour Eiffel se trouve à",
    "Der schnellste Weg nach Köln führt über",
    "你好，世界。今天天气",
    "今日はとても良い天気なので、",
    "Привет, мир! Сегодня",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "שלום עולם",
    "👋🏽 👩‍👩‍👧‍👦 🏳️‍🌈 ❤️",
    "Math: ∑ᵢ xᵢ² ≤ ∞ ⇒",
    "<b>not a tag</b> & <|im_start|>",
    "e\u0301 o\u0308 combining n\u0303",
]
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "¿Cuántos días tiene un año?",
    "Translate to German: good morning 🌞",
]
LENGTHS = (37, 64, 65, 128, 200, 311, 450, 600)


def varied_prompts(tokenizer: Any) -> list[list[int]]:
    """Their token ids."""
    plain = [tokenizer.encode(text) for text in PLAIN]
    chat = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    book = tokenizer.encode("It was a bright cold day in April, and the clocks were striking thirteen. " * 60)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 200, (len(LENGTHS),), generator=generator).tolist()
    long = [book[start : start + n] for start, n in zip(starts, LENGTHS, strict=True)]
    found = plain + chat + long
    marks = len(tokenizer.encode(""))  # that each text begins with
    assert len(found) == 32 and min(map(len, found)) == 1 + marks and max(map(len, found)) == 600
    return found
