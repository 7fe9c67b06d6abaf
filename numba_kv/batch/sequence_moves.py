"""SequenceMoves: the calls of a Batch that copy, share or move what sequences hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from numba_kv.batch.arguments import at_least_one, integer
from numba_kv.batch.hostless import HostlessSteps
from numba_kv.batch.placement import RowPlacement
from numba_kv.batch.row_adapters import RowAdapters
from numba_kv.batch.scrub import RowScrubs
from numba_kv.batch.sequence import Sequence, start_sequences
from numba_kv.batch.snapshot import KVSnapshot, RowSnapshots
from numba_kv.batch.swap import RowSwaps
from numba_kv.batch.swapped import SwappedSequence
from numba_kv.cache.kv_dense import DenseCopies
from numba_kv.cache.kv_moves import TokenMoves
from numba_kv.cache.kv_operands import check_aligned
from numba_kv.cache.kv_scrub import PageScrubber
from numba_kv.device.interop import as_tensor
from numba_kv.errors import CapacityError, InputError, ShapeError, StateError

if TYPE_CHECKING:
    from numba_kv.batch.batch import Batch
    from numba_kv.cache.kv_cache import KVCacheManager

__all__ = ["SequenceMoves"]


class SequenceMoves(HostlessSteps):
    """Part of Batch: fork sequences, move them to the host and back, and copy their K and V."""

    _sequences: dict[int, Sequence]
    _adapters: RowAdapters
    _placement: RowPlacement
    _swaps: RowSwaps
    _snapshots: RowSnapshots
    _moves: TokenMoves

    @overload
    def fork(self, sequence: Sequence) -> Sequence: ...

    @overload
    def fork(self, sequence: Sequence, count: int) -> list[Sequence]: ...

    def fork(self, sequence: Sequence, count: int | None = None) -> Sequence | list[Sequence]:
        """Start new sequences that have the tokens of `sequence`, as for several answers to one prompt.

        Full pages of the full group are shared: both read them, neither writes them, and each is free when the last sequence
        that holds it is gone. The partial last page and what the rings of windows hold are copied. Pages that run ahead are
        not shared.

        Tokens in shared pages cannot be rewritten: parent and children can be rewound to the end of the last shared page, or
        to nothing (which gives the shared pages up), and anywhere again once nobody else holds the pages. Tokens of a step
        that are still to be taken back are taken back before the fork: a step whose counts come from the device takes back
        nothing of a child's first tokens.

        Parameters
        ----------
        sequence : Sequence
            The parent. Of its prompt, what no step has appended is pending for the children too.
        count : int, optional
            How many; default one.

        Returns
        -------
        Sequence or list of Sequence
            The child; a list if `count` is given.

        Raises
        ------
        InputError
            If `count` is not a positive integer.
        StateError
            If `sequence` is not active, or the host does not know its exact length (`sync_lengths`).
        CapacityError
            If rows, or pages for the partial last pages, have run out; nothing was changed.

        Stream: enqueues two copies and two kernels, and one copy and one kernel for each slab whose pages are copied. Cost: the
        bytes of at most one page of the full group and one ring of each window group for each child.
        """
        with self.guard:
            number = 1 if count is None else at_least_one("count", count)
            row = self._row_of(sequence, "fork")
            self._exact_length(row, "fork")
            self._check_rows(number)
            first = self.stepper.ledger.admitted + 1
            rows = self._placement.fork(row, number)
            made = self._started(rows, sequence.prompt_tokens, first)
            self._adapters.inherit(dict.fromkeys(made, sequence))
            if self.reuse is not None:
                self.reuse.contexts.inherit(dict.fromkeys(made, sequence))
            self._adapters.follow(self._sequences)
            return made[0] if count is None else made

    def reorder(self, parents: Mapping[Sequence, Sequence]) -> None:
        """Give sequences the tokens of others, all at once: what a beam search does after each step.

        A sequence keeps its row and its name; its own tokens are gone unless another one takes them over. Several with one
        parent are forks of it (`fork`): full pages are shared, partial ones and rings copied. Where no sequence is taken twice,
        no K or V moves.

        Parameters
        ----------
        parents : mapping of Sequence to Sequence
            Whose tokens each sequence gets, as they are before the call; sequences that are not named keep theirs.

        Raises
        ------
        InputError, StateError
            If a sequence is not active, or the host does not know the exact length of one that is taken (`sync_lengths`).
        CapacityError
            If the pool has too few pages for the copies of last pages; nothing was changed.

        Stream: enqueues at most three copies and kernels, and one copy and one kernel for each slab whose pages are copied.
        """
        with self.guard:
            if not isinstance(parents, Mapping):
                raise InputError(f"parents: {type(parents).__name__} is not a mapping of sequences to their parents")
            rows = {self._row_of(s, "reorder"): self._row_of(parent, "reorder") for s, parent in parents.items()}
            for row in rows.values():
                self._exact_length(row, "reorder")
            if all(row == parent for row, parent in rows.items()):
                return
            numbers = {row: (s.generation, s.prompt_tokens) for row, s in self._sequences.items()}
            self._placement.reorder({row: rows.get(row, row) for row in self._sequences})
            for row, parent in rows.items():
                self._sequences[row].prompt_tokens = numbers[parent][1]
                self.stepper.ledger.generation[row] = numbers[row][0]
            heirs = {self._sequences[row]: self._sequences[parent] for row, parent in rows.items()}
            self._adapters.inherit(heirs)
            if self.reuse is not None:
                self.reuse.contexts.inherit(heirs)
            self._adapters.follow(self._sequences)

    def align_states(self) -> int:
        """Move recurrent states so that those of row i are in slot i, for kernels that take no index of slots.

        States stay in their slots while rows move (`compact`, `reorder`), and kernels find them by `StepView.state_index`.
        Behind this call the first rows of ``MambaCacheManager.state(name, layer)`` are the states of the first rows, until
        rows move again; rows that only come and go keep it so.

        Returns
        -------
        int
            States that moved.

        Raises
        ------
        StateError
            While a graph is captured, or if the batch cannot be used.

        Stream: enqueues one copy and one kernel if any moves. Cost: reads and writes the states that move once.
        """
        with self.guard:
            return self.stepper.align_states()

    def swap_out(self, sequence: Sequence) -> SwappedSequence:
        """Move a sequence to page-locked host memory: its row and its pages are free, its K and V wait.

        Kept are the pages of the full group up to its length, and of each window what the ring still holds, in all layers.
        Pages that other sequences share are copied; the others keep them. Scales of float8 layers belong to the layer and stay.
        The pages are free at once: whatever is enqueued on the resources' stream from now on comes after the copy.

        Parameters
        ----------
        sequence : Sequence
            It is retired.

        Returns
        -------
        SwappedSequence
            What `swap_in` takes. Holds host memory until then, until its own `close`, or until the batch is closed.

        Raises
        ------
        StateError
            If `sequence` is not active, or the host does not know its exact length (`sync_lengths`).
        CapacityError
            If the host has not enough memory; nothing was changed.

        Stream: enqueues one kernel for each slab, one copy and one kernel. Cost: the bytes of its pages over the bus; a
        page-locked block is allocated unless one of an earlier swap fits.
        """
        self._publish_due()
        with self.guard:
            row = self._row_of(sequence, "swap_out")
            self._exact_length(row, "swap_out")
            swapped = self._swaps.out(row, sequence.prompt_tokens, self._forget)
            if self.reuse is not None:
                self.reuse.contexts.leave(sequence, swapped)
            sequence.end()
            del self._sequences[row]
            swapped.adapter, sequence.adapter = sequence.adapter, None
            self._adapters.follow(self._sequences)
            return swapped

    def swap_in(self, swapped: SwappedSequence) -> Sequence:
        """Give a sequence that was swapped out a row and pages again, with the same tokens.

        None of its pages is shared: it can be rewound wherever its windows allow.

        Parameters
        ----------
        swapped : SwappedSequence
            From `swap_out` of this batch; its host memory is free for the next one afterwards.

        Raises
        ------
        InputError, StateError
            If it is something else, of another batch, swapped in already, or closed.
        CapacityError
            If rows or pages have run out; nothing was changed.

        Stream: enqueues two copies and two kernels, a copy and a kernel for each block of page ids, and a kernel for each slab.
        """
        with self.guard:
            if not isinstance(swapped, SwappedSequence):
                raise InputError(f"swapped: {swapped!r} is not a SwappedSequence; swap_out returns one")
            if not self._swaps.holds(swapped):
                raise StateError(f"swapped: {swapped!r} does not wait in this batch")
            self._check_rows(1)
            first = self.stepper.ledger.admitted + 1
            row = self._swaps.back(swapped)
            made = self._started([row], swapped.prompt_tokens, first)[0]
            swapped.adapter, made.adapter = None, swapped.adapter
            if self.reuse is not None:
                self.reuse.contexts.resume(swapped, made)
            self._adapters.follow(self._sequences)
            return made

    def capture_kv(self, sequence: Sequence, start: int, stop: int, *, place: str = "device") -> KVSnapshot:
        """Copy K and V of a range of tokens to dense tensors, as for a system prompt that many sequences begin with.

        The sequence stays as it is. Window layers keep what their ring holds of the range: all that a sequence of `stop` tokens
        can still see, or see after a rewind. Elements are moved bit by bit; scales of float8 layers belong to the layer.

        Parameters
        ----------
        sequence : Sequence
            It has at least `stop` tokens.
        start, stop : int
            Positions [start, stop).
        place : {"device", "host"}
            Device memory, or page-locked host memory.

        Returns
        -------
        KVSnapshot
            The caller's: it outlives the batch, and holds memory until its `close`.

        Raises
        ------
        InputError
            If the range is empty or not within the sequence, or `place` is something else.
        StateError
            If `sequence` is not active, or the host does not know its exact length (`sync_lengths`).
        RewindTooFar
            If `stop` is so far below the sequence's length that a window no longer holds what position `stop` sees; or below it
            at all, if the model has recurrent layers, whose states are captured too.
        CapacityError
            If there is not enough memory.

        Stream: enqueues one kernel for each slab. Cost: the bytes of the range, and one allocation.
        """
        with self.guard:
            row = self._row_of(sequence, "capture_kv")
            length = self._exact_length(row, "capture_kv")
            first, last = integer(start), integer(stop)
            if first is None or last is None or not 0 <= first < last <= length:
                raise InputError(f"start, stop: [{start!r}, {stop!r}) is not a range of the {length} tokens of {sequence!r}")
            if place not in ("device", "host"):
                raise InputError(f"place: {place!r} is neither 'device' nor 'host'")
            return self._snapshots.capture(row, first, last, place)

    def restore_kv(self, sequence: Sequence, snapshot: KVSnapshot) -> None:
        """Append tokens whose K and V were captured, instead of computing them.

        Afterwards the sequence has `snapshot.stop` tokens, and as many fewer are pending. It may hold any pages.

        Parameters
        ----------
        sequence : Sequence
            It has `snapshot.start` tokens: none, for a range from the beginning.
        snapshot : KVSnapshot
            From `capture_kv` of this batch, or of another one of resources with the same layers and page size.

        Raises
        ------
        InputError
            If `snapshot` is something else, or of another form than this model's.
        StateError
            If it is closed, `sequence` is not active or of another length, or the host does not know its exact length.
        CapacityError
            If the range does not fit a row, or pages have run out; nothing was changed.

        Stream: enqueues a copy and a kernel for each block of page ids, one copy and one kernel, and a kernel for each slab.
        """
        with self.guard:
            if not isinstance(snapshot, KVSnapshot):
                raise InputError(f"snapshot: {snapshot!r} is not a KVSnapshot; capture_kv returns one")
            row = self._row_of(sequence, "restore_kv")
            length, capacity = self._exact_length(row, "restore_kv"), self.plan.config.max_kv_cache_capacity
            if snapshot.is_closed:
                raise StateError("snapshot: it is closed")
            if not snapshot.fits(self.plan, self.resources.device):
                raise InputError("snapshot: captured on another device, or from layers of another form than this model's")
            if length != snapshot.start:
                raise StateError(f"restore_kv: {sequence!r} has {length} tokens, but the snapshot begins at {snapshot.start}")
            if snapshot.stop > capacity:
                reason = f"restore_kv: {snapshot.stop} tokens exceed max_kv_cache_capacity {capacity}"
                raise CapacityError(reason, needed=snapshot.stop, free=capacity)
            self._snapshots.restore(row, snapshot)
            if self.reuse is not None:
                self.reuse.contexts.forget(sequence)  # nobody knows which tokens these are

    def move_tokens(self, nodes: Any, *, stream: object | None = None) -> None:
        """Move tokens of each row's last step together, as the accepted path of a tree; what is taken back then lies behind.

        Token ``nodes[row, i]`` of the row's last step, counted from its first, goes to place i of the step. Call it after K
        and V of the step are written, and before the next one, which says how many stay (``accepted=``).

        Parameters
        ----------
        nodes : int32 device array [B, A]
            Ids rise along a path, as those of a tree whose parents come before their children. -1 moves nothing to its
            place, and neither does an id that does not rise, is below its place, or is not of the step.
        stream : optional
            The resources' own (default), or one that is being captured.

        Raises
        ------
        InteropError, ShapeError
            If `nodes` is not a dense int32 [B, A] in the memory of the target.
        StateError
            If `stream` is another stream.

        Stream: enqueues one kernel for each slab. Cost: no allocation; the bytes of the tokens that move.
        """
        with self.guard:
            device, rows = self.resources.device, self.plan.config.max_batch_size
            tensor = as_tensor(device, nodes, "nodes")
            if tensor.dtype.name != "int32" or tensor.ndim != 2 or tensor.shape[0] != rows or not tensor.is_contiguous:
                raise ShapeError(f"nodes: {tensor.dtype} {list(tensor.shape)} given, a dense int32 [{rows}, A] wanted")
            tensor.check_open()
            check_aligned(tensor, "nodes")
            target = device.stream if stream is None else device.as_capturing_stream(stream)
            launches = self._moves.bound(tensor)
            self.guard.is_enqueueing = True
            for launch, items in launches:
                launch(items, target)

    def _open_moves(self, pools: KVCacheManager, scrub: str) -> None:
        """Make what the calls of this class need; see `Batch` for `scrub`."""
        buffers, stepper = self.stepper.buffers, self.stepper
        if scrub != "never":
            stepper.scrubs = RowScrubs(stepper.ledger, PageScrubber(buffers, pools, scrub))
        dense = DenseCopies(buffers, pools)
        self._placement = RowPlacement(stepper, pools)
        self._swaps = RowSwaps(stepper, self._placement, dense)
        self._snapshots = RowSnapshots(stepper, self._placement, dense)
        self._moves = TokenMoves(buffers, pools)

    def _close_moves(self) -> None:
        """Give adapters, host memory and lists back. Stream: waits for copies in flight."""
        self._adapters.end(self._swaps.waiting)
        self._adapters.follow({})
        self._swaps.close()
        self._placement.close()

    def _forget(self, swapped: SwappedSequence) -> None:
        """Take the memory of a swapped sequence back (for its `close`)."""
        with self.guard:
            self._swaps.forget(swapped)
            if self.reuse is not None:
                self.reuse.contexts.forget(swapped)
            self._adapters.end([swapped])

    def _started(self, rows: list[int], prompt_tokens: int, first: int) -> list[Sequence]:
        """Return the sequences that were started in `rows`."""
        batch: Batch = self  # type: ignore[assignment]
        return start_sequences(batch, self._sequences, rows, [prompt_tokens] * len(rows), first)

    @abstractmethod
    def _row_of(self, sequence: Any, call: str) -> int:
        """Return the row of an active sequence, checked."""

    @abstractmethod
    def _exact_length(self, row: int, call: str) -> int:
        """Return the exact length of a row, or raise StateError."""
