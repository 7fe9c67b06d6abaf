"""Caches of an LLM runtime: KV page pools, page tables and sliding-window rotation, alive as long as the process.

Knows the public names and the modules that hold them. A name is resolved when it is first used, so that importing
numba_kv loads neither NumPy, ml_dtypes, Numba nor CUDA.
"""

__version__ = "0.1.0"

# Not from typing: importing it would double the cost of importing this package. Type checkers know the name.
TYPE_CHECKING = False

_MODULES = {
    "numba_kv.batch": (
        "AuditReport",
        "Batch",
        "CapturedRound",
        "CapturedStep",
        "KVSnapshot",
        "Prompt",
        "RoundSteps",
        "Sequence",
        "SpeculativeBatch",
        "StepRope",
        "StepView",
        "SwappedSequence",
        "update_together",
    ),
    "numba_kv.bindings": ("TensorMap", "bind"),
    "numba_kv.cache": (
        "HeadNorm",
        "HybridCacheManager",
        "KVCacheManager",
        "KVIO",
        "KVPageTable",
        "MambaCacheManager",
        "PagedAttention",
        "SlotState",
    ),
    "numba_kv.config": (
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
        "load_deployment_config",
        "load_engine_config",
    ),
    "numba_kv.context": ("ReuseOptions",),
    "numba_kv.device": ("Stream", "Tensor", "target"),
    "numba_kv.dtypes": ("DType", "dtype"),
    "numba_kv.errors": (
        "CapacityError",
        "ConfigError",
        "DeviceError",
        "InputError",
        "InteropError",
        "InvariantError",
        "LoRAError",
        "NumbaKVError",
        "PlanError",
        "RewindTooFar",
        "ShapeError",
        "StateError",
        "TargetError",
        "TraceError",
        "UnsupportedModelError",
        "WeightError",
    ),
    "numba_kv.geometry": ("Window",),
    "numba_kv.kernels.layout": ("Status",),
    "numba_kv.kernels.state_commit": ("CommitStatus",),
    "numba_kv.ledger.reuse.content": ("MediaSpan",),
    "numba_kv.ledger.reuse.policy": ("PublishPolicy",),
    "numba_kv.ledger.reuse.prefix_cache": ("CacheLimits",),
    "numba_kv.plan": ("MemoryPlan", "plan_memory"),
    "numba_kv.shared_resources": ("SharedResources", "allocate_zero_buffer"),
    "numba_kv.weights": (
        "Checkpoint",
        "ExternalWeightManager",
        "LoRAManager",
        "RopeCache",
        "SafetensorsFile",
        "WeightBinding",
        "WeightInput",
        "targets_from_config",
    ),
}

#: Public name -> the module that defines it.
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> object:
    """Import the module of a public name at its first use (PEP 562)."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'numba_kv' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names beside what is loaded already."""
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:  # the same table for type checkers and editors; a test compares the two
    from numba_kv.batch import (
        AuditReport as AuditReport,
        Batch as Batch,
        CapturedRound as CapturedRound,
        CapturedStep as CapturedStep,
        KVSnapshot as KVSnapshot,
        Prompt as Prompt,
        RoundSteps as RoundSteps,
        Sequence as Sequence,
        SpeculativeBatch as SpeculativeBatch,
        StepRope as StepRope,
        StepView as StepView,
        SwappedSequence as SwappedSequence,
        update_together as update_together,
    )
    from numba_kv.bindings import TensorMap as TensorMap, bind as bind
    from numba_kv.cache import (
        KVIO as KVIO,
        HeadNorm as HeadNorm,
        HybridCacheManager as HybridCacheManager,
        KVCacheManager as KVCacheManager,
        KVPageTable as KVPageTable,
        MambaCacheManager as MambaCacheManager,
        PagedAttention as PagedAttention,
        SlotState as SlotState,
    )
    from numba_kv.config import (
        AttentionLayer as AttentionLayer,
        DeploymentConfig as DeploymentConfig,
        GatedDeltaNetLayer as GatedDeltaNetLayer,
        LLMEngineConfig as LLMEngineConfig,
        LoRATarget as LoRATarget,
        Mamba1Layer as Mamba1Layer,
        Mamba2Layer as Mamba2Layer,
        RecurrentLayer as RecurrentLayer,
        RopeConfig as RopeConfig,
        ShortConvLayer as ShortConvLayer,
        SpecDecodeConfig as SpecDecodeConfig,
        load_deployment_config as load_deployment_config,
        load_engine_config as load_engine_config,
    )
    from numba_kv.context import ReuseOptions as ReuseOptions
    from numba_kv.device import Stream as Stream, Tensor as Tensor, target as target
    from numba_kv.dtypes import DType as DType, dtype as dtype
    from numba_kv.errors import (
        CapacityError as CapacityError,
        ConfigError as ConfigError,
        DeviceError as DeviceError,
        InputError as InputError,
        InteropError as InteropError,
        InvariantError as InvariantError,
        LoRAError as LoRAError,
        NumbaKVError as NumbaKVError,
        PlanError as PlanError,
        RewindTooFar as RewindTooFar,
        ShapeError as ShapeError,
        StateError as StateError,
        TargetError as TargetError,
        TraceError as TraceError,
        UnsupportedModelError as UnsupportedModelError,
        WeightError as WeightError,
    )
    from numba_kv.geometry import Window as Window
    from numba_kv.kernels.layout import Status as Status
    from numba_kv.kernels.state_commit import CommitStatus as CommitStatus
    from numba_kv.ledger.reuse.content import MediaSpan as MediaSpan
    from numba_kv.ledger.reuse.policy import PublishPolicy as PublishPolicy
    from numba_kv.ledger.reuse.prefix_cache import CacheLimits as CacheLimits
    from numba_kv.plan import MemoryPlan as MemoryPlan, plan_memory as plan_memory
    from numba_kv.shared_resources import (
        SharedResources as SharedResources,
        allocate_zero_buffer as allocate_zero_buffer,
    )
    from numba_kv.weights import (
        Checkpoint as Checkpoint,
        ExternalWeightManager as ExternalWeightManager,
        LoRAManager as LoRAManager,
        RopeCache as RopeCache,
        SafetensorsFile as SafetensorsFile,
        WeightBinding as WeightBinding,
        WeightInput as WeightInput,
        targets_from_config as targets_from_config,
    )
