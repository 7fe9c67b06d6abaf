"""What each owner of tensors binds: caches, tables, a step, scratch memory, rotary rows, adapters.

Each function takes its owner alone and returns names and tensors; nothing is allocated, copied or enqueued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numba_kv.bindings.names import (
    DEEPSTACK_EMBEDS,
    KV_PAGE_TABLE,
    KV_SLOT_MAPPING,
    STATE_PREFIXES,
    SWA_KV_CACHE_MODE,
    ZERO_BUFFER,
    intermediate_names,
    is_lora_name,
    kv_names,
    rope_names,
    state_names,
    window_suffixes,
)
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, InputError, ShapeError

if TYPE_CHECKING:
    from numba_kv.batch import StepView
    from numba_kv.cache import HybridCacheManager
    from numba_kv.config import LLMEngineConfig
    from numba_kv.shared_resources import SharedResources

__all__ = ["bind_deepstack", "bind_kv", "bind_lora", "bind_rope", "bind_scratch", "bind_states", "bind_step", "bind_tables"]


def bind_kv(manager: HybridCacheManager, layers: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return the pool of each attention layer under its two names; a layer that borrows KV has its donor's.

    Tensors: [2, N, P, H, D], in groups of layout HND [2, N, H, P, D], in the KV element type; N is that of the layer's window
    group, and so is what its V ids are shifted by. A layer is therefore addressed by the tables of its own group alone.

    Parameters
    ----------
    manager : HybridCacheManager
        The caches.
    layers : sequence of int, optional
        Of a draft that reads them: the attention layer whose KV each of its own layers reads. Default: each its own.
    """
    pools = manager.kv_cache
    read = range(pools.num_layers) if layers is None else layers
    return {name: pools.kv(layer) for place, layer in enumerate(read) for name in kv_names(place)}


def bind_states(manager: HybridCacheManager) -> dict[str, Tensor]:
    """Return the states of each recurrent layer under their names, and what a verification step keeps, if there is any.

    States: [slots, H, D, S] and [slots, C, columns], of convolutions alone the latter; before and after a step the same memory,
    found by ``state_indices``.
    Snapshots and stashes: [T, ...], where T are the rows x tokens of the last `reshape_intermediate_states`.
    """
    states = manager.mamba_cache
    found: dict[str, Tensor] = {}
    for layer in range(states.num_layers):
        for name in state_names(manager.plan.config):
            found.update(dict.fromkeys((f"{prefix}{name}_{layer}" for prefix in STATE_PREFIXES), states.state(name, layer)))
        for name in intermediate_names(manager.plan.config):
            kept = states.state(name, layer)
            memory, shape = kept._memory, (kept.shape[0] * kept.shape[1], *kept.shape[2:])
            at = kept.address - memory.address
            found[f"{name}_{layer}"] = Tensor(memory, kept.device, kept.dtype, shape, offset_nbytes=at)
    return found


def bind_tables(manager: HybridCacheManager, view: StepView, config: LLMEngineConfig | None = None) -> dict[str, Tensor]:
    """Return page tables int32 [num_rows, 2, L] and slots int64 [num_tokens] of full and of window layers.

    In full mode window layers have full rows: their names are aliases, the very tensors of full attention. A model without
    windows has no such names. With several windows their names are numbered in model order. `config` is the model whose
    windows they are; default: that of the caches.
    """
    groups = {group.window: group.index for group in manager.plan.groups}
    config, found = manager.plan.config if config is None else config, {}
    of_group = [
        (table[: view.num_rows], slots[: view.num_tokens])
        for table, slots in zip(view.page_tables, view.slot_mapping, strict=True)
    ]
    found[KV_PAGE_TABLE], found[KV_SLOT_MAPPING] = of_group[0]
    for window, suffix in window_suffixes(config).items():
        table, slots = of_group[groups[window] if config.use_bounded_swa else 0]
        found[f"swa_{KV_PAGE_TABLE}{suffix}"] = table
        found[f"swa_{KV_SLOT_MAPPING}{suffix}"] = slots
    return found


def bind_step(manager: HybridCacheManager, view: StepView) -> dict[str, Tensor]:
    """Return what describes the tokens and rows of a step: int32, [num_tokens], [num_rows] or, for offsets, [num_rows + 1].

    `query_lengths` are the tokens that rows really appended, so that past_lengths + query_lengths are
    attention_sequence_lengths also where the device decided. Dropped tokens have position 0 and slot -1. `state_indices` are
    there if the model has recurrent layers; -1 for rows that are not in use.
    """
    rows = view.num_rows
    buffers: Any = manager.step_buffers  # which makes its arrays by the names of the plan
    states = {"state_indices": view.state_index[:rows]} if manager.mamba_cache.num_layers else {}
    return {
        **states,
        "positions": view.positions[: view.num_tokens],
        "query_start_offsets": view.cu_seqlens_q[: rows + 1],
        "query_lengths": buffers.appended[0][:rows],
        "past_lengths": view.context_lens[:rows],
        "attention_sequence_lengths": view.seq_lens[:rows],
    }


def bind_scratch(resources: SharedResources, index: int = 0) -> dict[str, Tensor]:
    """Return the zero buffer, uint8 [bytes], and with window layers the mode: int8 [1] for rings, [0] for full rows."""
    found, mode = {ZERO_BUFFER: resources.zero_buffer}, resources.get_swa_kv_cache_mode(index)
    if mode is not None:
        found[SWA_KV_CACHE_MODE] = mode
    return found


def bind_deepstack(resources: SharedResources, view: StepView) -> dict[str, Tensor]:
    """Return the deep-stack inputs of a step without images: float16 [num_tokens, hidden_size], zeros, all the same memory.

    Raises
    ------
    CapacityError
        If the zero buffer holds fewer tokens; in bytes. It is sized for decode steps, one token a row, or, beside a draft,
        for verification steps.
    """
    config, zeros = resources.config, resources.zero_buffer
    if not config.num_deepstack_features:
        return {}
    half = dtype("float16")
    shape = (view.num_tokens, config.hidden_size)
    nbytes = shape[0] * shape[1] * half.itemsize
    if nbytes > zeros.nbytes:
        raise CapacityError(
            f"zero buffer: {zeros.nbytes} bytes do not hold {shape[0]} tokens of {shape[1]} deep-stack channels, which take "
            f"{nbytes}; pass the features of the step as `extra`, or call allocate_zero_buffer(resources, {nbytes}) first",
            needed=nbytes,
            free=zeros.nbytes,
        )
    memory = zeros._memory
    nothing = Tensor(memory, resources.device, half, shape, offset_nbytes=zeros.address - memory.address)
    return {f"{DEEPSTACK_EMBEDS}_{feature}": nothing for feature in range(config.num_deepstack_features)}


def bind_rope(rows: Sequence[Tensor], view: StepView) -> dict[str, Tensor]:
    """Return the rotary inputs of a step: float32 [num_tokens, D] each.

    Parameters
    ----------
    rows : sequence of Tensor
        float32 [T, D], as `RopeGather.rows`: none, one, or those of sliding and of full layers in this order.
    view : StepView
        The step.

    Raises
    ------
    InputError, ShapeError
        If there are more than two, or one is not of that form or shorter than the step.
    """
    if len(rows) > 2:
        raise InputError(f"rows: {len(rows)} rotary inputs given; one, or one of sliding and one of full layers")
    found = {}
    for name, tensor in zip(rope_names(len(rows)), rows, strict=True):
        if tensor.dtype is not dtype("float32") or tensor.ndim != 2 or tensor.shape[0] < view.num_tokens:
            raise ShapeError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} given, float32 [at least {view.num_tokens} tokens, D] wanted"
            )
        found[name] = tensor[: view.num_tokens]
    return found


def bind_lora(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices of an adapter, A [k, r] and B [r, n], under the names of the engine.

    Raises
    ------
    InputError
        If a name holds neither ``lora_A`` nor ``lora_B``: it would be taken for a weight, which is bound for good.
    """
    for name in tensors:
        if not is_lora_name(name):
            raise InputError(f"name: {name!r} holds neither 'lora_A' nor 'lora_B'")
    return dict(tensors)
