"""FlashAttention's versions: where their functions are, what these call things, and what their kernels can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any

from numba_kv.adapters.paged_reading import Consumer
from numba_kv.errors import InputError, InteropError

__all__ = ["VERSIONS", "Version", "function_of", "version_of"]

_HALF = ("float16", "bfloat16")
_FLOAT8 = "float8_e4m3"


@dataclass(frozen=True, slots=True)
class Version:
    """A version's functions and what they call things.

    Attributes
    ----------
    consumer : Consumer
        What its kernels can read.
    module, ragged, even : str
        Where its functions are: for q [T, Hq, D] with `cu_seqlens_q`, and for q [rows, tokens, Hq, D] (None: there is none).
    pools, table, lengths : str
        Names of K and V, of the table and of the rows' lengths in `ragged`.
    maxima : tuple of str
        Names of the bounds that `ragged` takes: of queries, and of keys.
    starts : str
        Name of the rows' first tokens in `ragged`.
    no_window : tuple
        What it takes for no window.
    swaps_rows : bool
        Whether rows of one query are taken from q by their number, which is wrong where a row has no query.
    options : dict
        Arguments that are always the same.
    """

    consumer: Consumer
    module: str
    ragged: str
    even: str | None
    pools: tuple[str, str]
    table: str
    lengths: str
    maxima: tuple[str, ...]
    starts: str = "cu_seqlens_q"
    no_window: tuple[int | None, int | None] = (-1, -1)
    swaps_rows: bool = False
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})


_VARLEN, _CACHED = "flash_attn_varlen_func", "flash_attn_with_kvcache"
_VLLM: dict[str, Any] = {
    "module": "vllm.vllm_flash_attn",
    "ragged": _VARLEN,
    "even": None,
    "pools": ("k", "v"),
    "table": "block_table",
    "lengths": "seqused_k",
    "maxima": ("max_seqlen_q", "max_seqlen_k"),
}
VERSIONS = {
    "fa2": Version(
        consumer=Consumer("FlashAttention 2", _HALF, page_multiple=256),
        module="flash_attn",
        ragged=_VARLEN,
        even=_CACHED,
        pools=("k", "v"),
        table="block_table",
        lengths="cu_seqlens_k",
        maxima=("max_seqlen_q", "max_seqlen_k"),
        swaps_rows=True,
    ),
    "fa3": Version(
        consumer=Consumer("FlashAttention 3", (*_HALF, _FLOAT8), has_chunks=True),
        module="flash_attn_interface",
        ragged=_CACHED,
        even=_CACHED,
        pools=("k_cache", "v_cache"),
        table="page_table",
        lengths="cache_seqlens",
        maxima=("max_seqlen_q",),
    ),
    "fa4": Version(
        consumer=Consumer("FlashAttention 4", _HALF),
        module="flash_attn.cute.interface",
        ragged=_VARLEN,
        even=None,
        pools=("k", "v"),
        table="page_table",
        lengths="seqused_k",
        maxima=(),
        no_window=(None, None),
    ),
    # in torch itself: the kernels of FlashAttention 2
    "torch": Version(
        consumer=Consumer("torch's varlen_attn", _HALF, page_multiple=256),
        module="torch.nn.attention.varlen",
        ragged="varlen_attn",
        even=None,
        pools=("key", "value"),
        table="block_table",
        lengths="seqused_k",
        maxima=("max_q", "max_k"),
        starts="cu_seq_q",
        no_window=(-1, 0),
        swaps_rows=True,
        options={"cu_seq_k": None, "enable_gqa": True},
    ),
    "vllm_fa2": Version(
        consumer=Consumer("vLLM's FlashAttention 2", _HALF, page_multiple=16),
        **_VLLM,
        swaps_rows=True,
        options={"causal": True, "fa_version": 2},
    ),
    "vllm_fa3": Version(
        consumer=Consumer("vLLM's FlashAttention 3", (*_HALF, _FLOAT8)), **_VLLM, options={"causal": True, "fa_version": 3}
    ),
}


def version_of(version: str) -> Version:
    """Return the version called so.

    Raises
    ------
    InputError
        If there is none.
    """
    if not isinstance(version, str) or version not in VERSIONS:
        raise InputError(f"version: {version!r} is not one of {', '.join(map(repr, VERSIONS))}")
    return VERSIONS[version]


def function_of(version: Version, *, even: bool) -> Any:
    """Return a version's function for rows of equal tokens, if it has one and that is wanted, or for ragged ones.

    Raises
    ------
    InteropError
        If the library is not installed, or is older than its paged attention.
    """
    name = version.even if even and version.even is not None else version.ragged
    try:
        function = getattr(import_module(version.module), name)
    except (ImportError, AttributeError) as error:
        raise InteropError(f"{version.consumer.name}: no {version.module}.{name} is installed here ({error})") from error
    if version.table not in signature(function).parameters:
        raise InteropError(f"{version.consumer.name}: {version.module}.{name} takes no {version.table} here; a newer one does")
    return function
