"""Frequencies and magnitude of a rotary embedding, in float64 on the host.

Knows what each type does to the frequencies, and which lengths a type tells apart. Does not know tables or devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba_kv.config.read import Reader
from numba_kv.config.rope import RopeConfig
from numba_kv.errors import ConfigError
from numba_kv.geometry import INT32_MAX

__all__ = ["ROPE_TYPES", "Rotation", "keys_stay_valid", "rotation_of", "variant_limits"]

#: Largest angle whose phase float64 still keeps to 1e-6: three roundings of 2**-53 on the way to it.
_MAX_ANGLE = 3e9


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How positions turn the pairs of channels of a head.

    Attributes
    ----------
    inverse_frequencies : tuple of float
        Radians a position, one for each of the D/2 pairs; 0 leaves a pair as it is.
    magnitude : float
        What cosines and sines are multiplied by (the attention scaling of YaRN and LongRoPE).
    """

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


def rotation_of(config: RopeConfig, length: int) -> Rotation:
    """Return the rotation of sequences of `length` tokens.

    Raises
    ------
    ConfigError
        If the type is unknown, a parameter is missing or out of range, or the phase would be lost before `length`.

    Source: RoFormer (arXiv:2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), Llama 3 (2407.21783); where they leave a
    choice, what transformers does.
    """
    reader = _checked(config)
    found = _TYPES[config.rope_type](config, reader, length)
    fastest = max(found.inverse_frequencies)
    if not (math.isfinite(fastest) and fastest * length <= _MAX_ANGLE):
        raise ConfigError(
            f"rope: a pair turns by {fastest:g} radians a position, which over {length} positions is beyond {_MAX_ANGLE:g}: "
            f"its phase would be lost; check theta {config.theta:g} and the factors"
        )
    if not 0.0 < found.magnitude < math.inf:
        raise ConfigError(f"rope: a magnitude of {found.magnitude:g}; a positive number is wanted, check attention_factor")
    return found


def variant_limits(config: RopeConfig, length: int) -> tuple[int, ...]:
    """Return the lengths up to which each rotation holds, in order; the last is `length`.

    LongRoPE rotates sequences of at most its original length by its short factors and longer ones by its long factors;
    dynamic scaling leaves sequences of at most ``max_position_embeddings`` as they are. All others have one rotation.

    Raises
    ------
    ConfigError
        As `rotation_of`.
    """
    reader = _checked(config)
    limit = length
    if config.rope_type == "longrope":
        limit = _original(config, reader)
    elif config.rope_type == "dynamic" and not reader.has("alpha"):
        limit = config.max_position_embeddings
    return (limit, length) if limit < length else (length,)


def keys_stay_valid(config: RopeConfig, length: int, longer: int) -> bool:
    """Return whether keys rotated for a sequence of `length` tokens can be read when it has grown to `longer`.

    They cannot where the rotation changes on the way: LongRoPE across its original length, dynamic scaling beyond the
    positions of the model. Such a sequence is rotated for its final length from the start, or its keys are computed again.

    Raises
    ------
    ConfigError
        As `rotation_of`.
    """
    return rotation_of(config, length) == rotation_of(config, longer)


def _checked(config: RopeConfig) -> Reader:
    """Return a reader of the parameters of a record whose other fields are in range."""
    if config.rope_type not in _TYPES:
        raise ConfigError(f"rope_type: {config.rope_type!r} is not one of {', '.join(_TYPES)}")
    dim, theta = config.rotary_dim, config.theta
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 2 or dim % 2:
        raise ConfigError(f"rotary_dim: {dim!r} is not a positive, even number of channels")
    if not (isinstance(theta, (int, float)) and not isinstance(theta, bool) and 0.0 < theta < math.inf):
        raise ConfigError(f"theta: {theta!r} is not a positive, finite number")
    positions = config.max_position_embeddings
    if isinstance(positions, bool) or not isinstance(positions, int) or not 1 <= positions <= INT32_MAX:
        raise ConfigError(f"max_position_embeddings: {positions!r} is not an integer from 1 to {INT32_MAX}")
    return Reader(f"{config.rope_type} rope", config.parameters, null_is_absent=True)


def _original(config: RopeConfig, reader: Reader) -> int:
    return reader.integer("original_max_position_embeddings", 1, INT32_MAX, config.max_position_embeddings)


def _plain(dim: int, theta: float) -> list[float]:
    """Return theta ** (-2d / D) of every pair d."""
    return [theta ** (-2.0 * d / dim) for d in range(dim // 2)]


def _default(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    return Rotation(inverse_frequencies=tuple(_plain(config.rotary_dim, config.theta)))


def _none(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    return Rotation(inverse_frequencies=(0.0,) * (config.rotary_dim // 2))


def _linear(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    factor = reader.number("factor")
    return Rotation(inverse_frequencies=tuple(f / factor for f in _plain(config.rotary_dim, config.theta)))


def _proportional(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    """Rotate the first pairs at the pace of the whole head; the others stand still."""
    dim, factor = config.rotary_dim, reader.number("factor", 1.0)
    rotated = int(reader.number("partial_rotary_factor", 1.0, up_to=1.0) * dim // 2)
    moving = tuple(f / factor for f in _plain(dim, config.theta)[:rotated])
    return Rotation(inverse_frequencies=moving + (0.0,) * (dim // 2 - rotated))


def _dynamic(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    """Stretch the base: by `alpha` for every length, or by how far `length` is beyond the model's positions."""
    dim, positions, stretch = config.rotary_dim, config.max_position_embeddings, 1.0
    if reader.has("alpha"):
        stretch = reader.number("alpha")
    elif length > positions:
        if not reader.has("factor"):
            raise reader.error("factor", f"missing; {length} tokens are more than the {positions} positions of the model")
        factor = reader.number("factor")
        stretch = factor * length / positions - (factor - 1.0)
    if stretch == 1.0:
        return _default(config, reader, length)
    if dim <= 2:
        raise ConfigError(f"rotary_dim: {dim} channels cannot be stretched; dynamic scaling needs more than 2")
    try:
        theta = config.theta * stretch ** (dim / (dim - 2))
    except OverflowError:
        theta = math.inf
    if not 0.0 < theta < math.inf:
        raise ConfigError(f"dynamic rope: the base {config.theta:g} stretched by {stretch:g} is not a finite number")
    return Rotation(inverse_frequencies=tuple(_plain(dim, theta)))


def _llama3(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    """Divide long waves by the factor, leave short ones, and blend between."""
    factor, low, high = (reader.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise reader.wrong("high_freq_factor", high, f"above low_freq_factor {low:g}")
    original = reader.integer("original_max_position_embeddings", 1)

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2.0 * math.pi)  # of the original context
        if turns > high:
            return frequency
        share = max(0.0, (turns - low) / (high - low))
        return (1.0 - share) * frequency / factor + share * frequency

    return Rotation(inverse_frequencies=tuple(map(scaled, _plain(config.rotary_dim, config.theta))))


def _yarn(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    """Interpolate pairs that turn slowly, leave fast ones, with a linear ramp over the pairs between."""
    dim, theta, factor = config.rotary_dim, config.theta, reader.number("factor")
    if theta == 1.0:
        raise ConfigError("theta: 1 gives every pair the same frequency, so YaRN has no ramp")
    original = _original(config, reader)

    def pair_of(turns: float) -> float:
        """Return the pair (a fraction) that turns so often within the original context."""
        return dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = pair_of(reader.number("beta_fast", 32.0)), pair_of(reader.number("beta_slow", 1.0))
    if reader.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = [min(max((d - low) / width, 0.0), 1.0) for d in range(dim // 2)]
    frequencies = tuple(share * f / factor + (1.0 - share) * f for share, f in zip(ramp, _plain(dim, theta), strict=True))
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return Rotation(inverse_frequencies=frequencies, magnitude=reader.number("attention_factor", usual))


def _longrope(config: RopeConfig, reader: Reader, length: int) -> Rotation:
    """Divide each pair by a factor of its own: one list for sequences within the original context, one for longer ones."""
    original, pairs = _original(config, reader), config.rotary_dim // 2
    factors = {}
    for key in ("short_factor", "long_factor"):
        factors[key] = reader.numbers(key)
        if len(factors[key]) != pairs:
            raise reader.error(key, f"{len(factors[key])} factors; {pairs} are wanted, half of the rotated channels")
    kind = "long" if length > original else "short"
    chosen = zip(factors[f"{kind}_factor"], _plain(config.rotary_dim, config.theta), strict=True)
    frequencies = tuple(f / factor for factor, f in chosen)
    if reader.has(f"{kind}_mscale"):
        return Rotation(inverse_frequencies=frequencies, magnitude=reader.number(f"{kind}_mscale"))
    stretch = reader.number("factor", config.max_position_embeddings / original)
    usual = 1.0
    if stretch > 1.0:
        if original < 2:
            raise reader.wrong("original_max_position_embeddings", original, "at least 2")
        usual = math.sqrt(1.0 + math.log(stretch) / math.log(original))
    return Rotation(inverse_frequencies=frequencies, magnitude=reader.number("attention_factor", usual))


_TYPES: dict[str, Callable[[RopeConfig, Reader, int], Rotation]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "mrope": _default,
    "nope": _none,
}

#: Types that have frequencies here.
ROPE_TYPES = tuple(_TYPES)
