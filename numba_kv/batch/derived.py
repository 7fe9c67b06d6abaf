"""DerivedForms: other shapes of a batch's tables, for kernels that want them. Built on the device, on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.arguments import integer
from numba_kv.device import Tensor
from numba_kv.device.graph import is_capturing
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, StateError
from numba_kv.geometry import round_up
from numba_kv.kernels.derived import compact_table, copy_indices, count_pages, split_table, sum_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.stepper import Stepper
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Memory, Stream
    from numba_kv.device.guard import CallGuard
    from numba_kv.kernels.jit import Launch

__all__ = ["CompactWindow", "DerivedForms", "HostIndices", "KvIndices"]


@dataclass(frozen=True, slots=True)
class KvIndices:
    """CSR form of a group, as FlashInfer's wrappers take it.

    Attributes
    ----------
    kv_indptr : Tensor
        int32 [B + 1]: first index of each row. A row without tokens has none.
    kv_indices : Tensor
        int32 [at most every page of every row]: page ids; only the mapped pages of a window.
    last_page_len : Tensor
        int32 [B]: tokens in each row's last page, 1 to P; 1 for a row without pages.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor


@dataclass(frozen=True, slots=True)
class HostIndices:
    """What `KvIndices` of a group and a step's layout hold, but for the ids, as the host knows it: int32 NumPy arrays.

    Attributes
    ----------
    cu_seqlens_q : ndarray [B + 1]
        First token of each row in the step.
    kv_indptr, last_page_len : ndarray [B + 1] and [B]
        As in `KvIndices`.
    """

    cu_seqlens_q: NDArray[np.int32]
    kv_indptr: NDArray[np.int32]
    last_page_len: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CompactWindow:
    """Block table of a window group from the first mapped page on.

    Causal and window masks count from the end, so attention over it equals attention over the whole row.

    Attributes
    ----------
    window_tables : Tensor
        int32 [B, R rounded up to 128 tokens]: column j is logical page ``begin + j``; null pages behind the last.
    window_seq_lens : Tensor
        int32 [B]: the row's length less ``begin * P``.
    """

    window_tables: Tensor
    window_seq_lens: Tensor


class DerivedForms:
    """Makes derived forms of the tables as they are now. Owned by a Batch (`Batch.derived`).

    Each form has buffers of its own, allocated on the first request and kept by the resources; later requests refresh
    them in place, so a captured request stays valid.
    """

    def __init__(self, buffers: StepBuffers, guard: CallGuard, take: Callable[[str, int], Memory], stepper: Stepper) -> None:
        self._buffers = buffers
        self._stepper = stepper
        self._guard = guard
        self._take = take
        self._made: dict[tuple[str, int], tuple[Any, list[tuple[Launch, int]]]] = {}

    def csr(self, group: int, stream: object | None = None) -> KvIndices:
        """Return the CSR form of a group.

        Parameters
        ----------
        group : int
            g; 0 is full attention.
        stream : stream, optional
            A capturing stream, or the resources' stream (default).

        Raises
        ------
        InputError
            If there is no such group.
        StateError
            If the form is requested for the first time while a stream is being captured, or `stream` is another stream.

        Stream: enqueues two kernels. Cost: O(rows squared) additions and one copy of the mapped ids.
        """
        form: KvIndices = self._request("csr", group, stream, self._make_csr)
        return form

    def compact(self, group: int, stream: object | None = None) -> CompactWindow:
        """Return the compact table of a window group; parameters and errors as in `csr`.

        Stream: enqueues one kernel.
        """
        if integer(group) == 0:
            raise InputError("group: 0 is full attention; only a window group has a compact table")
        form: CompactWindow = self._request("compact", group, stream, self._make_compact)
        return form

    def kv_block_tables(self, group: int, stream: object | None = None) -> Tensor:
        """Return K and V ids of a group, int32 [B, 2, L], every entry valid, V = K + N; as in `csr`.

        Stream: enqueues one kernel.
        """
        form: Tensor = self._request("kv_block_tables", group, stream, self._make_split)
        return form

    def cu_seqlens_k(self, group: int, stream: object | None = None) -> Tensor:
        """Return the tokens of all rows before each row, int32 [B + 1]; parameters and errors as in `csr`.

        Group 0 counts whole rows, a window group those of its compact table.

        Stream: enqueues one kernel, for a window group two. Cost: O(rows squared) additions.
        """
        form: Tensor = self._request("cu_seqlens_k", group, stream, self._make_sums)
        return form

    def csr_on_host(self, group: int) -> HostIndices:
        """Return where the rows of the last step begin in the CSR form, from what the host knows: nothing is read back.

        Raises
        ------
        InputError
            If there is no such group.
        StateError
            If the host only knows bounds of the lengths (`Batch.sync_lengths`), or steps were launched and not noted.

        Stream: host only.
        """
        with self._guard.reads:
            plan = self._buffers.plan.groups[self._checked(group)]
            counts, lengths, begin = self._stepper.exact_rows()
            end, first = -(-lengths // plan.page_tokens), begin[plan.index]
            pages = np.zeros_like(end) if plan.is_empty else end - first
            last = np.where(pages > 0, lengths - (end - 1) * plan.page_tokens, 1)
            return HostIndices(_sums(counts), _sums(pages), last.astype(np.int32))

    def _checked(self, group: int) -> int:
        groups, number = len(self._buffers.plan.groups), integer(group)
        if number is None or not 0 <= number < groups:
            raise InputError(f"group: {group!r} is not one of the {groups} window groups (0..{groups - 1})")
        return number

    def _request(self, form: str, group: int, stream: object | None, make: Callable[[int], Any]) -> Any:
        with self._guard.reads:
            number, device = self._checked(group), self._buffers.device
            target: Stream = device.stream if stream is None else device.as_capturing_stream(stream)
            if (form, number) not in self._made:
                if is_capturing(target):
                    raise StateError(f"{form} of group {number} has no buffers yet; request it once before the capture")
                self._made[form, number] = make(number)
            made, launches = self._made[form, number]
            self._guard.is_enqueueing = True
            for launch, items in launches:
                launch(items, target)
            return made

    def _tensor(self, name: str, *shape: int) -> Tensor:
        size = 4
        for extent in shape:
            size *= extent
        return Tensor(self._take(f"derived.{name}", round_up(size, 256)), self._buffers.device, dtype("int32"), shape)

    def _make_csr(self, group: int) -> tuple[KvIndices, list[tuple[Launch, int]]]:
        buffers, device = self._buffers, self._buffers.device
        rows, plan = buffers.plan.config.max_batch_size, buffers.plan.groups[group]
        pages = max(1, rows * (plan.ring or plan.row_pages))
        form = KvIndices(
            self._tensor(f"kv_indptr.{group}", rows + 1),
            self._tensor(f"kv_indices.{group}", pages),
            self._tensor(f"last_page_len.{group}", rows),
        )
        shared: dict[str, Tensor | int] = {
            "mapped_begin": buffers.mapped_begin,
            "groups": buffers.groups,
            "kv_indptr": form.kv_indptr,
            "group": group,
        }
        count = count_pages.bind(device, {**shared, "lengths": buffers.lengths, "last_page_len": form.last_page_len})
        tables = {"block_tables": buffers.arena["block_tables"], "kv_indices": form.kv_indices}
        copy = copy_indices.bind(device, {**shared, **tables})
        return form, [(count, rows + 1), (copy, rows)]

    def _make_compact(self, group: int) -> tuple[CompactWindow, list[tuple[Launch, int]]]:
        buffers = self._buffers
        rows, plan = buffers.plan.config.max_batch_size, buffers.plan.groups[group]
        width = round_up(plan.ring, max(1, 128 // plan.page_tokens))
        form = CompactWindow(
            self._tensor(f"window_tables.{group}", rows, width), self._tensor(f"window_seq_lens.{group}", rows)
        )
        launch = compact_table.bind(
            buffers.device,
            {
                "lengths": buffers.lengths,
                "mapped_begin": buffers.mapped_begin,
                "groups": buffers.groups,
                "block_tables": buffers.arena["block_tables"],
                "window_tables": form.window_tables,
                "window_seq_lens": form.window_seq_lens,
                "group": group,
            },
        )
        return form, [(launch, rows)]

    def _make_split(self, group: int) -> tuple[Tensor, list[tuple[Launch, int]]]:
        buffers = self._buffers
        rows, plan = buffers.plan.config.max_batch_size, buffers.plan.groups[group]
        form = self._tensor(f"kv_block_tables.{group}", rows, 2, plan.table_width)
        launch = split_table.bind(
            buffers.device,
            {
                "groups": buffers.groups,
                "block_tables": buffers.arena["block_tables"],
                "kv_block_tables": form,
                "group": group,
            },
        )
        return form, [(launch, rows)]

    def _make_sums(self, group: int) -> tuple[Tensor, list[tuple[Launch, int]]]:
        rows = self._buffers.plan.config.max_batch_size
        form = self._tensor(f"cu_seqlens_k.{group}", rows + 1)
        lengths = self._buffers.lengths[0]
        before: list[tuple[Launch, int]] = []
        if group:
            if ("compact", group) not in self._made:
                self._made["compact", group] = self._make_compact(group)
            compact, before = self._made["compact", group]
            lengths = compact.window_seq_lens
        launch = sum_lengths.bind(self._buffers.device, {"row_lengths": lengths, "cu_seqlens_k": form})
        return form, [*before, (launch, rows + 1)]


def _sums(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return what lies before each of some counts, and their sum behind the last."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
