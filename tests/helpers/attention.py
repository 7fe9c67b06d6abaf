"""Attention in float64, query by query: the oracle."""

from __future__ import annotations

import numpy as np

from numba_kv.geometry import Window


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    window: Window,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    present: np.ndarray | None = None,
) -> np.ndarray:
    """Return the output [Hq, D] of a query [Hq, D] at `position` over keys [position + 1 or more, H, D].

    `present` says which keys are there; a query that sees none has an output of zeros.
    """
    seen = np.arange(window.lowest_key(position), position + 1)
    if present is not None:
        seen = seen[present[seen]]
    if not len(seen):
        return np.zeros(q.shape)
    keys, values = (np.repeat(a[seen].astype(np.float64), q.shape[0] // k.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("hd,jhd->hj", q.astype(np.float64), keys) * (q.shape[1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if sinks is not None:
        scores = np.concatenate([scores, sinks.astype(np.float64)[:, None]], 1)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return np.einsum("hj,jhd->hd", weights[:, : len(seen)], values)


def close(found: np.ndarray, expected: np.ndarray, values: np.ndarray) -> None:
    """Check an output over V of this size: float32 arithmetic, rounded to the output's type."""
    size = float(np.abs(values.astype(np.float64)).max(initial=0.0)) or 1.0
    allowed = {"float32": 2**-17, "float16": 2**-10, "bfloat16": 2**-7}[found.dtype.name] * size
    wide = found.astype(np.float64)
    assert np.isfinite(wide).all(), "something that is not there was read"
    error = float(np.abs(wide - expected).max(initial=0.0))
    assert error <= allowed, f"{error} off, {allowed} allowed"
