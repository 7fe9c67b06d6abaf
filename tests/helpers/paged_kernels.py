"""What paged attention kernels of other libraries read, in NumPy, under the libraries' own signatures.

They load whole tiles: entries of the table left of the window and past the length are dereferenced, and what a mask hides gets
probability 0, which makes NaN of a NaN in V. Where a library switches a window off, or reorders queries, so does this.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from numba_kv.device import Tensor

TILE = 128
INT32 = np.dtype(np.int32)


def host(value: Any) -> np.ndarray:
    """Return a tensor or array in host memory."""
    return value.to_host() if isinstance(value, Tensor) else np.asarray(value)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, scale: float | None, factors: tuple[Any, Any] = (1, 1)
) -> np.ndarray:
    """Return attention of q [n, Hq, D] over loaded keys [m, H, D], of which each query sees those `visible` [n, m]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (
        np.repeat(a.astype(np.float64) * np.asarray(f).reshape(-1, 1), group, 1) for a, f in zip((k, v), factors, strict=True)
    )
    scores = np.einsum("nhd,mhd->nhm", q.astype(np.float64), keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = np.where(visible[:, None], scores, -np.inf)  # a mask chooses, so that NaN in K does no harm
    top = scores.max(2, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(2, keepdims=True)
    return np.einsum("nhm,mhd->nhd", weights / np.where(total > 0, total, 1), values)


def tiles(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    table: np.ndarray,
    length: int,
    left: int,
    chunk: int = 0,
    scale: float | None = None,
    factors: tuple[Any, Any] = (1, 1),
) -> np.ndarray:
    """Return a row's output: q are its last queries, `table` its pages; loads from the first tile of the window on."""
    page, capacity = k.shape[1], len(table) * k.shape[1]
    assert length <= capacity, "the table is narrower than the row"
    positions = np.arange(length - len(q), length)
    low = np.maximum(positions - left, 0) if left >= 0 else np.zeros_like(positions)
    if chunk:
        low = np.maximum(low, positions // chunk * chunk)
    first, stop = int(low.min(initial=0)) // TILE * TILE if len(q) else 0, min(-(-length // TILE) * TILE, capacity)
    loaded = np.arange(first, stop)
    ids = table[loaded // page]
    visible = (loaded >= low[:, None]) & (loaded <= positions[:, None])
    return attend(q, k[ids, loaded % page], v[ids, loaded % page], visible, scale, factors)


def ragged(q: Any, k: Any, v: Any, starts: Any, lengths: Any, table: Any, left: int, **more: Any) -> np.ndarray:
    """Return the output of all rows, q [T, Hq, D]."""
    q, k, v, starts, lengths, table = map(host, (q, k, v, starts, lengths, table))
    assert {starts.dtype, lengths.dtype, table.dtype} == {INT32}
    assert len(table) == len(lengths) == len(starts) - 1
    k_factors, v_factors = more.pop("factors", (None, None))
    out = np.zeros(q.shape)
    for row, (first, stop) in enumerate(pairwise(starts.tolist())):
        if stop > first:
            factors = (1, 1) if k_factors is None else (k_factors[row], v_factors[row])
            out[first:stop] = tiles(q[first:stop], k, v, table[row], int(lengths[row]), left, factors=factors, **more)
    return out


def fa2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
               causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
               return_attn_probs=False, block_table=None):  # fmt: skip
    """`flash_attn.flash_attn_varlen_func` with a block table."""
    k, v, starts = host(k), host(v), host(cu_seqlens_q)
    assert k.shape[1] % 256 == 0
    assert k.dtype.name in ("float16", "bfloat16")
    assert causal
    lengths = np.diff(host(cu_seqlens_k)).astype(np.int32)
    assert lengths.max() <= max_seqlen_k
    assert np.diff(starts).max() <= max_seqlen_q
    left, right = window_size
    assert (left >= 0) == (right == 0)
    if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and left < 0:  # heads of a group become queries of a row
        assert len(q) == len(lengths), "reshape of q to the rows fails"
        starts = np.arange(len(lengths) + 1, dtype=np.int32)
    if left >= max_seqlen_k:
        left = -1
    return ragged(q, k, v, starts, lengths, block_table, left, scale=softmax_scale)


def fa2_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                     cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                     window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                     return_softmax_lse=False):  # fmt: skip
    """`flash_attn.flash_attn_with_kvcache` with a block table: q is [rows, tokens, Hq, D]."""
    rows, tokens = q.shape[:2]
    starts = np.arange(rows + 1, dtype=np.int32) * np.int32(tokens)
    assert host(k_cache).shape[1] % 256 == 0
    assert causal
    left = window_size[0]
    if left >= host(block_table).shape[1] * host(k_cache).shape[1]:
        left = -1
    flat = q.reshape(-1, *q.shape[2:])
    return ragged(flat, k_cache, v_cache, starts, cache_seqlens, block_table, left, scale=softmax_scale).reshape(q.shape)


def fa3_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                     cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                     max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
                     softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                     rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                     return_softmax_lse=False):  # fmt: skip
    """`flash_attn_interface.flash_attn_with_kvcache` with a page table; without starts q is [rows, tokens, Hq, D]."""
    assert causal
    shape = q.shape
    if cu_seqlens_q is None:
        cu_seqlens_q = np.arange(shape[0] + 1, dtype=np.int32) * np.int32(shape[1])
        q = q.reshape(-1, *shape[2:])
    else:
        assert np.diff(host(cu_seqlens_q)).max() <= max_seqlen_q
    factors = (None, None)
    if host(k_cache).dtype.name == "float8_e4m3fn":
        factors = (host(k_descale), host(v_descale))
        assert {f.shape for f in factors} == {(len(host(cache_seqlens)), host(k_cache).shape[2])}
    more = {"chunk": attention_chunk, "scale": softmax_scale, "factors": factors}
    return ragged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, window_size[0], **more).reshape(shape)


def fa4_varlen(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, page_table=None,
               softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
               num_splits=1, pack_gqa=None):  # fmt: skip
    """`flash_attn.cute.interface.flash_attn_varlen_func` with a page table."""
    assert causal
    assert cu_seqlens_k is None
    left = -1 if window_size[0] is None else window_size[0]
    return ragged(q, k, v, cu_seqlens_q, seqused_k, page_table, left, scale=softmax_scale)


def vllm_varlen(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
                dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
                deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
                scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, fa_version=2,
                s_aux=None):  # fmt: skip
    """`vllm.vllm_flash_attn.flash_attn_varlen_func` with a block table."""
    assert causal
    assert cu_seqlens_k is None
    assert host(seqused_k).max() <= max_seqlen_k
    starts, left = host(cu_seqlens_q), window_size[0]
    if fa_version == 2:
        assert host(k).shape[1] % 16 == 0
        assert k_descale is None
        if max_seqlen_q == 1 and q.shape[1] > host(k).shape[2] and left < 0:
            assert len(q) == len(starts) - 1, "reshape of q to the rows fails"
            starts = np.arange(len(starts), dtype=np.int32)
    factors = (None, None)
    if host(k).dtype.name == "float8_e4m3fn":
        factors = (host(k_descale), host(v_descale))
    if left >= max_seqlen_k:
        left = -1
    return ragged(q, k, v, starts, seqused_k, block_table, left, scale=softmax_scale, factors=factors)


def torch_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
                 enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn` with a block table."""
    starts, pages, (left, right) = host(cu_seq_q), host(key), window_size
    assert cu_seq_k is None
    assert enable_gqa
    assert right == 0
    assert pages.shape[1] % 256 == 0
    assert host(seqused_k).max() <= max_k
    assert np.diff(starts).max() <= max_q
    if max_q == 1 and query.shape[1] > pages.shape[2] and left < 0:
        assert len(query) == len(starts) - 1, "reshape of q to the rows fails"
        starts = np.arange(len(starts), dtype=np.int32)
    if left >= max_k:
        left = -1
    return ragged(query, key, value, starts, seqused_k, block_table, left, scale=scale)


class _Wrapper:
    """What FlashInfer's wrappers share: a plan over CSR, and a scan of every page that it lists."""

    def __init__(self, kv_layout: str = "NHD") -> None:
        self.layout = kv_layout

    def _plan(self, starts, indptr, indices, last_page_len, heads, dim, page_size, window_left, kind) -> None:
        for array in (starts, indptr, last_page_len):  # on the host: the library would read them back
            assert isinstance(array, np.ndarray)
            assert array.dtype == INT32
        rows, indices = len(last_page_len), host(indices)
        assert len(indptr) == len(starts) == rows + 1
        assert indices.dtype == INT32
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert dim in (64, 128, 256)
        self._planned = starts, indptr, indices, last_page_len, heads, dim, page_size, window_left, kind

    def _run(self, q: np.ndarray, cache: tuple[Any, Any], causal: bool, factors: tuple[float, float]) -> np.ndarray:
        starts, indptr, indices, last, (q_heads, kv_heads), dim, page, left, kind = self._planned
        k, v = map(host, cache)
        if self.layout == "HND":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        assert k.shape[1:] == (page, kv_heads, dim)
        assert k.dtype.name == kind
        assert q.shape == (starts[-1], q_heads, dim)
        out = np.zeros(q.shape)
        for row, (first, stop) in enumerate(pairwise(starts.tolist())):
            pages = indices[indptr[row] : indptr[row + 1]]
            length = (len(pages) - 1) * page + last[row] if len(pages) else 0
            loaded = np.arange(len(pages) * page)
            positions = np.arange(length - (stop - first), length)
            assert not causal or not len(positions) or positions[0] >= 0
            low = np.maximum(positions - left, 0) if left >= 0 else np.zeros_like(positions)
            visible = (loaded >= low[:, None]) & (loaded <= positions[:, None])
            keys, values = (a[pages].reshape(-1, kv_heads, dim) for a in (k, v))
            out[first:stop] = attend(q[first:stop], keys, values, visible, None, factors)
        return out


class DecodeWrapper(_Wrapper):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
             kv_data_type=None, sm_scale=None) -> None:  # fmt: skip
        """Take a step's indices."""
        starts = np.arange(len(last_page_len) + 1, dtype=np.int32)
        heads = (num_qo_heads, num_kv_heads)
        self._plan(starts, indptr, indices, last_page_len, heads, head_dim, page_size, window_left, kv_data_type or q_data_type)

    def run(self, q, paged_kv_cache, *, k_scale=1.0, v_scale=1.0) -> np.ndarray:
        """Return the output [rows, Hq, D]."""
        return self._run(q, paged_kv_cache, True, (k_scale, v_scale))


class PrefillWrapper(_Wrapper):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, *, head_dim_vo=None, causal=False, pos_encoding_mode="NONE", sm_scale=None,
             window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None) -> None:  # fmt: skip
        """Take a step's indices."""
        assert causal
        heads, kind = (num_qo_heads, num_kv_heads), kv_data_type or q_data_type
        self._plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            heads,
            head_dim_qk,
            page_size,
            window_left,
            kind,
        )

    def run(self, q, paged_kv_cache, *, k_scale=1.0, v_scale=1.0) -> np.ndarray:
        """Return the output [T, Hq, D]."""
        return self._run(q, paged_kv_cache, True, (k_scale, v_scale))
