"""A strict, typed view of one JSON object.

Knows JSON types, ranges and how to word a refusal: parser, key path, the value that came, what is allowed. Does not
know any key name. Both dialects of ``config.json`` are read through it, so they refuse alike: a boolean or a float is never an
integer, and a number out of range is never wrapped.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Iterable, Mapping

from numba_kv.errors import ConfigError, UnsupportedModelError
from numba_kv.geometry import INT32_MAX

__all__ = ["INT64_MAX", "Reader", "check_regular", "parse_json", "show", "show_path", "words"]

INT64_MAX = 2**63 - 1

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def show(value: object) -> str:
    """Return `value` as a message shows it: short, and in the words of JSON for null and the booleans."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    try:
        return _REPR.repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "an integer of thousands of digits"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {show(twice)} is given twice in one object")
    return found


def parse_json(text: str) -> object:
    """Return what JSON `text` means.

    Raises
    ------
    ValueError, RecursionError
        If it is not JSON, or an object gives a key twice: readers disagree on which of the two counts.
    """
    parsed: object = json.loads(text, object_pairs_hook=_object)
    return parsed


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError if `path` is nothing that can be read to an end: a device, a pipe, a folder, or not there."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file; a device or a pipe may have no end")


def show_path(path: str | os.PathLike[str]) -> str:
    """Return `path` as a message shows it: as it is, or cut and quoted if it is too long or cannot be printed."""
    name = os.fspath(path)
    return name if len(name) <= 240 and name.isprintable() else show(name)


def words(text: str) -> tuple[str, ...]:
    """Return the words of `text`: how tables of names are written here."""
    return tuple(text.split())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(allowed: Iterable[str]) -> str:
    return " or ".join(repr(word) for word in allowed)


class Reader:
    """One object of a configuration, read key by key.

    Parameters
    ----------
    parser : str
        Who reads, and what; the first words of every message.
    values : Mapping
        The object.
    path : str
        Key path of the object in its file, ``""`` for the top level.
    null_is_absent : bool
        Whether null means that a key is not stated. Otherwise null is a value of the wrong type.
    """

    def __init__(self, parser: str, values: Mapping[str, object], path: str = "", *, null_is_absent: bool) -> None:
        self.parser = parser
        self.values = values
        self.path = path
        self.null_is_absent = null_is_absent

    def key_path(self, key: str) -> str:
        """Return the path of `key` in the file, for messages."""
        return f"{self.path}.{key}" if self.path else key

    def error(self, key: str, problem: str) -> ConfigError:
        """Return the refusal of `key`."""
        return ConfigError(f"{self.parser}: {self.key_path(key)}: {problem}")

    def unsupported(self, reason: str) -> UnsupportedModelError:
        """Return the refusal of the whole model."""
        return UnsupportedModelError(f"{self.parser}: {reason}")

    def wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        """Return the refusal of the value of `key`."""
        return self.error(key, f"{show(value)} is not {allowed}")

    def get(self, key: str) -> object:
        """Return the raw value of `key`, None where it is absent."""
        return self.values.get(key)

    def has(self, key: str) -> bool:
        """Whether `key` is there and states something."""
        return key in self.values and not (self.null_is_absent and self.values[key] is None)

    def _value(self, key: str, allowed: str, default: object = None) -> object:
        if self.has(key):
            return self.values[key]
        if default is None:
            raise self.error(key, f"missing; {allowed} is required")
        return default

    def integer(self, key: str, low: int = 0, high: int = INT32_MAX, default: int | None = None) -> int:
        """Return the integer at `key`; it is required unless there is a `default`."""
        allowed = f"an integer from {low} to {high}"
        value = self._value(key, allowed, default)
        return self._checked_integer(key, value, low, high)

    def integer_or_none(self, key: str, low: int = 0, high: int = INT32_MAX) -> int | None:
        """Return the integer at `key`, or None where it is not stated."""
        return self.integer(key, low, high) if self.has(key) else None

    def integers(self, key: str, low: int = 0, high: int = INT32_MAX) -> tuple[int, ...]:
        """Return the list of integers at `key`."""
        return tuple(self._checked_integer(f"{key}[{i}]", v, low, high) for i, v in enumerate(self.items(key)))

    def _checked_integer(self, key: str, value: object, low: int, high: int) -> int:
        if isinstance(value, int) and _is_int(value) and low <= value <= high:
            return value
        raise self.wrong(key, value, f"an integer from {low} to {high}")

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, up_to: float = math.inf) -> float:
        """Return the finite number at `key`, integer or not, in (`above`, `up_to`]."""
        allowed = f"a number above {above:g}" + ("" if up_to == math.inf else f" and up to {up_to:g}")
        value = self._value(key, allowed, default)
        return self._checked_number(key, value, above, up_to, allowed)

    def numbers(self, key: str, *, above: float = 0.0) -> tuple[float, ...]:
        """Return the list of finite numbers at `key`."""
        allowed = f"a number above {above:g}"
        return tuple(self._checked_number(f"{key}[{i}]", v, above, math.inf, allowed) for i, v in enumerate(self.items(key)))

    def _checked_number(self, key: str, value: object, above: float, up_to: float, allowed: str) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # an integer beyond the largest float
                number = math.inf
            if math.isfinite(number) and above < number <= up_to:
                return number
        raise self.wrong(key, value, allowed)

    def boolean(self, key: str, default: bool) -> bool:
        """Return the boolean at `key`."""
        value = self._value(key, "true or false", default)
        if isinstance(value, bool):
            return value
        raise self.wrong(key, value, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string at `key`."""
        value = self._value(key, "a string", default)
        if isinstance(value, str):
            return value
        raise self.wrong(key, value, "a string")

    def choice(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        """Return the string at `key`, one of `allowed`."""
        words = tuple(allowed)
        if default is not None and not self.has(key):
            return default
        value = self._value(key, _one_of(words))
        if isinstance(value, str) and value in words:
            return value
        raise self.wrong(key, value, _one_of(words))

    def items(self, key: str) -> list[object]:
        """Return the list at `key`, elements as they are."""
        value = self._value(key, "a list")
        if isinstance(value, (list, tuple)):
            return list(value)
        raise self.wrong(key, value, "a list")

    def strings(self, key: str) -> tuple[str, ...]:
        """Return the list of strings at `key`."""
        found: list[str] = []
        for index, value in enumerate(self.items(key)):
            if not isinstance(value, str):
                raise self.wrong(f"{key}[{index}]", value, "a string")
            found.append(value)
        return tuple(found)

    def section(self, key: str) -> Reader:
        """Return a reader of the object at `key`."""
        return self.nested(key, self._value(key, "an object"))

    def nested(self, key: str, value: object) -> Reader:
        """Return a reader of `value`, which must be an object; `key` is where it was found."""
        if isinstance(value, Mapping):
            return Reader(self.parser, value, self.key_path(key), null_is_absent=self.null_is_absent)
        raise self.wrong(key, value, "an object")

    def with_values(self, values: Mapping[str, object]) -> Reader:
        """Return a reader of other `values` that words its refusals like this one."""
        return Reader(self.parser, values, self.path, null_is_absent=self.null_is_absent)

    def refuse_near_misses(self, known: Iterable[str]) -> None:
        """Refuse a key that is almost a known one, which then would silently keep its default.

        Keys that resemble nothing are left alone, and so is one whose correct spelling is there too.
        """
        import difflib  # only configurations of one dialect need it

        plain = {word.replace("_", ""): word for word in known}
        for key in self.values:
            if not isinstance(key, str) or key in plain.values():
                continue
            close = difflib.get_close_matches(key.lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=0.88)
            if close and plain[close[0]] not in self.values:
                raise self.error(key, f"unknown key; did you mean {plain[close[0]]!r}?")
