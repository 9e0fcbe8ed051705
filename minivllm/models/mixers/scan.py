"""Recurrences of state-space layers: token by token, in chunks, and one step for many sequences."""

# Generated from nbs/models/mixers/scan.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_step(u: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences through a causal convolution of each channel by itself.

    Args:
        u: [R, C]. weight: [K, C]. bias: [C] or None. state: [R, K - 1, C], the inputs before it, oldest first. All float32.

    Returns:
        [R, C], and the new states.
    """
    full = torch.cat((state, u[:, None]), 1)
    y = (full * weight).sum(1)
    return y if bias is None else y + bias, full[:, 1:]


def conv_scan(u: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence: u [T, C], state [K - 1, C], to [T, C] and the new state."""
    full = torch.cat((state, u))
    y = F.conv1d(full.T[None], weight.T[:, None], bias, groups=full.shape[1])[0].T
    return y, full[len(u) :]


def by_head(x: Tensor, num_heads: int) -> Tensor:
    """[T, G, N] of groups to [T, H, N] of heads: consecutive heads share a group."""
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def ssd_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences.

    Args:
        x: [R, H, P]. dt: [R, H], above 0. A: [H], below 0. B, C: [R, G, N]. D: [H], the input's own way past the state.
        state: [R, H, P, N]. All float32.

    Returns:
        [R, H, P], and the new states.
    """
    B, C = by_head(B, len(A)), by_head(C, len(A))
    state = state * (dt * A).exp()[..., None, None] + (dt[..., None] * x)[..., None] * B[:, :, None]
    return (state * C[:, :, None]).sum(-1) + D[:, None] * x, state


def by_token(step, x: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run `step(*parts, states)` over the tokens of one sequence. x: tensors with a row for each token."""
    ys, states = [], state[None]
    for parts in zip(*(part.split(1) for part in x), strict=True):
        y, states = step(*parts, states)
        ys.append(y)
    return torch.cat(ys), states[0]


def ssd_recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence, one after the other: x [T, H, P], state [H, P, N], and so on, to [T, H, P] and the new state."""
    return by_token(lambda x, dt, B, C, states: ssd_step(x, dt, A, B, C, D, states), (x, dt, B, C), state)


CHUNK = 64
"""Tokens of a chunk."""


def decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The share of what token s added that is left at token t, [H, T, T], 0 for s > t; and that of the state before, [H, T].

    log_decay: [T, H], logarithm of each token's factor.
    """
    total = log_decay.T.cumsum(1)
    between = (total[:, :, None] - total[:, None]).tril()
    return between.exp().tril(), total.exp()


def ssd_chunk(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `ssd_recurrence`, for a chunk, in matmuls."""
    inner, before = decays(dt * A)
    B, C = by_head(B, len(A)).transpose(0, 1), by_head(C, len(A)).transpose(0, 1)  # [H, T, N]
    added = (x * dt[..., None]).transpose(0, 1)  # [H, T, P]
    y = (C @ B.mT * inner) @ added + before[..., None] * (C @ state.mT)
    state = state * before[:, -1, None, None] + (added * inner[:, -1, :, None]).mT @ B
    return y.transpose(0, 1) + D[:, None] * x, state


def in_chunks(chunk, x: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run `chunk(*parts, state)` over tokens, `CHUNK` at a time. x: tensors with a row for each token."""
    ys = []
    for start in range(0, len(x[0]), CHUNK):
        y, state = chunk(*(part[start : start + CHUNK] for part in x), state)
        ys.append(y)
    return torch.cat(ys), state


def ssd_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`ssd_recurrence` in chunks."""
    return in_chunks(lambda x, dt, B, C, state: ssd_chunk(x, dt, A, B, C, D, state), (x, dt, B, C), state)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences.

    Args:
        q, k: [R, H, K], of length 1 (q over the root of K). v: [R, H, V]. log_decay: [R, H], at most 0. beta: [R, H], 0 to 1.
        state: [R, H, K, V]. All float32.

    Returns:
        [R, H, V], and the new states.
    """
    state = state * log_decay.exp()[..., None, None]
    change = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state = state + k[..., None] * change[:, :, None]
    return (state * q[..., None]).sum(-2), state


def delta_recurrence(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence, one after the other: q [T, H, K], state [H, K, V], and so on, to [T, H, V] and the new state."""
    return by_token(delta_step, parts[:-1], parts[-1])


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `delta_recurrence`, for a chunk, in matmuls and one triangular solve."""
    inner, before = decays(log_decay)
    q, k, v, beta = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), beta.T[..., None]
    reads = (beta * (k @ k.mT) * inner).tril(-1)  # of what token s writes, at token t
    wanted = beta * (v - before[..., None] * (k @ state))
    change = torch.linalg.solve_triangular(reads, wanted, upper=False, unitriangular=True)
    y = (q @ k.mT * inner) @ change + before[..., None] * (q @ state)
    state = state * before[:, -1, None, None] + (k * inner[:, -1, :, None]).mT @ change
    return y.transpose(0, 1), state


def delta_scan(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_recurrence` in chunks."""
    return in_chunks(delta_chunk, parts[:-1], parts[-1])


def selective_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences.

    Args:
        x: [R, I]. dt: [R, I], above 0. A: [N, I], below 0. B, C: [R, N]. D: [I], the input's own way past the state.
        state: [R, N, I]. All float32.

    Returns:
        [R, I], and the new states.
    """
    state = state * (dt[:, None] * A).exp() + (dt * x)[:, None] * B[..., None]
    return (state * C[..., None]).sum(1) + D * x, state


def selective_recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence, one after the other: x [T, I], state [N, I], and so on, to [T, I] and the new state."""
    return by_token(lambda x, dt, B, C, states: selective_step(x, dt, A, B, C, D, states), (x, dt, B, C), state)


def selective_chunk(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `selective_recurrence`, for a chunk. The number of rounds is the logarithm of its length."""
    decay, states = (dt[:, None] * A).exp(), (dt * x)[:, None] * B[..., None]  # [T, N, I]
    states[0] += decay[0] * state
    shift = 1
    while shift < len(x):
        states[shift:] = states[shift:] + decay[shift:] * states[:-shift]
        decay[shift:] = decay[shift:] * decay[:-shift]
        shift *= 2
    return (states * C[..., None]).sum(1) + D * x, states[-1]


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`selective_recurrence` in chunks."""
    return in_chunks(lambda x, dt, B, C, state: selective_chunk(x, dt, A, B, C, D, state), (x, dt, B, C), state)
