"""ModelTables: the page tables of one model, before and between their users."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from numba_kv.cache.page_table import KVPageTable
from numba_kv.errors import InputError
from numba_kv.geometry import Window

if TYPE_CHECKING:
    from numba_kv.cache.hybrid import HybridCacheManager

__all__ = ["ModelTables"]


class ModelTables:
    """One table of full attention and one a window, on the device memory of the model's step. Owns them.

    The full table starts as the identity if the pool holds every row, and empty otherwise; window tables start empty.

    Parameters
    ----------
    manager : HybridCacheManager
        The model's caches.
    prefix : str
        What the names of its tables start with.
    owned : ExitStack
        What closes them.

    Attributes
    ----------
    full : KVPageTable
        Table of full attention; empty if no layer has it.
    windows : dict of Window to KVPageTable
        The others, in model order.

    Stream: enqueues the first upload of each.
    """

    def __init__(self, manager: HybridCacheManager, prefix: str, owned: ExitStack) -> None:
        self.windows: dict[Window, KVPageTable] = {}
        for group in manager.plan.groups:
            table = KVPageTable(
                manager.device,
                manager.plan.config.max_batch_size,
                group.row_pages,
                group.num_pages,
                "dense" if group.window.is_full else "sparse",
                reserved_pages=group.num_pages - group.usable_pages,
                tensor=manager.step_buffers.page_tables[group.index],
                name=f"{prefix}page table of {group.window} attention",
            )
            owned.callback(table.close, even_if_lent=True)  # also after a batch that failed to give it back
            self.windows[group.window] = table
        full = manager.plan.groups[0]
        self.full = self.windows.pop(full.window)
        if manager.plan.config.max_batch_size * full.row_pages <= full.usable_pages:
            self.full.set_identity()
        for table in self.all:
            table.upload()

    @property
    def all(self) -> tuple[KVPageTable, ...]:
        """Every table, full attention first."""
        return self.full, *self.windows.values()

    def window(self, window: Window | int | None) -> KVPageTable | None:
        """Return the table of a window, or of that many tokens; None means the only one, if there is one.

        Raises
        ------
        InputError
            If it names none or several.
        """
        if isinstance(window, bool) or not isinstance(window, (int, Window, type(None))):
            raise InputError(f"window: {window!r} is neither a Window nor a number of tokens")
        if window is None:
            if len(self.windows) > 1:
                raise InputError(f"window: the model has {', '.join(map(str, self.windows))}; name one of them")
            return next(iter(self.windows.values()), None)
        named = [table for key, table in self.windows.items() if window == key or window == key.tokens]
        if len(named) != 1:
            known = ", ".join(map(str, self.windows)) or "no windows"
            raise InputError(f"window: {window} names {len(named)} of {known}")
        return named[0]
