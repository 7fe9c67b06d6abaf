"""Tensor-parallel ranks of an Edge-LLM configuration.

Knows how many ranks a file describes and what differs in one of them. Everything else reads the configuration that comes out.
"""

from __future__ import annotations

from numba_kv.config.limits import Limits
from numba_kv.config.read import Reader

__all__ = ["apply_rank"]


def apply_rank(reader: Reader, limits: Limits) -> Reader:
    """Return the configuration of `limits.rank`: the overrides of its entry replace top-level keys as a whole.

    An override of ``builder_config`` therefore replaces the whole section, as in the reference. Without a rank nothing is
    applied, but the list is checked.

    Raises
    ------
    ConfigError
        If the list, ``builder_config.tp_size`` and the expected world size disagree, or the rank is not in the list.
    """
    tp_size = None
    if reader.has("builder_config"):
        builder = reader.section("builder_config")
        tp_size = builder.integer_or_none("tp_size", 1)
    world = limits.expected_world_size
    if not reader.has("rank_configs"):
        _check_single(reader, limits, tp_size)
        return reader
    entries = reader.items("rank_configs")
    if not entries:
        raise reader.wrong("rank_configs", entries, "a non-empty list")
    if tp_size is None:
        raise reader.error("builder_config.tp_size", "missing; it is required beside rank_configs")
    if tp_size != len(entries):
        raise reader.wrong("builder_config.tp_size", tp_size, f"{len(entries)}, the number of rank_configs")
    if world is not None and world != tp_size:
        raise reader.wrong("builder_config.tp_size", tp_size, f"{world}, the expected world size")
    found: dict[int, Reader] = {}
    for index, entry in enumerate(entries):
        item = reader.nested(f"rank_configs[{index}]", entry)
        rank = item.integer("rank", 0, tp_size - 1)
        if rank in found:
            raise item.error("rank", f"{rank} is listed twice; each rank is listed once")
        found[rank] = item.section("config_overrides") if item.has("config_overrides") else item.with_values({})
    if limits.rank is None:
        return reader
    if limits.rank not in found:
        raise reader.error("rank_configs", f"rank {limits.rank} is not from 0 to {tp_size - 1}")
    return reader.with_values({**reader.values, **found[limits.rank].values})


def _check_single(reader: Reader, limits: Limits, tp_size: int | None) -> None:
    world = limits.expected_world_size
    for name, size in (("builder_config.tp_size", tp_size), ("expected_world_size", world)):
        if size is not None and size > 1:
            raise reader.error("rank_configs", f"missing, but {name} is {size}; one entry per rank is required")
    if limits.rank:
        raise reader.error("rank_configs", f"missing, but rank {limits.rank} is asked for")
