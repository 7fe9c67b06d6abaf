"""Memory sizes as people write and read them.

Knows decimal and binary units. Does not guess: ``24G`` could be either and is refused.
"""

from __future__ import annotations

import re
from fractions import Fraction

from numba_kv.errors import InputError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS[f"{_prefix}b"] = 1000**_power
    _UNITS[f"{_prefix}ib"] = 1024**_power

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` means: ``24GiB``, ``24GB``, ``512MiB``, ``1.5GiB`` or a plain number.

    Raises
    ------
    InputError
        If it is not a size, is not a whole number of bytes, or is 0.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InputError(f"{text!r} is not a memory size; write 24GiB (2^30), 24GB (10^9), 512MiB or a plain number of bytes")
    nbytes = Fraction(match[1]) * unit
    if nbytes.denominator != 1 or nbytes < 1:
        raise InputError(f"{text!r} is not a whole number of bytes from 1 on")
    return int(nbytes)


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` with a binary unit and four digits at most."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.4g} TiB"
