"""Identity of a model's context: what of a configuration, of its adapters and scales changes K and V."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from numba_kv.config.engine import LLMEngineConfig
from numba_kv.errors import InputError
from numba_kv.ledger.reuse.identity import ContextIdentity

if TYPE_CHECKING:
    from numba_kv.weights.lora_slots import LoRAAdapter

__all__ = ["engine_identity", "row_identity"]

#: Fields of a configuration that say how much fits and how it lies, and nothing of what K and V are.
_LIMITS = frozenset(
    {
        "max_batch_size", "max_kv_cache_capacity", "max_step_tokens", "max_batch_tokens", "num_kv_pages", "lookahead_pages",
        "max_lora_rank", "max_loras", "lora_targets", "external_weights_nbytes", "num_deepstack_features", "use_bounded_swa",
        "max_input_len", "eos_token_ids", "max_verify_tokens", "recurrent_spec_verify_mode", "conv_state_room",
        "page_tokens", "kv_cache_dtype", "kv_layout", "kept_window_pages", "kept_states",
    }
)  # fmt: skip


def engine_identity(config: LLMEngineConfig, weights: bytes, scales: bytes | None = None) -> ContextIdentity:
    """Return the identity of sequences without adapter and salt.

    Parameters
    ----------
    config : LLMEngineConfig
        The model. Its limits (rows, pages, capacity) are no part of the identity: a cache that is saved serves a larger engine.
    weights : bytes
        Digest of the weights; a configuration cannot tell two trainings apart. ``b""`` where a cache never leaves its process.
    scales : bytes, optional
        Digest of KV scales that are fixed for the model (FP8).

    Raises
    ------
    InputError
        If a digest is not bytes.
    """
    if not isinstance(weights, bytes):
        raise InputError(f"weights: {type(weights).__name__} given, bytes wanted (a digest)")
    digest = hashlib.blake2b(digest_size=16, person=b"numba_kv model")
    for name in sorted(config.__dataclass_fields__):
        if name not in _LIMITS:
            value = repr(getattr(config, name)).encode()
            digest.update(name.encode() + len(value).to_bytes(8, "little") + value)
    digest.update(weights)
    return ContextIdentity(
        model=digest.digest(), kv_cache_dtype=config.kv_cache_dtype, page_tokens=config.page_tokens, scales=scales
    )


def row_identity(
    engine: ContextIdentity, *, adapter: LoRAAdapter | None = None, salt: bytes | None = None, rope: bytes | None = None
) -> ContextIdentity:
    """Return the identity of one sequence.

    Parameters
    ----------
    adapter : LoRAAdapter, optional
        What the row computes with: its content counts, not its name.
    salt : bytes, optional
        The tenant's.
    rope : bytes, optional
        Which of several rotary tables the row's positions are turned by.
    """
    return replace(engine, adapter=None if adapter is None else adapter.content_hash, salt=salt, rope=rope)
