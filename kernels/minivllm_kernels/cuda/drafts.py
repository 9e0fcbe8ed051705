"""CUDA kernels that place the tokens of a step, verify drafts and guess the next ones."""

# Generated from nbs/numba_kernels/cuda/drafts.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from typing import Any

from minivllm_kernels.cuda.planning import FIELDS, WORK_END, WORK_FIRST, WORK_PLANNED, WORK_ROW, WORK_SEQ
from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, i32, i64, kernel, kernel_maker

NOT_DRAFTED = -1  # in the places of a token that the host knows, and of a guess that was not made
THREADS = 128

PLACE_SIGNATURE = " ".join(
    ["i64* i64* i64* i32*"]  # of the tokens: ids, positions, slots to write; places behind the newest known token
    + ["i64* i32* i32*"]  # rows of the tokens; work items; the buffer that holds the block table
    + ["i32* i64* i32*"]  # of the rows: known tokens, how many they are, guesses
    + ["i32 i32 i32"]  # num_items; longest: tokens that a row has room for; k: guesses of a row
)


@kernel_maker
def place_tokens(block_size: int) -> CudaKernel:
    """Give drafted tokens their ids, positions, slots and ends of attention. Grid (ceil(items / THREADS), 1).

    The host planned them for a request whose drafts are all accepted. The token at place p of its draft (0: its newest token) really
    is p positions after the newest token that the row has.
    """
    BS, T = block_size, THREADS

    @kernel(PLACE_SIGNATURE, threads=THREADS, name=f"place_tokens_b{block_size}")
    def place(token_ids, positions, slots, places, rows, items, words, known, counts, guesses, num_items, longest, k):
        index = cuda.blockIdx.x * T + cuda.threadIdx.x
        if index >= num_items:
            return
        item = index * FIELDS
        seq, token = items[item + WORK_SEQ], items[item + WORK_ROW]
        if seq < 0 or places[token] < 0:
            return
        row, place = rows[token], places[token]
        position = counts[row] - 1 + place
        items[item + WORK_END] = min(items[item + WORK_PLANNED], i32(position + 1))
        if items[item + WORK_FIRST] == 0:  # one item of each token
            if place == 0:
                token_ids[token] = known[row * longest + position]
            else:
                token_ids[token] = max(i32(0), guesses[row * k + place - 1])
            positions[token] = position
            slots[token] = i64(words[seq + position // BS]) * BS + position % BS

    return place


@functools.cache
def guess_repeat() -> Any:
    """A device function: guess that the newest token comes again and again. See `RepeatProposer`."""

    @device
    def guess(known, at, count, guesses, first, k, best, ends):
        for i in range(cuda.threadIdx.x, k, THREADS):
            guesses[first + i] = known[at + count - 1]

    return guess


@functools.cache
def guess_ngram(shortest: int, longest: int) -> Any:
    """A device function: what followed the longest n-gram at its last place. See `NgramProposer`."""
    SHORTEST, LONGEST, T = shortest, longest, THREADS

    @device
    def guess(known, at, count, guesses, first, k, best, ends):
        tid = cuda.threadIdx.x
        size = i32(0)  # of the longest match so far, and where it ends
        end = i32(0)
        for place in range(tid, count - 1, T):
            n = i32(0)
            while n < LONGEST and n <= place and known[at + place - n] == known[at + count - 1 - n]:
                n += i32(1)
            if n >= size:
                size = n
                end = i32(place)
        best[tid] = size
        ends[tid] = end
        cuda.syncthreads()
        for other in range(T):
            if best[other] > size or (best[other] == size and ends[other] > end):
                size = best[other]
                end = ends[other]
        period = i32(count) - 1 - end
        for i in range(tid, k, T):
            guesses[first + i] = i32(NOT_DRAFTED)
            if size >= SHORTEST:
                guesses[first + i] = known[at + end + 1 + i % period]

    return guess


VERIFY_SIGNATURE = " ".join(
    ["i64* i64* i32*"]  # tokens, and the guesses that they confirm or not; requests
    + ["i32* i64* i32* i32*"]  # of the rows: known tokens, how many they are, guesses, luck
    + ["i32 i32 i32 i32"]  # longest, k: as in `place_tokens`; synthetic, 0 for exact acceptance; vocab_size
)


@kernel_maker
def verify_drafts(lookup: tuple[int, int] | None) -> CudaKernel:
    """Accept guesses as long as the model chose the same tokens, append what it chose, and guess the next tokens. Grid (requests, 1).

    tokens: int64 [T], the model's choice at each place. drafts: int64 [T], gets the guess that each was compared with, or `NOT_DRAFTED`.
    requests: int32 [B, 3]: the row, or -1 for none; the first of its tokens; how many guesses follow it. luck: int32 [rows, longest], for synthetic
    acceptance: 1 at n if a guess after n tokens is accepted. lookup: shortest and longest n-gram to guess by; None to repeat the newest
    token.
    """
    T = THREADS
    guess, name = (guess_repeat(), "repeat") if lookup is None else (guess_ngram(*lookup), "ngram{}_{}".format(*lookup))

    @kernel(VERIFY_SIGNATURE, threads=THREADS, name=f"verify_drafts_{name}")
    def verify(tokens, drafts, requests, known, counts, guesses, luck, longest, k, synthetic, vocab):
        best = cuda.shared.array(T, i32)
        ends = cuda.shared.array(T, i32)
        total = cuda.shared.array(1, i32)
        b = cuda.blockIdx.x * 3
        row, first, drafted = requests[b], requests[b + 1], requests[b + 2]
        if row < 0:
            return
        if cuda.threadIdx.x == 0:
            count = counts[row]
            chance = i64(row) * longest + count
            going = True
            for place in range(drafted + 1):
                draft = i64(NOT_DRAFTED)
                if place < drafted:
                    draft = i64(guesses[row * k + place])
                drafts[first + place] = draft
                if synthetic != 0 and draft >= 0:
                    tokens[first + place] = draft
                    if luck[chance + place] == 0:
                        tokens[first + place] = (draft + 1) % vocab
                token = tokens[first + place]
                if going:
                    known[i64(row) * longest + count] = i32(max(token, i64(0)))
                    count += 1
                    going = draft >= 0 and token == draft
            counts[row] = count
            total[0] = i32(count)
        cuda.syncthreads()
        guess(known, i64(row) * longest, total[0], guesses, i64(row) * k, k, best, ends)

    return verify
