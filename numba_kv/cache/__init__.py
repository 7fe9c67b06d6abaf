"""Pools and tables of a model's caches."""

from __future__ import annotations

from numba_kv.cache.hybrid import HybridCacheManager
from numba_kv.cache.kv_cache import KVCacheManager, LayerStorage
from numba_kv.cache.kv_io import KVIO
from numba_kv.cache.page_table import KVPageTable
from numba_kv.cache.step_buffers import StepBuffers

__all__ = ["KVIO", "HybridCacheManager", "KVCacheManager", "KVPageTable", "LayerStorage", "StepBuffers"]
