"""Where recurrent states lie in memory: pure numbers, for planning and for the manager.

Every array is one slab: a layer's part starts at a multiple of 256 bytes. ::

    recurrent_state               [layers, slots, H, D, S]           state of each resident slot, where layers have one
    conv_state                    [layers, slots, C, columns]
    intermediate_recurrent_state  [layers, B, V, H, D, S]            V = max_verify_tokens; snapshot mode
    intermediate_conv_state       [layers, B, V, C, columns]         unless drafts have room in conv_state
    replay_da_state, replay_dt_state  float32 [layers, B, V, H]      replay mode, Mamba-2: decay and step size,
    replay_u_state                float32 [layers, B, V, H, D]       input,
    replay_b_state                float32 [layers, B, V, G, S]       input matrix
    replay_k_state                float32 [layers, B, V, G, D]       replay mode, gated delta net: normalised key,
    replay_g_state, replay_beta_state float32 [layers, B, V, H]      decay (not its logarithm) and gate,
    replay_v_state                [layers, B, V, H, S]               value, of the convolution state's type

A slot outside of these arrays (`slot_nbytes`) has its layers behind each other, at whole words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.config.recurrent import GatedDeltaNetLayer, Mamba2Layer
from numba_kv.dtypes import dtype
from numba_kv.geometry import round_up

if TYPE_CHECKING:
    from numba_kv.config.engine import LLMEngineConfig

__all__ = ["RESIDENT_STATES", "StatePlan", "slot_nbytes", "state_plans"]

#: What a slot holds between steps.
RESIDENT_STATES = ("recurrent_state", "conv_state")
_ALIGNMENT, _WORD = 256, 8


@dataclass(frozen=True, slots=True)
class StatePlan:
    """One array of all recurrent layers.

    Attributes
    ----------
    name : str
        What the reference calls it, without a layer's number.
    shape : tuple of int
        ``[layers, rows or slots, ...]``.
    dtype : str
        Element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def layer_nbytes(self) -> int:
        """Distance between two layers in bytes."""
        return round_up(math.prod(self.shape[1:]) * dtype(self.dtype).itemsize, _ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.shape[0] * self.layer_nbytes


def state_plans(config: LLMEngineConfig) -> tuple[StatePlan, ...]:
    """Return the arrays of a model's recurrent layers; none if it has no such layer."""
    layer, layers = config.recurrent_layer, config.num_recurrent_layers
    if layer is None:
        return ()
    rows, verify = config.max_batch_size, config.max_verify_tokens
    state, conv = layer.state_shape, layer.conv_shape(config.conv_state_room)
    heads, dim, size = state
    found = [StatePlan("conv_state", (layers, rows, *conv), layer.conv_state_dtype)]
    if layer.has_recurrent_state:
        found.insert(0, StatePlan("recurrent_state", (layers, rows, *state), layer.recurrent_state_dtype))
    head = (layers, rows, verify)
    if config.has_conv_snapshots:
        found.append(StatePlan("intermediate_conv_state", (*head, *conv), layer.conv_state_dtype))
    if verify and layer.has_recurrent_state and config.recurrent_spec_verify_mode == "snapshot":
        found.append(StatePlan("intermediate_recurrent_state", (*head, *state), layer.recurrent_state_dtype))
    elif verify and isinstance(layer, Mamba2Layer):
        found += [
            StatePlan("replay_da_state", (*head, heads), "float32"),
            StatePlan("replay_u_state", (*head, heads, dim), "float32"),
            StatePlan("replay_b_state", (*head, layer.num_groups, size), "float32"),
            StatePlan("replay_dt_state", (*head, heads), "float32"),
        ]
    elif verify and isinstance(layer, GatedDeltaNetLayer):
        found += [
            StatePlan("replay_k_state", (*head, layer.num_key_heads, dim), "float32"),
            StatePlan("replay_g_state", (*head, heads), "float32"),
            StatePlan("replay_beta_state", (*head, heads), "float32"),
            StatePlan("replay_v_state", (*head, heads, size), layer.conv_state_dtype),
        ]
    return tuple(found)


def slot_nbytes(config: LLMEngineConfig) -> int:
    """Return the bytes that a slot's states take outside of the arrays; 0 without recurrent layers."""
    slabs = [plan for plan in state_plans(config) if plan.name in RESIDENT_STATES]
    return sum(p.shape[0] * round_up(math.prod(p.shape[2:]) * dtype(p.dtype).itemsize, _WORD) for p in slabs)
