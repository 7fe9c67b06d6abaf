"""The adapters of an engine: whether it takes those that are given, and the manager that holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from numba_kv.config import LLMEngineConfig
from numba_kv.errors import ConfigError, InputError
from numba_kv.plan import lora_layout
from numba_kv.weights.lora_manager import LoRAManager

if TYPE_CHECKING:
    from numba_kv.device import Device, Memory
    from numba_kv.weights.upload import Uploader

__all__ = ["adapters_to_load", "make_lora_manager"]


def adapters_to_load(config: LLMEngineConfig, lora_weights_map: Mapping[str, str | Path] | None) -> dict[str, str | Path]:
    """Return names and files of the adapters to load; empty paths are skipped.

    Raises
    ------
    ConfigError
        If there are some and `config` takes none.
    """
    if not isinstance(lora_weights_map, (Mapping, type(None))):
        raise InputError(f"lora_weights_map: {type(lora_weights_map).__name__} is not a mapping of names to paths")
    adapters = {name: path for name, path in (lora_weights_map or {}).items() if path}
    if adapters and lora_layout(config) is None:
        raise ConfigError(
            f"lora_weights_map: {', '.join(adapters)} given, but max_lora_rank is {config.max_lora_rank} and "
            f"{len(config.lora_targets)} lora_targets are declared; set both (targets_from_config lists usual targets)"
        )
    return adapters


def make_lora_manager(
    device: Device, take: Callable[[str, int], Memory], config: LLMEngineConfig, uploader: Uploader
) -> LoRAManager | None:
    """Return the manager of an engine's adapters, or None if it takes none. It borrows `uploader`. Cost: as planned."""
    layout = lora_layout(config)
    if layout is None:
        return None
    return LoRAManager(
        device,
        take,
        layout.targets,
        max_rank=layout.max_rank,
        max_adapters=layout.max_adapters,
        dtype=layout.dtype,
        max_batch_size=layout.max_batch_size,
        uploader=uploader,
    )
