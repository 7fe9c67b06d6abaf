"""The device of a transformers model: resources where it is, on the stream on which torch enqueues."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from numba_kv.device import resolve_target
from numba_kv.errors import CapacityError, InputError
from numba_kv.plan import plan_memory
from numba_kv.shared_resources import SharedResources

if TYPE_CHECKING:
    from numba_kv.config import LLMEngineConfig
    from numba_kv.device import Device

__all__ = ["follow_stream", "open_resources", "place_of"]

#: How the driver calls the legacy default stream, which is torch's own as long as no other is chosen, where 0 means "none".
_LEGACY_STREAM = 1


def open_resources(config: LLMEngineConfig, place: Any, target: str | None, memory_bytes: int | None) -> SharedResources:
    """Allocate the caches of a model on `place`, a torch device.

    Raises
    ------
    InputError
        If `target` cannot serve a model there.
    CapacityError
        If a host has not the memory that the caches take once they are full.
    PlanError, TargetError
        See `SharedResources.create_for_llm`.

    Stream: torch's current one. Waits once.
    """
    name = target or ("cuda" if place.type == "cuda" else _host_target())
    if place.type not in ("cuda", "cpu") or (name == "cuda") != (place.type == "cuda"):
        raise InputError(f"target: {name!r} cannot serve a model on {place}; put the model there, or leave target out")
    stream = _current_stream(place) if name == "cuda" else None
    if name != "cuda":
        _check_host(plan_memory(config, memory_bytes).nbytes)
    return SharedResources.create_for_llm(
        config, stream=stream, target=name, device=place.index or 0, memory_bytes=memory_bytes
    )


def place_of(device: Device) -> Any:
    """Return where torch has the memory of a device: torch.device."""
    return torch.device("cuda", device.ordinal) if device.target == "cuda" else torch.device("cpu")


def follow_stream(resources: SharedResources, place: Any) -> None:
    """Move all further work to torch's current stream of `place`, if it is another. Stream: enqueues an event."""
    stream = _current_stream(place)
    if int(getattr(stream, "cuda_stream", stream)) != resources.stream.handle:
        resources.hand_over(stream)


def _check_host(nbytes: int) -> None:
    """Raise CapacityError if the machine has less memory: a system gives more than it has, and later ends who uses it."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # a system that does not tell
        return
    if 0 < whole < nbytes:
        raise CapacityError(
            f"caches of {nbytes} bytes are wanted, the machine has {whole}; lower max_batch or max_tokens",
            needed=nbytes,
            free=whole,
        )


def _host_target() -> str:
    """Return the default target if it is one of the host."""
    name = resolve_target()
    return "cpu" if name == "cuda" else name


def _current_stream(place: Any) -> Any:
    """Return torch's current stream of a device; its default one by the number that the driver has for it."""
    stream = torch.cuda.current_stream(place)
    return stream if stream.cuda_stream else _LEGACY_STREAM
