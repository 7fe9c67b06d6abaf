"""Exceptions of numba_kv.

Every refusal names the argument, what came, what was allowed and what to do. The tree::

    NumbaKVError
      ConfigError (ValueError)        a configuration value is wrong
        UnsupportedModelError         the model is understood but not supported yet
      InputError (ValueError)         an argument of a call is wrong
        ShapeError                    arrays disagree on shape, dtype or layout
        TraceError                    a line of a trace file is wrong
        WeightError                   a file of weights, or what it holds, is wrong
          LoRAError                   an adapter is wrong, or does not fit the engine
      PlanError                       the plan does not fit the budget
      CapacityError                   pages, rows or tokens have run out
      StateError (RuntimeError)       a call that the object's state does not allow
        RewindTooFar                  the tokens before the target have left the window's ring
      InteropError (BufferError)      an array cannot be exchanged
      TargetError (RuntimeError)      the wanted target cannot work on this machine
      DeviceError (RuntimeError)      the driver reported a failure
      InvariantError (RuntimeError)   a defect of numba_kv itself: please report it
"""

from __future__ import annotations

__all__ = [
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
]


class NumbaKVError(Exception):
    """Root of every exception that numba_kv raises on purpose."""


class ConfigError(NumbaKVError, ValueError):
    """A configuration value is missing, of the wrong type or out of range."""


class UnsupportedModelError(ConfigError):
    """The configuration describes a model whose caches are not supported yet."""


class InputError(NumbaKVError, ValueError):
    """An argument of a call is wrong; nothing was changed."""


class ShapeError(InputError):
    """Arrays disagree on shape, element type or layout."""


class TraceError(InputError):
    """A trace file holds a line that cannot be a request."""


class WeightError(InputError):
    """A file of weights cannot be read, or does not hold what is wanted; nothing was changed.

    Attributes
    ----------
    missing, extra, mismatched : tuple of str
        Names of weights, where weights were compared with what is declared; else empty.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.extra = extra
        self.mismatched = mismatched


class LoRAError(WeightError):
    """An adapter is damaged, or does not fit the engine's targets; nothing was changed."""


class PlanError(NumbaKVError):
    """The planned memory does not fit its budget.

    Attributes
    ----------
    needed_bytes, budget_bytes : int
        What the plan takes and what was given; the shortfall is their difference.
    """

    def __init__(self, message: str, *, needed_bytes: int = 0, budget_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes

    @property
    def shortfall_bytes(self) -> int:
        """Bytes that are missing."""
        return max(0, self.needed_bytes - self.budget_bytes)


class CapacityError(NumbaKVError):
    """Rows, pages or tokens have run out; nothing was changed.

    Attributes
    ----------
    needed, free, evictable : int
        In the unit that the message names.
    """

    def __init__(self, message: str, *, needed: int, free: int, evictable: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.evictable = evictable


class StateError(NumbaKVError, RuntimeError):
    """The object is in a state that does not allow the call."""


class RewindTooFar(StateError):
    """The tokens before the rewind target have been overwritten in a window's ring."""


class InteropError(NumbaKVError, BufferError):
    """An array cannot be exchanged with another library."""


class TargetError(NumbaKVError, RuntimeError):
    """The wanted target cannot work on this machine."""


class DeviceError(NumbaKVError, RuntimeError):
    """The driver reported a failure."""


class InvariantError(NumbaKVError, RuntimeError):
    """Something that must always hold does not: a defect of numba_kv. Please report it."""
