"""Pools and tables of a model's caches."""

from __future__ import annotations

from numba_kv.cache.attention import PagedAttention
from numba_kv.cache.attention_bound import BoundAttention
from numba_kv.cache.hybrid import HybridCacheManager
from numba_kv.cache.kv_bound import BoundCall
from numba_kv.cache.kv_cache import KVCacheManager, LayerStorage
from numba_kv.cache.kv_io import KVIO
from numba_kv.cache.kv_rotation import HeadNorm
from numba_kv.cache.mamba_cache import MambaCacheManager
from numba_kv.cache.page_table import KVPageTable
from numba_kv.cache.state_copies import SlotState
from numba_kv.cache.step_buffers import StepBuffers

__all__ = [
    "KVIO",
    "BoundAttention",
    "BoundCall",
    "HeadNorm",
    "HybridCacheManager",
    "KVCacheManager",
    "KVPageTable",
    "LayerStorage",
    "MambaCacheManager",
    "PagedAttention",
    "SlotState",
    "StepBuffers",
]
