"""The binding names of an engine, and which of them may be bound again.

Knows names alone, as TensorRT Edge-LLM spells them. Does not know tensors. Suffixes count attention layers,
or recurrent ones, not decoder layers.

Names of our own: ``kv_slot_mapping`` and ``swa_kv_slot_mapping`` (where each token of the step is written), ``zero_buffer``,
the stash of a gated delta net (``replay_k_state_0``, ``replay_g_state_0``, ``replay_beta_state_0``, ``replay_v_state_0``, ...),
and a suffix ``_1``, ``_2``, ... in model order on the names of window tables if a model has several windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from numba_kv.config.state_layout import RESIDENT_STATES, state_plans

if TYPE_CHECKING:
    from numba_kv.config import LLMEngineConfig
    from numba_kv.geometry import Window

__all__ = [
    "DEEPSTACK_EMBEDS",
    "KV_PAGE_TABLE",
    "KV_SLOT_MAPPING",
    "PAST_KEY_VALUES",
    "PRESENT_KEY_VALUES",
    "STATE_PREFIXES",
    "SWA_KV_CACHE_MODE",
    "ZERO_BUFFER",
    "Rebind",
    "binding_names",
    "intermediate_names",
    "is_lora_name",
    "kv_names",
    "rebind_rule",
    "rope_names",
    "state_names",
    "window_suffixes",
]

KV_PAGE_TABLE = "kv_page_table"
KV_SLOT_MAPPING = "kv_slot_mapping"
PAST_KEY_VALUES = "past_key_values"
PRESENT_KEY_VALUES = "present_key_values"
SWA_KV_CACHE_MODE = "swa_kv_cache_mode"
DEEPSTACK_EMBEDS = "deepstack_embeds"
ZERO_BUFFER = "zero_buffer"

#: A state's names: before a step, and behind it.
STATE_PREFIXES = ("", "present_")
#: Inputs that describe the tokens and rows of a step, in the order of the reference.
_STEP = (
    "positions",
    "query_start_offsets",
    "query_lengths",
    "past_lengths",
    "attention_sequence_lengths",
    "state_indices",
)
#: What the model's runner brings: activations, outputs, and inputs of which only the shape has a meaning.
_RUNNER = (
    "inputs_embeds",
    "logits_indices",
    "logits",
    "hidden_states",
    "execution_phase_marker",
    "context_sequence_count_carrier",
    "skip_softmax_scale",
    "vision_block_ids",
    "context_mask_selector",
)


class Rebind(Enum):
    """What may change when a name is bound again. The element type never does.

    Attributes
    ----------
    NEVER
        Nothing: pools, states and weights live as long as their owner.
    SIZE
        The first extent: rows or tokens of a step. The address stays, so a captured graph reads on.
    ANYTHING
        Address and shape: activations, features, adapters, rotary tables.
    """

    NEVER = "never"
    SIZE = "size"
    ANYTHING = "anything"


_SIZE = re.compile(
    rf"({'|'.join(_STEP)}|(swa_)?kv_(page_table|slot_mapping)(_\d+)?|(intermediate_(recurrent|conv)|replay_[a-z]+)_state_\d+)"
)
_ANYTHING = re.compile(
    rf"({'|'.join(_RUNNER)}|{ZERO_BUFFER}|({DEEPSTACK_EMBEDS}|ple_token_embeds)_\d+|rope_rotary_cos_sin(_sliding|_full)?"
    r"|.*lora_[AB].*)"
)


def rebind_rule(name: str) -> Rebind:
    """Return what may change when `name` is bound again; names that mean nothing here are those of weights."""
    if _SIZE.fullmatch(name):
        return Rebind.SIZE
    return Rebind.ANYTHING if _ANYTHING.fullmatch(name) else Rebind.NEVER


def is_lora_name(name: str) -> bool:
    """Return whether `name` is that of an adapter's matrix."""
    return "lora_A" in name or "lora_B" in name


def kv_names(layer: int) -> tuple[str, str]:
    """Return the names of an attention layer's pool before and after a step; both are the same memory."""
    return f"{PAST_KEY_VALUES}_{layer}", f"{PRESENT_KEY_VALUES}_{layer}"


def state_names(config: LLMEngineConfig) -> tuple[str, ...]:
    """Return what the names of states before a step start with, a layer's number left out: recurrent, convolution.

    Behind the step they begin with ``present_``, and are the same memory.
    """
    return tuple(state.name for state in state_plans(config) if state.name in RESIDENT_STATES)


def intermediate_names(config: LLMEngineConfig) -> tuple[str, ...]:
    """Return what the names of snapshots and stashes of a verification step start with, a layer's number left out."""
    return tuple(state.name for state in state_plans(config) if state.name not in RESIDENT_STATES)


def rope_names(count: int) -> tuple[str, ...]:
    """Return the names of `count` rotary inputs: one, or those of sliding and of full layers."""
    names = {0: (), 1: ("rope_rotary_cos_sin",), 2: ("rope_rotary_cos_sin_sliding", "rope_rotary_cos_sin_full")}
    return names[count]


def window_suffixes(config: LLMEngineConfig) -> dict[Window, str]:
    """Return the windows of a model in model order and what their names end in: nothing if there is one."""
    windows = list(dict.fromkeys(layer.window for layer in config.layers if not layer.window.is_full))
    if len(windows) == 1:
        return {windows[0]: ""}
    return {window: f"_{place}" for place, window in enumerate(windows, start=1)}


def binding_names(config: LLMEngineConfig) -> tuple[str, ...]:
    """Return the inputs and outputs that an engine of `config` declares, adapters and external weights left out.

    `bind` binds those of the caches; `TensorMap.missing` tells which are left for the caller. Names of our own are not here.
    """
    return tuple(_declared(config))


def _declared(config: LLMEngineConfig) -> Iterator[str]:
    yield "inputs_embeds"
    yield from _STEP
    yield from ("logits_indices", "execution_phase_marker", "context_sequence_count_carrier", "logits", KV_PAGE_TABLE)
    suffixes = window_suffixes(config)
    yield from (f"swa_{KV_PAGE_TABLE}{suffix}" for suffix in suffixes.values())
    if suffixes:
        yield SWA_KV_CACHE_MODE
    yield from rope_names(len(config.ropes))
    for layer in range(len(config.layers)):
        yield from kv_names(layer)
    states, intermediate = state_names(config), intermediate_names(config)
    for layer in range(config.num_recurrent_layers):
        yield from (f"{prefix}{name}_{layer}" for name in states for prefix in STATE_PREFIXES)
        yield from (f"{name}_{layer}" for name in intermediate)
    yield from (f"{DEEPSTACK_EMBEDS}_{feature}" for feature in range(config.num_deepstack_features))
