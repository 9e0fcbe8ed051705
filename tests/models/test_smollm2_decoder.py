"""The decoder against transformers on the real model."""

import pytest
import torch
from paged import PagedDecoder, make_decoder

pytestmark = pytest.mark.slow

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "日本の首都は東京です。 🗼",
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def theirs(smollm2_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_logits_of_a_mixed_batch_equal_transformers(theirs, smollm2_path, backend):
    from minivllm.models.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(smollm2_path)
    prompts = {text: tokenizer(text).input_ids for text in TEXTS}
    paged = PagedDecoder(make_decoder(theirs, backend), block_size=16)
    for text, tokens in prompts.items():
        paged.add(text, tokens)
    first = paged.step({text: 3 for text in TEXTS})
    second = paged.step({text: len(prompts[text]) - 4 for text in TEXTS})
    third = paged.step({text: 1 for text in TEXTS})
    for text, tokens in prompts.items():
        with torch.inference_mode():
            want = theirs(torch.tensor([tokens])).logits[0]
        got = torch.cat((first[text], second[text], third[text]))
        assert (got - want).abs().max() < 1e-3
        assert torch.equal(got.argmax(-1), want.argmax(-1))
