"""Recurrences in the simulator, against loops in NumPy: sequences that begin, that go on elsewhere, of one token and of many."""

import numpy as np
import pytest

from minivllm_kernels.cuda import scan

READ, WRITE, BEGINS = np.array([-1, 2, 4]), np.array([1, 3, 4]), np.array([0, 19, 20, 22])
TOKENS, HEADS, GROUPS = 22, 2, 1


def run(kernel, grid, shape, inputs, sizes, step, out_shape):
    """Run it on states in six blocks, and a loop over `step(state, t) -> (y, state)`; compare."""
    rng = np.random.default_rng(0)
    states = rng.standard_normal((6, int(np.prod(shape)) + 3)).astype(np.float32)  # a block is longer than a state
    before, out = states.copy(), np.full((TOKENS, *out_shape), np.nan, np.float32)
    kernel.simulate(grid, out, *inputs, *sizes, states, states.shape[1], READ, WRITE, BEGINS)
    want, after = np.empty_like(out), before.copy()
    for s in range(len(READ)):
        state = np.zeros(shape) if READ[s] < 0 else before[READ[s], :-3].reshape(shape).astype(np.float64)
        for t in range(BEGINS[s], BEGINS[s + 1]):
            want[t], state = step(state, t)
        after[WRITE[s], :-3] = state.reshape(-1)
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(states, after, atol=2e-5, rtol=2e-5)


def random(*shapes):
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("taps", [1, 3])
def test_conv(taps):
    u, weight, bias = random((TOKENS, 5), (taps, 5), 5)

    def step(state, t):
        seen = np.concatenate([state, u[None, t]])
        return (seen * weight).sum(0) + bias, seen[1:]

    run(scan.conv(taps), (3, 1), (taps - 1, 5), (u, weight, bias), (5,), step, (5,))


@pytest.mark.parametrize("form", [scan.ssd, scan.ssd_chunks])
def test_ssd(form):
    P, N = 8, 32
    x, B, C, dt, A, D = random(
        (TOKENS, HEADS, P), (TOKENS, GROUPS, N), (TOKENS, GROUPS, N), (TOKENS, HEADS), HEADS, HEADS
    )
    dt, A = np.abs(dt), -np.abs(A)

    def step(state, t):
        new = state * np.exp(dt[t] * A)[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * B[t][:, None]
        return (new * C[t][:, None]).sum(-1) + D[:, None] * x[t], new

    run(form(P, N), (3, HEADS), (HEADS, P, N), (x, dt, A, B, C, D), (HEADS, GROUPS), step, (HEADS, P))


def test_selective_scan():
    x, dt, A, B, C, D = random((TOKENS, 6), (TOKENS, 6), (4, 6), (TOKENS, 4), (TOKENS, 4), 6)
    dt, A = np.abs(dt), -np.abs(A)

    def step(state, t):
        new = state * np.exp(dt[t] * A) + dt[t] * x[t] * B[t][:, None]
        return (new * C[t][:, None]).sum(0) + D * x[t], new

    run(scan.selective(4), (3, 1), (4, 6), (x, dt, A, B, C, D), (6,), step, (6,))


def test_delta_rule():
    K, V = 4, 6
    q, k, v, decay, beta = random(
        (TOKENS, HEADS, K), (TOKENS, HEADS, K), (TOKENS, HEADS, V), (TOKENS, HEADS), (TOKENS, HEADS)
    )
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay, beta = -np.abs(decay), 1 / (1 + np.exp(-beta))

    def step(state, t):
        state = state * np.exp(decay[t])[:, None, None]
        change = (v[t] - (state * k[t][:, :, None]).sum(1)) * beta[t][:, None]
        state = state + k[t][:, :, None] * change[:, None]
        return (state * q[t][:, :, None]).sum(1), state

    run(scan.delta(K, V), (3, HEADS), (HEADS, K, V), (q, k, v, decay, beta), (HEADS,), step, (HEADS, V))


def test_sizes_that_do_not_fit_are_refused():
    for form, sizes, what in ((scan.ssd, (8, 20), "state_size 20"), (scan.ssd_chunks, (12, 32), "head_dim 12")):
        with pytest.raises(ValueError, match=what):
            form(*sizes)
    with pytest.raises(ValueError, match="v_dim 2000"):
        scan.delta(64, 2000)
