"""CUDA kernels for recurrences (convolution, SSD, selective scan, delta rule) on states in a cache."""

# Generated from nbs/numba_kernels/cuda/scan.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from minivllm_kernels.cuda.simt import (
    LOG2E,
    CudaKernel,
    cuda,
    device,
    f32,
    group_sum,
    i32,
    i64,
    kernel,
    kernel_maker,
    warp_sum,
)
from minivllm_kernels.cuda.warp import exp2

SEQUENCES = "f32* i64 i64* i64* i64*"
"""The last arguments of each: the states of block 0; numbers from one block to the next; the blocks that each sequence reads (-1: none,
its state is 0) and writes, and its first token, and the end of the last."""
THREADS = 128


@device
def kept(log_decay):
    """The share of a state that is kept: e**log_decay, by the hardware's exp2."""
    return exp2(log_decay * f32(LOG2E))


CONV_SIGNATURE = f"f32* f32* f32* f32* i32 {SEQUENCES}"
"""out and u [T, channels], weight [taps, channels], bias [channels]; channels."""


@kernel_maker
def conv(taps: int) -> CudaKernel:
    """A causal convolution of each channel, whose last inputs a thread keeps. Grid (sequences, ceil(channels / THREADS))."""
    K, BEFORE = taps, max(taps - 1, 1)

    @kernel(CONV_SIGNATURE, THREADS, f"conv_k{K}")
    def step(out, u, weight, bias, channels, states, stride, read, write, begins):
        s, c = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if c >= channels:
            return
        before = cuda.local.array(BEFORE, f32)
        for j in range(K - 1):
            before[j] = f32(0.0)
            if read[s] >= 0:
                before[j] = states[read[s] * stride + j * channels + c]
        for t in range(begins[s], begins[s + 1]):
            new = u[t * channels + c]
            y = bias[c] + new * weight[(K - 1) * channels + c]
            for j in range(K - 1):
                y += before[j] * weight[j * channels + c]
            for j in range(K - 2):
                before[j] = before[j + 1]
            before[BEFORE - 1] = new
            out[t * channels + c] = y
        for j in range(K - 1):
            states[write[s] * stride + j * channels + c] = before[j]

    return step


SELECTIVE_SIGNATURE = f"f32* f32* f32* f32* f32* f32* f32* i32 {SEQUENCES}"
"""out, x and step sizes [T, channels], A [N, channels], B and C [T, N], D [channels]; channels. States are [N, channels]."""


@kernel_maker
def selective(state_size: int) -> CudaKernel:
    """The selective scan. A thread has a channel's state in its registers. Grid (sequences, ceil(channels / THREADS))."""
    N = state_size

    @kernel(SELECTIVE_SIGNATURE, THREADS, f"selective_n{N}")
    def step(out, x, dt, a, b, c, d, channels, states, stride, read, write, begins):
        s, i = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if i >= channels:
            return
        state = cuda.local.array(N, f32)
        for n in range(N):
            state[n] = f32(0.0)
            if read[s] >= 0:
                state[n] = states[read[s] * stride + n * channels + i]
        for t in range(begins[s], begins[s + 1]):
            size, value = dt[t * channels + i], x[t * channels + i]
            y = d[i] * value
            for n in range(N):
                state[n] = state[n] * kept(size * a[n * channels + i]) + size * value * b[t * N + n]
                y += state[n] * c[t * N + n]
            out[t * channels + i] = y
        for n in range(N):
            states[write[s] * stride + n * channels + i] = state[n]

    return step


SSD_SIGNATURE = f"f32* f32* f32* f32* f32* f32* f32* i32 i32 {SEQUENCES}"
"""out and x [T, heads, P], step sizes [T, heads], A [heads], B and C [T, groups, N], D [heads]; heads; groups. States are [heads, P, N]."""


@kernel_maker
def ssd(head_dim: int, state_size: int) -> CudaKernel:
    """SSD, token by token. A warp has a row of a head's state in its registers. Grid (sequences, heads)."""
    if state_size % 32:
        raise ValueError(f"state_size {state_size}: a row of a state is divided among 32 lanes")
    P, N, EACH, WARPS = head_dim, state_size, state_size // 32, THREADS // 32

    @kernel(SSD_SIGNATURE, THREADS, f"ssd_p{P}_n{N}")
    def step(out, x, dt, a, b, c, d, heads, groups, states, stride, read, write, begins):
        s, h = cuda.blockIdx.x, cuda.blockIdx.y
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        state = cuda.local.array(EACH, f32)
        for p in range(warp, P, WARPS):
            at = i64(h * P + p) * N + lane
            for i in range(EACH):
                state[i] = f32(0.0)
                if read[s] >= 0:
                    state[i] = states[read[s] * stride + at + 32 * i]
            for t in range(begins[s], begins[s + 1]):
                size, value, y = dt[t * heads + h], x[(t * heads + h) * P + p], f32(0.0)
                decay, row = kept(size * a[h]), (t * groups + h // (heads // groups)) * N + lane
                for i in range(EACH):
                    state[i] = state[i] * decay + size * value * b[row + 32 * i]
                    y += state[i] * c[row + 32 * i]
                y = warp_sum(y)
                if lane == 0:
                    out[(t * heads + h) * P + p] = y + d[h] * value
            for i in range(EACH):
                states[write[s] * stride + at + 32 * i] = state[i]

    return step


CHUNK = 16
"""Tokens of a chunk of `ssd_chunks`."""


@kernel_maker
def ssd_chunks(head_dim: int, state_size: int) -> CudaKernel:
    """SSD, chunk by chunk. Four threads have a row of a head's state in their registers, and B, C and what a token reads of
    another are in shared memory. Grid (sequences, heads)."""
    if head_dim % 8 or head_dim > 256 or state_size % 4 or state_size > 256:
        raise ValueError(f"head_dim {head_dim} must be a multiple of 8, state_size {state_size} of 4, both up to 256")
    P, N, EACH, ALL, T = head_dim, state_size, state_size // 4, 4 * head_dim, CHUNK
    ROWS, PAIRS = CHUNK * state_size, CHUNK * CHUNK
    sum_of_four = group_sum(4)

    @kernel(SSD_SIGNATURE, ALL, f"ssd_chunks_p{P}_n{N}")
    def scan(out, x, dt, a, b, c, d, heads, groups, states, stride, read, write, begins):
        s, h, tid = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        p, part, g = tid // 4, tid % 4, h // (heads // groups)
        bs = cuda.shared.array(ROWS, f32)
        cs = cuda.shared.array(ROWS, f32)
        reads = cuda.shared.array(PAIRS, f32)
        total = cuda.shared.array(T, f32)
        added = cuda.shared.array(T, f32)
        state = cuda.local.array(EACH, f32)
        at = i64(h * P + p) * N + part
        for i in range(EACH):
            state[i] = f32(0.0)
            if read[s] >= 0:
                state[i] = states[read[s] * stride + at + 4 * i]
        for start in range(begins[s], begins[s + 1], T):
            count = i32(min(begins[s + 1] - start, T))
            for e in range(tid, count * N, ALL):
                row = ((start + e // N) * groups + g) * N + e % N
                bs[e], cs[e] = b[row], c[row]
            if tid == 0:
                log_decay = f32(0.0)
                for t in range(count):
                    log_decay += dt[(start + t) * heads + h] * a[h]
                    total[t] = log_decay
            cuda.syncthreads()
            last = total[count - 1]
            if tid < count:
                added[tid] = kept(last - total[tid]) * dt[(start + tid) * heads + h]
            for e in range(tid, count * T, ALL):
                t, r = e // T, e % T  # what token t reads of what token r adds
                if r <= t:
                    dot = f32(0.0)
                    for n in range(N):
                        dot += cs[t * N + n] * bs[r * N + n]
                    reads[e] = dot * kept(total[t] - total[r]) * dt[(start + r) * heads + h]
            cuda.syncthreads()
            for t in range(count):
                y = f32(0.0)
                for i in range(EACH):
                    y += state[i] * cs[t * N + part + 4 * i]
                y = sum_of_four(y) * kept(total[t])
                for r in range(t + 1):
                    y += reads[t * T + r] * x[((start + r) * heads + h) * P + p]
                if part == 0:
                    value = x[((start + t) * heads + h) * P + p]
                    out[((start + t) * heads + h) * P + p] = y + d[h] * value
            for i in range(EACH):
                state[i] *= kept(last)
            for r in range(count):
                value = added[r] * x[((start + r) * heads + h) * P + p]
                for i in range(EACH):
                    state[i] += value * bs[r * N + part + 4 * i]
            cuda.syncthreads()
        for i in range(EACH):
            states[write[s] * stride + at + 4 * i] = state[i]

    return scan


DELTA_SIGNATURE = f"f32* f32* f32* f32* f32* f32* i32 {SEQUENCES}"
"""out [T, heads, V]; q and k [T, heads, K], v [T, heads, V], logarithms of the decays and shares beta [T, heads]; heads. States are
[heads, K, V]."""


@kernel_maker
def delta(k_dim: int, v_dim: int) -> CudaKernel:
    """The gated delta rule. A thread has a column of a head's state, in memory: it is too long for registers. Grid (sequences, heads)."""
    if v_dim > 1024:
        raise ValueError(f"v_dim {v_dim}: a block has a thread for each, and 1024 at most")
    K, V, ALL = k_dim, v_dim, -(-v_dim // 32) * 32

    @kernel(DELTA_SIGNATURE, ALL, f"delta_k{K}_v{V}")
    def step(out, q, k, v, log_decay, beta, heads, states, stride, read, write, begins):
        s, h, j = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        if j >= V:
            return
        source, fresh = read[s] * stride + i64(h) * K * V + j, read[s] < 0
        to = write[s] * stride + i64(h) * K * V + j
        for t in range(begins[s], begins[s + 1]):
            row, decay, held, y = t * heads + h, kept(log_decay[t * heads + h]), f32(0.0), f32(0.0)
            if not fresh:
                for i in range(K):
                    held += states[source + i * V] * decay * k[row * K + i]
            change = (v[row * V + j] - held) * beta[row]
            for i in range(K):
                new = k[row * K + i] * change
                if not fresh:
                    new += states[source + i * V] * decay
                states[to + i * V] = new
                y += new * q[row * K + i]
            out[row * V + j] = y
            source, fresh = to, False

    return step
