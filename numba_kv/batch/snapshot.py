"""KVSnapshot: K and V of a range of a sequence's tokens as dense tensors: a system prompt, computed once.

It knows nothing of pages: it can be restored into any row, of this batch or a later one, whatever pages that has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.row_copies import RowCopies
from numba_kv.cache.kv_dense import DenseCopies, token_nbytes
from numba_kv.device import Tensor
from numba_kv.device.unique import Unique
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, RewindTooFar, StateError
from numba_kv.geometry import ceil_div, mapped_pages, rewind_is_allowed, round_up
from numba_kv.ledger.sharing import filled_ring

if TYPE_CHECKING:
    from numba_kv.batch.placement import RowPlacement
    from numba_kv.batch.stepper import Stepper
    from numba_kv.device import Device, Memory, Stream
    from numba_kv.device.stream import Event
    from numba_kv.plan import GroupPlan, MemoryPlan, SlabPlan

__all__ = ["KVSnapshot", "RowSnapshots"]

_ALIGNMENT = 256


class KVSnapshot(Unique):
    """K and V of positions [start, stop) of a sequence, in all layers. Made by `Batch.capture_kv`. Owns its memory.

    Attributes
    ----------
    start, stop : int
        The positions. A window layer keeps those from `first` on: what the ring held at the capture.
    place : {"device", "host"}
        Where the tensors are.
    nbytes : int
        Bytes of K and V, and of recurrent states.
    is_closed : bool
        Whether `close` was called.
    """

    def __init__(
        self,
        device: Device,
        plan: MemoryPlan,
        firsts: list[int],
        stop: int,
        start: int,
        peak: int,
        place: str,
        state_nbytes: int,
    ) -> None:
        self.start, self.stop, self.place = start, stop, place
        self.high_water = peak  # of the sequence: its windows held nothing older
        self.base = 0  # tokens that the sequence began with, of which its windows held no more than the next one saw
        self.plan = plan
        self.is_closed = False
        self._device = device
        self._firsts = firsts
        self._kind = dtype(plan.config.kv_cache_dtype)
        self._at: dict[int, int] = {}  # first byte of each layer
        self.slabs: list[tuple[GroupPlan, SlabPlan, int, int, int]] = []  # of each: first position, count, first byte
        at = 0
        self.nbytes = state_nbytes
        for group in plan.groups:
            count = stop - firsts[group.index]
            for slab in group.slabs:
                self.slabs.append((group, slab, firsts[group.index], count, at))
                size = count * token_nbytes(slab, self._kind.itemsize)
                self._at |= {layer: at + i * (size // len(slab.layers)) for i, layer in enumerate(slab.layers)}
                at += round_up(size, _ALIGNMENT)
                self.nbytes += size
        self._used: list[Event] = []
        self.state_at = at  # recurrent states lie behind K and V
        at += state_nbytes
        self.memory: Memory = (device.allocate if place == "device" else device.allocate_staging)(max(1, at))

    def first(self, layer: int) -> int:
        """Return the first position that is there of attention layer `layer`."""
        return self._firsts[self._home(layer)[0].index]

    def first_of(self, group: int) -> int:
        """Return the first position that is there of window group `group`."""
        return self._firsts[group]

    def kv(self, layer: int) -> Tensor:
        """Return K and V of attention layer `layer`: [2, stop - first, H, D], in the element type of the pools.

        A tensor in host memory is for the host: read it with NumPy after the stream has passed the capture.

        Raises
        ------
        InputError
            If there is no such layer.
        StateError
            After `close`.
        """
        if self.is_closed:
            raise StateError("KVSnapshot is closed")
        group, slab = self._home(layer)
        owner = self._owner(layer)
        count = self.stop - self._firsts[group.index]
        shape = (slab.shape[1], count, slab.num_kv_heads, slab.head_dim)
        return Tensor(self.memory, self._device, self._kind, shape, offset_nbytes=self._at[owner])

    def use(self, stream: Stream) -> None:
        """Note a copy that was just enqueued on `stream`."""
        self._used = [*self._used[:1], stream.record()]  # of the capture, and of the last restoration

    def wait(self, stream: Stream) -> None:
        """Order work on `stream` after the copies enqueued so far."""
        for event in self._used:
            stream.wait(event)

    def close(self) -> None:
        """Give the memory back; a second call does nothing. Stream: waits, if it is host memory."""
        if self.is_closed:
            return
        self.is_closed = True
        with self._device.active():
            if self.place == "host":
                for event in self._used:
                    event.synchronize()
            else:
                self.wait(self._device.stream)
            self.memory.close(self._device.stream)

    def fits(self, plan: MemoryPlan, device: Device) -> bool:
        """Return whether the layers of `plan` on `device` keep K and V as those that were captured do."""
        same_place = (self._device.target, self._device.ordinal) == (device.target, device.ordinal)
        return same_place and self._form(self.plan) == self._form(plan)

    @staticmethod
    def _form(plan: MemoryPlan) -> object:
        groups = [
            (g.window, g.page_tokens, g.ring, [(s.layers, s.shape[1], s.num_kv_heads, s.head_dim) for s in g.slabs])
            for g in plan.groups
        ]
        config = plan.config
        states = (config.num_recurrent_layers, config.recurrent_layer, config.conv_state_room)
        return config.kv_cache_dtype, states, groups

    def _owner(self, layer: int) -> int:
        donor = self.plan.config.layers[layer].kv_donor
        return layer if donor is None else donor

    def _home(self, layer: int) -> tuple[GroupPlan, SlabPlan]:
        if not isinstance(layer, int) or not 0 <= layer < len(self.plan.config.layers):
            raise InputError(f"layer: {layer!r} is not one of the {len(self.plan.config.layers)} attention layers")
        owner = self._owner(layer)
        return next((group, slab) for group, slab, *_ in self.slabs if owner in slab.layers)

    def __enter__(self) -> KVSnapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.nbytes} bytes, {self.place}"
        return f"KVSnapshot([{self.start}, {self.stop}), {state})"


class RowSnapshots:
    """Fills snapshots from rows and rows from snapshots: one launch for each slab. Owns nothing."""

    def __init__(self, stepper: Stepper, placement: RowPlacement, copies: DenseCopies) -> None:
        self._stepper = stepper
        self._placement = placement
        self._copies = copies

    def capture(self, row: int, start: int, stop: int, place: str) -> KVSnapshot:
        """Copy positions [start, stop) of a row.

        Raises
        ------
        RewindTooFar
            If a window no longer holds what position `stop` sees.
        CapacityError
            If there is not enough memory.
        """
        stepper, ledger = self._stepper, self._stepper.ledger
        stepper.begin()
        peak, firsts = int(ledger.high_water[row]), []
        if stepper.launches.states is not None and stop != ledger.hi[row]:
            raise RewindTooFar(
                f"stop: {stop} of {int(ledger.hi[row])} tokens; recurrent states cannot go back: capture while the sequence is "
                "that short"
            )
        if stop < ledger.base[row]:
            raise RewindTooFar(f"stop: {stop}; {ledger.rewind_problem(row, stop)}; capture at least {ledger.base[row]} tokens")
        for group in stepper.plan.groups:
            if not rewind_is_allowed(group.window, group.page_tokens, group.ring, peak, stop):
                raise RewindTooFar(
                    f"stop: the {group.window} ring of {group.ring} pages no longer holds the tokens that position {stop} sees "
                    f"(the row has been {peak} tokens long); capture while the sequence is that short"
                )
            held = 0 if group.window.is_full else filled_ring(ledger, group, row, stop)[0] * group.page_tokens
            firsts.append(min(stop, max(start, held)))
        states = stepper.launches.states
        nbytes = 0 if states is None else states.row_nbytes
        snapshot = KVSnapshot(stepper.device, stepper.plan, firsts, stop, start, peak, place, nbytes)
        snapshot.base = int(ledger.base[row])
        try:
            copies = self._bound(snapshot, out=True)
            stepper.start_work()
            self._run(copies, snapshot, row)
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def restore(self, row: int, snapshot: KVSnapshot) -> None:
        """Append what was captured to a row that is `snapshot.start` tokens long.

        Raises
        ------
        CapacityError
            If the pool has too few pages.
        """
        stepper, ledger = self._stepper, self._stepper.ledger
        stepper.begin()
        start, stop = snapshot.start, snapshot.stop
        copies, full = self._bound(snapshot, out=False), stepper.plan.groups[0]
        if not full.is_empty:
            self._placement.extend(row, ceil_div(stop, full.page_tokens), f"the restored range [{start}, {stop})")
        begins = []
        for group in stepper.plan.groups:
            begin = mapped_pages(group.window, group.page_tokens, group.ring, start, stop - start)[0]
            held = snapshot.first_of(group.index)
            if held > start:  # pages below it were not captured, and are not there
                begin = max(begin, held // group.page_tokens)
            begins.append(begin)
        peak = max(int(ledger.high_water[row]), snapshot.high_water)
        ledger.set_base(row, snapshot.base)
        self._placement.place([(row, stop, peak, np.array(begins, np.int64))])
        self._run(copies, snapshot, row)
        stepper.stats.tokens += stop - start

    def _bound(self, snapshot: KVSnapshot, *, out: bool) -> RowCopies:
        """Return the copies between a row and a snapshot; nothing is enqueued."""
        copies = RowCopies()
        # Slabs of this batch: where their pages lie depends on how many there are, which a snapshot does not.
        own = [(group, slab) for group in self._stepper.plan.groups for slab in group.slabs]
        for (group, slab), (_, _, first, count, at) in zip(own, snapshot.slabs, strict=True):
            copies.add(self._copies.tokens(group, slab, snapshot.memory, at, first, count, out=out))
        copies.add_states(self._stepper.launches.states, snapshot.memory, snapshot.state_at, out=out)
        return copies

    def _run(self, copies: RowCopies, snapshot: KVSnapshot, row: int) -> None:
        stream = self._stepper.device.stream
        snapshot.wait(stream)
        self._stepper.stats.launches += copies.run(row)
        snapshot.use(stream)
