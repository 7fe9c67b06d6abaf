"""The model that a command's arguments name, and the limits they set.

Knows the options that `plan`, `replay` and `inspect` share. Does not know what is done with the configuration.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path

from numba_kv.config import LLMEngineConfig, load_engine_config
from numba_kv.config.engine import MAX_KV_CACHE_CAPACITY
from numba_kv.errors import NumbaKVError
from numba_kv.replay.models import find_config

__all__ = ["largest_window", "load_model", "merged_windows", "model_name"]


def load_model(args: Namespace, *, rows: int | None, capacity: int | None, max_batch_tokens: int | None) -> LLMEngineConfig:
    """Load CONFIG under the options that were given."""
    return load_engine_config(
        find_config(args.config),
        max_batch_size=rows,
        max_kv_cache_capacity=capacity,
        page_tokens=args.page_tokens,
        kv_cache_dtype=args.dtype,
        max_step_tokens=args.max_step_tokens,
        max_batch_tokens=max_batch_tokens,
    )


def model_name(given: str, config: LLMEngineConfig) -> str:
    """Return what tables and pictures call the model."""
    # Every checkpoint's file is called config.json: then the family says more.
    stem = Path(given).stem
    return config.model_type if stem == "config" and config.model_type else stem


def largest_window(config: LLMEngineConfig) -> int:
    """Return the tokens of the largest window, 0 without one."""
    return max((layer.window.tokens for layer in config.layers if not layer.window.is_full), default=0)


def merged_windows(args: Namespace, config: LLMEngineConfig) -> list[str]:
    """Return a note for each window of the model that the capacity of `config` turned into full attention."""
    try:
        whole = load_model(args, rows=1, capacity=MAX_KV_CACHE_CAPACITY, max_batch_tokens=None)
    except NumbaKVError:  # a file that allows only its own capacity has lost nothing
        return []
    pairs = zip(whole.layers, config.layers, strict=True)
    lost = Counter(str(mine.window) for mine, used in pairs if used.window != mine.window)
    return [
        f"{count} layers of {window} are full attention here: the window covers the capacity of "
        f"{config.max_kv_cache_capacity:,} tokens (see --capacity)"
        for window, count in lost.items()
    ]
