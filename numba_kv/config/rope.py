"""Rotary embedding parameters of a model, as its configuration states them.

Knows what a rotary embedding is described by and which parameters its types need. Does not know where in a file they stand: the
dialects do. Does not compute a table.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from numba_kv.config.read import Reader
from numba_kv.geometry import INT32_MAX

__all__ = ["RopeConfig", "partial_rotary_dim", "read_rope_parameters"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of some of a model's layers.

    Attributes
    ----------
    rope_type : str
        ``"default"``, ``"linear"``, ``"dynamic"``, ``"yarn"``, ``"longrope"``, ``"llama3"``, ``"proportional"``, ``"mrope"`` or
        ``"nope"`` (no rotation).
    theta : float
        Base of the frequencies.
    rotary_dim : int
        Channels of a head that are rotated.
    max_position_embeddings : int
        Positions the model was made for.
    parameters : Mapping
        The remaining parameters of the type, under their configuration names; read-only.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    parameters: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", MappingProxyType(dict(self.parameters)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy can be neither pickled nor deep-copied; the dictionary behind it can.
        values = (self.rope_type, self.theta, self.rotary_dim, self.max_position_embeddings, dict(self.parameters))
        return _rebuild, values


def _rebuild(rope_type: str, theta: float, rotary_dim: int, positions: int, parameters: dict[str, object]) -> RopeConfig:
    return RopeConfig(
        rope_type=rope_type, theta=theta, rotary_dim=rotary_dim, max_position_embeddings=positions, parameters=parameters
    )


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def partial_rotary_dim(head_dim: int, factor: float) -> int:
    """Return the rotated channels of a head: `head_dim` x `factor` in float32, truncated. `factor` is in (0, 1]."""
    return int(_float32(_float32(head_dim) * _float32(factor)))


def read_rope_parameters(
    rope_type: str, scaling: Reader, outer: Reader, rotary_dim: int, default_original: int | None
) -> dict[str, object]:
    """Return what `rope_type` needs, checked.

    Parameters
    ----------
    rope_type : str
        Type of the rotation.
    scaling, outer : Reader
        The object of the parameters, and the one around it, where some files keep the original context length.
    rotary_dim : int
        Rotated channels, for the number of long-rope factors.
    default_original : int or None
        Original context length of a file that does not state it; None: it must.

    Raises
    ------
    ConfigError
        If a parameter is missing or out of range.
    """
    if rope_type == "longrope":
        return _read_longrope(scaling, outer, rotary_dim, default_original)
    if rope_type == "llama3":
        low = scaling.number("low_freq_factor")
        high = scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.wrong("high_freq_factor", high, f"above low_freq_factor {low:g}")
        return {
            "factor": scaling.number("factor"),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": _original(scaling, outer, default_original),
        }
    if rope_type == "yarn":
        factor = scaling.number("factor")
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        if scaling.get("attention_factor") is not None:
            magnitude = scaling.number("attention_factor")
        return {
            "factor": factor,
            "beta_fast": scaling.number("beta_fast", 32.0),
            "beta_slow": scaling.number("beta_slow", 1.0),
            "attention_factor": magnitude,
            "original_max_position_embeddings": _original(scaling, outer, default_original),
        }
    if rope_type == "linear":
        return {"factor": scaling.number("factor")}
    if rope_type == "mrope":
        return _read_mrope(scaling)
    return {}


def _original(scaling: Reader, outer: Reader, default: int | None) -> int:
    key = "original_max_position_embeddings"
    source = outer if outer.has(key) and not scaling.has(key) else scaling
    return source.integer(key, 1, INT32_MAX, default)


def _read_longrope(scaling: Reader, outer: Reader, rotary_dim: int, default_original: int | None) -> dict[str, object]:
    found: dict[str, object] = {"original_max_position_embeddings": _original(scaling, outer, default_original)}
    for key in ("long_factor", "short_factor"):
        factors = scaling.numbers(key)
        if len(factors) != rotary_dim // 2:
            raise scaling.error(key, f"{len(factors)} factors; half of the {rotary_dim} rotated channels is required")
        found[key] = factors
    return found


def _read_mrope(scaling: Reader) -> dict[str, object]:
    found: dict[str, object] = {"mrope_interleaved": scaling.boolean("mrope_interleaved", False)}
    if scaling.has("mrope_section"):
        section = scaling.integers("mrope_section")
        if len(section) < 3:
            raise scaling.wrong("mrope_section", section, "at least three integers")
        found["mrope_section"] = section
    return found
