"""Weights room: rotary tables, LoRA adapters, external weights and the files that they come from."""

from __future__ import annotations

from numba_kv.config.lora_layout import LoRALayout
from numba_kv.config.lora_target import LoRATarget
from numba_kv.config.rope_frequencies import keys_stay_valid
from numba_kv.config.rope_layout import RopeLayout, engine_layouts
from numba_kv.weights.binding import Shard, WeightBinding, WeightInput
from numba_kv.weights.checkpoint import Checkpoint
from numba_kv.weights.external import ExternalWeightManager, TensorTable, arena_nbytes
from numba_kv.weights.lora_manager import NO_ADAPTER_HASH, LoRAManager
from numba_kv.weights.lora_slots import LoRAAdapter
from numba_kv.weights.lora_targets import targets_from_config
from numba_kv.weights.lora_tensors import LoRATensors
from numba_kv.weights.rope_cache import RopeCache, RopeStats
from numba_kv.weights.rope_gather import RopeGather, RowSets
from numba_kv.weights.rope_table import RopeTable
from numba_kv.weights.safetensors_file import SafetensorsFile
from numba_kv.weights.safetensors_header import TensorEntry
from numba_kv.weights.upload import Progress, Uploader

__all__ = [
    "NO_ADAPTER_HASH",
    "LoRAAdapter",
    "LoRALayout",
    "LoRAManager",
    "LoRATarget",
    "LoRATensors",
    "targets_from_config",
    "RopeCache",
    "RopeGather",
    "RopeLayout",
    "RopeStats",
    "RopeTable",
    "RowSets",
    "engine_layouts",
    "keys_stay_valid",
    "Shard",
    "WeightBinding",
    "WeightInput",
    "Checkpoint",
    "ExternalWeightManager",
    "TensorTable",
    "arena_nbytes",
    "SafetensorsFile",
    "TensorEntry",
    "Progress",
    "Uploader",
]
