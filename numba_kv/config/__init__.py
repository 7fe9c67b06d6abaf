"""What a model's caches are and the limits they are built for: frozen dataclasses, and the reading of ``config.json``.

Knows no bytes and no device; imports neither NumPy nor Numba.
"""

from numba_kv.config.deployment import DeploymentConfig, SpecDecodeConfig
from numba_kv.config.engine import MAX_KV_CACHE_CAPACITY, LLMEngineConfig
from numba_kv.config.layers import AttentionLayer, check_donors
from numba_kv.config.load import load_engine_config
from numba_kv.config.load_deployment import load_deployment_config
from numba_kv.config.lora_target import LoRATarget
from numba_kv.config.recurrent import GatedDeltaNetLayer, Mamba1Layer, Mamba2Layer, RecurrentLayer, ShortConvLayer
from numba_kv.config.rope import RopeConfig
from numba_kv.geometry import FULL, Window

__all__ = [
    "FULL",
    "MAX_KV_CACHE_CAPACITY",
    "AttentionLayer",
    "DeploymentConfig",
    "GatedDeltaNetLayer",
    "LLMEngineConfig",
    "LoRATarget",
    "Mamba1Layer",
    "Mamba2Layer",
    "RecurrentLayer",
    "RopeConfig",
    "ShortConvLayer",
    "SpecDecodeConfig",
    "Window",
    "check_donors",
    "load_deployment_config",
    "load_engine_config",
]
