"""Loading a speculative pair: two configurations of the Edge-LLM dialect and the numbers of a round.

Knows which number comes from which file. The rules are those of `SpecDecodeConfig` and `DeploymentConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from numba_kv.config.deployment import DeploymentConfig
from numba_kv.config.edgellm import check_pool_retention, read_edgellm, read_edgellm_member
from numba_kv.config.edgellm_speculative import SpecKeys
from numba_kv.config.engine import LLMEngineConfig
from numba_kv.config.limits import Limits
from numba_kv.config.load import edgellm_reader, is_edgellm, read_source
from numba_kv.config.read import Reader
from numba_kv.config.spec_decode import SpecDecodeConfig
from numba_kv.errors import ConfigError

__all__ = ["load_deployment_config"]

_Source = str | os.PathLike[str] | Mapping[str, object]


def load_deployment_config(
    base: _Source,
    draft: _Source | None = None,
    *,
    top_k: int = 1,
    steps: int | None = None,
    verify_tokens: int = 0,
    block_size: int | None = None,
    drafts_fan_out: bool = False,
    has_sps_scheduler: bool = False,
    confidence_threshold: float = 0.0,
    has_reference_limits: bool = True,
    max_batch_size: int | None = None,
    max_kv_cache_capacity: int | None = None,
    page_tokens: int | None = None,
    kv_cache_dtype: str | None = None,
    kv_layout: str = "NHD",
    lookahead_pages: int = 4,
    use_bounded_swa: bool = True,
    recurrent_state_dtype: str | None = None,
    conv_state_dtype: str | None = None,
    conv_state_room: int = 1,
    rank: int | None = None,
    expected_world_size: int | None = None,
) -> DeploymentConfig:
    """Load a base engine and the draft engine that proposes its tokens, in the TensorRT Edge-LLM dialect.

    Models of other dialects are put together by hand: ``DeploymentConfig(base=load_engine_config(...), draft=..., spec=...)``.

    Parameters
    ----------
    base, draft : path or mapping
        As `load_engine_config`; without a draft the base is any engine that stands alone.
    top_k, verify_tokens, drafts_fan_out, has_sps_scheduler, confidence_threshold, has_reference_limits
        See `SpecDecodeConfig`.
    steps : int or None
        Steps that the draft runs; needed beside "eagle3", "mtp" and "gemma4_mtp", where it has no default.
    block_size : int or None
        Tokens of a block; None: what the draft's file says.
    max_kv_cache_capacity : int or None
        Most tokens of a row of the base. None: what its file says, or less by what the draft's rows lack: they hold the
        proposals of a round behind every row of the base.
    max_batch_size, page_tokens, kv_cache_dtype, kv_layout, lookahead_pages, use_bounded_swa, rank, expected_world_size
        As `load_engine_config`, for both engines; one layout for all groups of both.
    recurrent_state_dtype, conv_state_dtype, conv_state_room
        As `load_engine_config`, for the base.

    Raises
    ------
    ConfigError
        If a file is wrong, the two do not fit each other, or numbers of a round are given without a draft.
    UnsupportedModelError
        If the caches of a model are not supported yet.

    Notes
    -----
    The reference lets an engine have more pages than all rows take only where they are kept from one request to the next; so
    does this function, unless `has_reference_limits` is False.
    """
    limits = Limits(
        max_batch_size=max_batch_size,
        max_kv_cache_capacity=max_kv_cache_capacity,
        page_tokens=page_tokens,
        kv_cache_dtype=kv_cache_dtype,
        kv_layout=kv_layout,
        lookahead_pages=lookahead_pages,
        use_bounded_swa=use_bounded_swa,
        recurrent_state_dtype=recurrent_state_dtype,
        conv_state_dtype=conv_state_dtype,
        conv_state_room=conv_state_room,
        rank=rank,
        expected_world_size=expected_world_size,
    )
    base_reader = _reader(base, "base")
    if draft is None:
        given = [name for name, value in (("steps", steps), ("block_size", block_size)) if value is not None]
        given += [name for name, value in (("verify_tokens", verify_tokens),) if value] + (["top_k"] if top_k != 1 else [])
        if given:
            raise ConfigError(f"draft: missing, but {', '.join(given)} given; numbers of a round need a draft")
        return DeploymentConfig(base=read_edgellm(base_reader, limits))
    draft_reader = _reader(draft, "draft")
    _, base_keys = read_edgellm_member(base_reader, limits, "base")
    # Rows of a draft that reads the base's KV are the base's; one with KV of its own has its own.
    draft_limits = limits if base_keys.mode == "gemma4_mtp" else replace(limits, max_kv_cache_capacity=None)
    drafted, draft_keys = read_edgellm_member(draft_reader, draft_limits, "draft")
    _check_pair(draft_reader, base_keys, draft_keys)
    if steps is None and base_keys.mode in ("eagle3", "mtp", "gemma4_mtp"):
        raise ConfigError(f"steps: missing; {base_keys.mode!r} drafts step by step")
    spec = SpecDecodeConfig(
        mode=base_keys.mode,
        top_k=top_k,
        steps=1 if steps is None else steps,
        verify_tokens=verify_tokens,
        block_size=draft_keys.block_size if block_size is None else block_size,
        max_verify_tokens=base_keys.width,
        max_draft_tokens=draft_keys.width,
        target_layers=base_keys.target_layers,
        base_hidden_size=draft_keys.base_hidden_size,
        target_kv_layers=_target_kv_layers(draft_reader, draft_keys, len(drafted.layers)),
        drafts_fan_out=drafts_fan_out,
        samples_from_anchor=draft_keys.samples_from_anchor,
        has_sps_scheduler=has_sps_scheduler,
        confidence_threshold=confidence_threshold,
        has_reference_limits=has_reference_limits,
    )
    found = DeploymentConfig(base=_base(base_reader, limits, drafted, spec), draft=drafted, spec=spec)
    if has_reference_limits:
        _check_pools(base_reader, draft_reader, limits, found)
    return found


def _reader(source: _Source, name: str) -> Reader:
    label, content = read_source(source, name)
    if not is_edgellm(content):
        raise ConfigError(
            f"{label}: no builder_config, which the Edge-LLM dialect has; for other dialects make a DeploymentConfig of what "
            "load_engine_config returns"
        )
    return edgellm_reader(label, content)


def _check_pair(draft: Reader, base: SpecKeys, drafted: SpecKeys) -> None:
    for key, mine, its in (
        ("spec_decode_type", drafted.mode, base.mode),
        ("dflash_config.version", drafted.version, base.version),
    ):
        if mine != its:
            raise draft.wrong(key, mine, f"{its!r}, as the base has it")
    if drafted.target_layers and drafted.target_layers != base.target_layers:
        raise draft.wrong("target_layer_ids", list(drafted.target_layers), f"{list(base.target_layers)}, as the base has it")


def _target_kv_layers(draft: Reader, keys: SpecKeys, layers: int) -> tuple[int, ...]:
    """Return the base's layer of each layer of the draft: the map names every one once."""
    if not keys.sharing_map:
        return ()
    found = dict(keys.sharing_map)
    named = sorted(layer for layer, _ in keys.sharing_map)
    if named != list(range(layers)):
        raise draft.error("kv_sharing_map", f"names layers {named} of the draft; each of its {layers} layers is named once")
    return tuple(found[layer] for layer in range(layers))


def _base(reader: Reader, limits: Limits, draft: LLMEngineConfig, spec: SpecDecodeConfig) -> LLMEngineConfig:
    """Return the base with rows so short that the draft's hold them and a round's proposals."""
    config, _ = read_edgellm_member(reader, limits, "base")
    held = draft.max_kv_cache_capacity - spec.draft_tokens
    if limits.max_kv_cache_capacity is not None or spec.shares_target_kv or not 1 <= held < config.max_kv_cache_capacity:
        return config
    return read_edgellm_member(reader, replace(limits, max_kv_cache_capacity=held), "base")[0]


def _check_pools(base: Reader, draft: Reader, limits: Limits, found: DeploymentConfig) -> None:
    """Refuse spare pages where the reference cannot keep them: beside "mtp", recurrent layers, and KV that is the base's."""
    config = found.base
    keeps = found.spec is not None and found.spec.mode != "mtp" and bool(config.layers) and not config.num_recurrent_layers
    check_pool_retention(base, limits, keeps)
    check_pool_retention(draft, limits, keeps and not found.shares_target_kv)
