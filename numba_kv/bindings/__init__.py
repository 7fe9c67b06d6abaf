"""Binding names of an engine and the tensors behind them."""

from __future__ import annotations

from numba_kv.bindings.names import Rebind, binding_names, rebind_rule
from numba_kv.bindings.resources import bind
from numba_kv.bindings.sources import (
    bind_deepstack,
    bind_kv,
    bind_lora,
    bind_rope,
    bind_scratch,
    bind_states,
    bind_step,
    bind_tables,
)
from numba_kv.bindings.tensor_map import BindingSnapshot, BoundTensor, TensorMap, TensorMapView

__all__ = [
    "BindingSnapshot",
    "BoundTensor",
    "Rebind",
    "TensorMap",
    "TensorMapView",
    "bind",
    "bind_deepstack",
    "bind_kv",
    "bind_lora",
    "bind_rope",
    "bind_scratch",
    "bind_states",
    "bind_step",
    "bind_tables",
    "binding_names",
    "rebind_rule",
]
