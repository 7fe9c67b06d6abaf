"""Multimodal rotary embedding: which of a token's three positions (time, height, width) turns which pair of channels."""

from __future__ import annotations

from numba_kv.config.read import Reader
from numba_kv.config.rope import RopeConfig

__all__ = ["has_axes", "pair_axes"]


def has_axes(config: RopeConfig) -> bool:
    """Return whether positions have three axes: the parameters name a section of pairs for each."""
    return config.parameters.get("mrope_section") is not None


def pair_axes(config: RopeConfig) -> tuple[int, ...]:
    """Return the axis of every pair: 0 time, 1 height, 2 width; all 0 where positions have one axis.

    ::

        chunked      T T T T H H H W W W           sections (4, 3, 3)
        interleaved  T H W T H W T H W T

    Raises
    ------
    ConfigError
        If there are fewer than three sections, or they are not all pairs together.
    """
    pairs = config.rotary_dim // 2
    if not has_axes(config):
        return (0,) * pairs
    reader = Reader(f"{config.rope_type} rope", config.parameters, null_is_absent=True)
    section = reader.integers("mrope_section")
    if len(section) < 3 or sum(section) != pairs:
        raise reader.wrong("mrope_section", section, f"at least three integers that sum to {pairs} pairs of channels")
    if not reader.boolean("mrope_interleaved", False):
        return tuple(index % 3 for index, count in enumerate(section) for _ in range(count))
    return tuple(axis if axis and pair < 3 * section[axis] else 0 for pair, axis in ((p, p % 3) for p in range(pairs)))
