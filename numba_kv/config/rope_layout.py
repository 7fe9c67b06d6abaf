"""Where a rotary table and its constants lie in one block of memory: pure numbers, for building and for planning.

::

float32 rows [D]    [num_rows, S0]   short sequences        row = one position: D/2 cosines, then D/2 sines
                    [num_rows, S1]   long sequences, where a type tells them apart
float64 [V, D/2]    turns a position of each pair
float64 [V]         magnitudes
int32   [D/2]       axis of each pair
int64   [V * num_rows, 2]            first row and length of each row set
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from numba_kv.config.engine import LLMEngineConfig
from numba_kv.config.rope import RopeConfig
from numba_kv.config.rope_axes import has_axes
from numba_kv.config.rope_frequencies import variant_limits
from numba_kv.geometry import round_up

__all__ = ["RopeLayout", "engine_layouts"]

_ALIGNMENT = 256
#: Rows of which any number of channels is a multiple of the alignment.
_ROW_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class RopeLayout:
    """Memory of one table.

    Attributes
    ----------
    config : RopeConfig
        Its rotation.
    length : int
        Positions: the longest sequence it serves.
    num_rows : int
        Sequences that have positions of their own (MRoPE); else 1.
    """

    config: RopeConfig
    length: int
    num_rows: int = 1

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Longest sequence of each variant V, ascending; the last is `length`."""
        return variant_limits(self.config, self.length)

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Table row at which each variant begins."""
        found, at = [], 0
        for limit in self.limits:
            found.append(at)
            at += round_up(self.num_rows * limit, _ROW_ALIGNMENT)
        return tuple(found)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the table of the longest sequences: ``[num_rows, S, D]``."""
        return self.num_rows, self.length, self.config.rotary_dim

    @property
    def total_rows(self) -> int:
        """Table rows of all variants."""
        return self.first_rows[-1] + self.num_rows * self.limits[-1]

    def parts(self) -> dict[str, tuple[int, str, tuple[int, ...]]]:
        """Return first byte, element type and shape of each part."""
        variants, pairs = len(self.limits), self.config.rotary_dim // 2
        shapes: dict[str, tuple[str, int, tuple[int, ...]]] = {
            "table": ("float32", 4, (self.total_rows, self.config.rotary_dim)),
            "frequencies": ("float64", 8, (variants, pairs)),
            "magnitudes": ("float64", 8, (variants,)),
            "axes": ("int32", 4, (pairs,)),
            "sets": ("int64", 8, (variants * self.num_rows, 2)),
        }
        found, at = {}, 0
        for name, (kind, size, shape) in shapes.items():
            found[name] = (at, kind, shape)
            at += round_up(size * math.prod(shape), _ALIGNMENT)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block."""
        at, _, shape = self.parts()["sets"]
        return at + round_up(8 * math.prod(shape), _ALIGNMENT)


def engine_layouts(config: LLMEngineConfig, *, mrope_rows: int | None = None) -> tuple[RopeLayout, ...]:
    """Return the tables that an engine reads: one for each of its ropes (sliding layers first), as long as its capacity.

    Parameters
    ----------
    config : LLMEngineConfig
        The engine.
    mrope_rows : int, optional
        Row sets of a multimodal table; default: one a row of the batch, as the reference has it.

    Raises
    ------
    ConfigError
        If a rope has no table.
    """
    rows = config.max_batch_size if mrope_rows is None else mrope_rows
    return tuple(
        RopeLayout(config=rope, length=config.max_kv_cache_capacity, num_rows=rows if has_axes(rope) else 1)
        for rope in config.ropes
    )
