"""Unique: objects that stand for device memory or for a place in it, and so cannot be copied or pickled."""

from __future__ import annotations

from typing import Any, NoReturn

from numba_kv.errors import StateError

__all__ = ["Unique"]


class Unique:
    """Base of what must not be duplicated: a copy would keep the address and not the memory."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(f"{type(self).__name__} cannot be copied or pickled: it stands for memory of this process")

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(None)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(None)
