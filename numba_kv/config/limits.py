"""What the caller of `load_engine_config` asks for, beside the file.

Knows the arguments and their ranges. Does not know a file: where an argument is None the file decides, or a default of its
dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_kv.config.engine import MAX_KV_CACHE_CAPACITY, check_int, check_kv_cache_dtype, check_kv_layout
from numba_kv.config.recurrent import VERIFY_MODES, check_state_dtype
from numba_kv.errors import ConfigError
from numba_kv.geometry import INT32_MAX, MAX_POOL_PAGES, check_page_tokens

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that override those of a file; the names are those of `load_engine_config`."""

    max_batch_size: int | None = None
    max_kv_cache_capacity: int | None = None
    page_tokens: int | None = None
    kv_cache_dtype: str | None = None
    kv_layout: str | tuple[str, ...] = "NHD"
    max_step_tokens: int = 1
    max_batch_tokens: int | None = None
    num_kv_pages: int | None = None
    lookahead_pages: int = 4
    use_bounded_swa: bool = True
    recurrent_state_dtype: str | None = None
    conv_state_dtype: str | None = None
    max_verify_tokens: int = 0
    recurrent_spec_verify_mode: str | None = None
    conv_state_room: int = 1
    kept_window_pages: int = 0
    kept_states: int = 0
    rank: int | None = None
    expected_world_size: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_batch_size", 1, INT32_MAX),
            ("max_kv_cache_capacity", 1, MAX_KV_CACHE_CAPACITY),
            ("max_batch_tokens", 1, INT32_MAX),
            ("num_kv_pages", 1, MAX_POOL_PAGES),
            ("rank", 0, INT32_MAX),
            ("expected_world_size", 1, INT32_MAX),
        ):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, low, high)
        check_int("max_step_tokens", self.max_step_tokens, 1, MAX_KV_CACHE_CAPACITY)
        check_int("lookahead_pages", self.lookahead_pages, 0, INT32_MAX)
        if self.page_tokens is not None:
            check_page_tokens(self.page_tokens)
        if self.kv_cache_dtype is not None:
            check_kv_cache_dtype(self.kv_cache_dtype)
        object.__setattr__(self, "kv_layout", check_kv_layout(self.kv_layout))
        for name in ("recurrent_state_dtype", "conv_state_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_state_dtype(name, getattr(self, name)))
        for name in ("max_verify_tokens", "conv_state_room", "kept_window_pages", "kept_states"):
            check_int(name, getattr(self, name), 0, INT32_MAX)
        mode = self.recurrent_spec_verify_mode
        if mode is not None and mode not in VERIFY_MODES:
            raise ConfigError(f"recurrent_spec_verify_mode: {mode!r} is not one of {', '.join(VERIFY_MODES)}")
        if not isinstance(self.use_bounded_swa, bool):
            raise ConfigError(f"use_bounded_swa: {self.use_bounded_swa!r} is not True or False")
