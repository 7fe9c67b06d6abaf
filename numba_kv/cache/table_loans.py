"""TableLoans: who uses the page tables of each model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device.guard import CallGuard
from numba_kv.errors import StateError

__all__ = ["TableLoans", "TableUser"]


class TableUser(Protocol):
    """Who can take the tables of a model over: a Batch."""

    @property
    def guard(self) -> CallGuard:
        """What keeps its calls apart."""

    def close(self) -> None:
        """Give the tables back."""


class TableLoans:
    """Lends the tables of each model to one user at a time. Borrows the tables."""

    def __init__(self) -> None:
        self._models: list[Sequence[KVPageTable]] = []
        self._users: dict[int, TableUser] = {}
        self._loan = object()  # what ends the loans to users; kept from the start, so that an interrupt cannot lose it

    def add(self, tables: Sequence[KVPageTable]) -> None:
        """Take the tables of the next model in."""
        self._models.append(tables)

    @property
    def tables(self) -> tuple[KVPageTable, ...]:
        """The tables of all models."""
        return tuple(table for tables in self._models for table in tables)

    @property
    def users(self) -> tuple[TableUser, ...]:
        """Who has tables, in the order of their loans."""
        return tuple(self._users.values())

    def attach(self, user: TableUser, index: int) -> None:
        """Lend the tables of model `index` to `user`.

        Raises
        ------
        StateError
            If they are lent already.
        """
        if index in self._users:
            raise StateError(f"the tables are in use by {self._users[index]!r}; close it first")
        self._users[index] = user  # before the first table is lent, so that `detach` undoes whatever an interrupt left
        try:
            for table in self._models[index]:
                table.lend(type(user).__name__, self._loan)
        except BaseException:
            self.detach(user)
            raise

    def detach(self, user: TableUser) -> None:
        """Take back what `user` has: every entry is -1 and the host owns the tables again."""
        for index in [index for index, other in self._users.items() if other is user]:
            with ExitStack() as each:  # goes on past a table that fails
                for table in self._models[index]:
                    if table.is_lent_for(self._loan):
                        each.callback(table.give_back, self._loan)
            del self._users[index]

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Keep the calls of all users out."""
        with ExitStack() as guards:
            for user in self.users:
                guards.enter_context(user.guard.reads)
            yield
