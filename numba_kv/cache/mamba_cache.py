"""MambaCacheManager: the states of a model's recurrent layers, one for each resident slot.

A state stays in its slot as long as its sequence lives; rows of a batch find it by `StepView.state_index`. Layers are counted
among the recurrent ones; `HybridCacheManager` knows decoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from numba_kv.cache.state_commit import StateCommits
from numba_kv.cache.state_copies import SlotState, StateCopies
from numba_kv.cache.state_slab import StateSlab
from numba_kv.cache.state_verification import StateVerification
from numba_kv.config.state_layout import RESIDENT_STATES, state_plans
from numba_kv.device import Tensor
from numba_kv.device.guard import CallGuard
from numba_kv.errors import InputError, ShapeError, StateError

if TYPE_CHECKING:
    from numba_kv.config import RecurrentLayer
    from numba_kv.device import Device, Memory
    from numba_kv.plan import MemoryPlan

__all__ = ["MambaCacheManager"]


class MambaCacheManager(StateVerification):
    """Recurrent and convolution states, and what a verification step keeps to commit from. Zeroed at construction.

    Layers that are convolutions alone (`ShortConvLayer`) have no recurrent states, and no arrays of them.

    Symbols: B slots and rows (`max_batch_size`), H heads, D head size, S state size, C channels, V tokens of a verification
    step. A model without recurrent layers has an empty one: every call on all states does nothing.

    Parameters
    ----------
    device : Device
        Where the states are.
    plan : MemoryPlan
        Their sizes.
    take : callable
        ``take(name, nbytes) -> Memory``: allocation, so that the owner of all memory can count and undo.

    Attributes
    ----------
    layer : RecurrentLayer or None
        What every recurrent layer is.

    Stream: calls enqueue on the device's own stream; none waits unless it says so.
    """

    def __init__(self, device: Device, plan: MemoryPlan, take: Callable[[str, int], Memory]) -> None:
        self.plan = plan
        self.device = device
        self.layer: RecurrentLayer | None = plan.config.recurrent_layer
        self.guard = CallGuard(device, "MambaCacheManager", poisons=False)
        self._slabs = {state.name: StateSlab(device, state, take) for state in state_plans(plan.config)}
        self._copies = StateCopies(device, self._slabs) if self._slabs else None
        self._commits = StateCommits(device, plan, self._slabs, self.guard, take)

    # -- arrays --------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Recurrent layers."""
        return self.plan.config.num_recurrent_layers

    @property
    def num_slots(self) -> int:
        """Resident slots: as many as rows."""
        return self.plan.config.max_batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of all states and of what verification keeps."""
        return self.plan.state_nbytes

    @property
    def state_names(self) -> tuple[str, ...]:
        """Arrays that there are; see `numba_kv.config.state_layout`."""
        return tuple(self._slabs)

    def recurrent_state(self, layer: int) -> Tensor:
        """Return the states of a layer by slot: [B, H, D, S].

        Raises
        ------
        InputError
            If there is no such layer, or layers are convolutions alone.
        StateError
            After `close`.
        """
        return self.state("recurrent_state", layer)

    def conv_state(self, layer: int) -> Tensor:
        """Return the convolution states of a layer by slot: [B, C, columns], the newest input in the last column."""
        return self.state("conv_state", layer)

    def state(self, name: str, layer: int) -> Tensor:
        """Return a layer's part of an array by name.

        Snapshots and stashes are packed: ``[rows, tokens, ...]`` of the last `reshape_intermediate_states`, at first
        ``[B, V, ...]``.

        Raises
        ------
        InputError
            If there is no such layer or array.
        StateError
            After `close`.
        """
        self.guard.check_open()
        number = _integer(layer)
        if not 0 <= number < self.num_layers:
            known = f"one of the {self.num_layers} recurrent layers" if self._slabs else "a recurrent layer; there are none"
            raise InputError(f"layer: {layer!r} is not {known}")
        slab = self._slabs.get(name)
        if slab is None and name == "recurrent_state":
            raise InputError("recurrent_state: the recurrent layers are convolutions alone; conv_state is all that they keep")
        if slab is None:
            raise InputError(f"name: {name!r} is not one of {', '.join(self._slabs)}")
        if name in RESIDENT_STATES:
            return slab.layer(number)
        return slab.layer(number, (*self._commits.packed, *slab.plan.shape[3:]))

    # -- slots --------------------------------------------------------------------------------------------------

    def clear_states(self) -> None:
        """Set all states of all slots to zero. Stream: enqueues one kernel."""
        with self.guard:
            if self._copies is not None:
                self._copies.clear(0, self.num_slots)

    def clear_slot(self, slot: int) -> None:
        """Set the states of a slot to zero in all layers.

        Raises
        ------
        InputError
            If there is no such slot.

        Stream: enqueues one kernel.
        """
        with self.guard:
            number = self.checked_slot("slot", slot)
            if self._copies is not None:
                self._copies.clear(number, 1)

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Set the states of several slots to zero. Raises as `clear_slot`; then none is cleared. Stream: a kernel each run."""
        with self.guard:
            numbers = sorted({self.checked_slot(f"slots[{place}]", slot) for place, slot in enumerate(slots)})
            if self._copies is None:
                return
            while numbers:
                run = next((i for i, slot in enumerate(numbers) if slot != numbers[0] + i), len(numbers))
                self._copies.clear(numbers[0], run)
                del numbers[:run]

    def prepare_copies(self) -> None:
        """Make what `copy_slots` needs: all of it that can fail for want of memory. Stream: host only."""
        with self.guard:
            if self._copies is not None:
                self._copies.prepare()

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of slots, (source, target) each, in all layers.

        Raises
        ------
        InputError
            If there is no such slot, a slot is a target twice, or a target is a source too; nothing was copied.

        Stream: enqueues a copy of the pairs and a kernel for each pool.
        """
        with self.guard:
            try:
                given = [(source, target) for source, target in pairs]
            except (TypeError, ValueError):
                raise InputError("pairs: (source, target) pairs of slots are wanted") from None
            checked = [(self.checked_slot("pairs", source), self.checked_slot("pairs", target)) for source, target in given]
            targets = {target for _, target in checked}
            if len(targets) != len(checked):
                raise InputError("pairs: a slot is a target twice")
            both = targets & {source for source, _ in checked}
            if both:
                raise InputError(f"pairs: slot {min(both)} is both source and target; copy in two calls")
            if self._copies is not None and checked:
                self._copies.copy_pairs(checked)

    def capture_slot(self, slot: int) -> SlotState:
        """Return a copy of the states of a slot in memory of its own.

        Raises
        ------
        InputError
            If there is no such slot.
        StateError
            If there are no recurrent layers.
        CapacityError
            If the device has not enough memory.

        Stream: enqueues a kernel for each pool. Cost: allocates the bytes of one slot.
        """
        with self.guard:
            number = self.checked_slot("slot", slot)
            return self._with_states().capture(number)

    def restore_slot(self, slot: int, recurrent: Sequence[Any], conv: Sequence[Any]) -> None:
        """Set the states of a slot.

        Parameters
        ----------
        slot : int
            Which.
        recurrent : sequence of array [1, H, D, S]
            One a layer, of the states' element type, on the device: ``capture_slot(s).recurrent``, or arrays of other
            libraries. Layers beyond its end become zero. Empty for convolutions alone.
        conv : sequence of array [1, C, columns]
            The same for convolution states.

        Raises
        ------
        InputError, ShapeError, InteropError
            If there is no such slot, more arrays than layers, or one of another shape, element type or place; then no state
            was changed.
        StateError
            If there are no recurrent layers.

        Stream: enqueues one kernel for each run of arrays that lie at equal distances, as those of a capture do.
        """
        with self.guard:
            number = self.checked_slot("slot", slot)
            self._with_states().restore(number, recurrent, conv)

    @property
    def slot_nbytes(self) -> int:
        """Bytes that `move_slot` moves; 0 without recurrent layers."""
        return 0 if self._copies is None else self._copies.slot_nbytes

    def move_slot(self, slot: int, memory: Memory, at: int, *, out: bool) -> None:
        """Copy the states of a slot to memory of the caller, or back.

        Parameters
        ----------
        slot : int
            Which.
        memory : Memory
            On the device, or page-locked host memory, with room for `slot_nbytes` bytes.
        at : int
            First byte there, a multiple of 8.
        out : bool
            Out of the slot, or into it.

        Raises
        ------
        InputError, ShapeError
            If there is no such slot, or the memory is too small.
        StateError
            If there are no recurrent layers.

        Stream: enqueues a kernel for each pool.
        """
        with self.guard:
            number = self.checked_slot("slot", slot)
            self.bind_move(memory, at, out=out)(number)

    def bind_move(self, memory: Memory, at: int, *, out: bool) -> Callable[[int], None]:
        """Return `move_slot` to memory of the caller, or back, as a call that takes a slot and cannot fail to compile.

        Raises
        ------
        ShapeError, StateError
            As `move_slot`.
        """
        with self.guard:
            copies = self._with_states()
            if at < 0 or at % 8 or at + copies.slot_nbytes > memory.nbytes:
                wanted = f"{copies.slot_nbytes} bytes at a multiple of 8 within {memory.nbytes}"
                raise ShapeError(f"at: {at} given, {wanted} wanted")
            return copies.bind_move(memory, at, out=out)

    def checked_slot(self, name: str, slot: object) -> int:
        """Return a slot number; `name` is for messages.

        Raises
        ------
        InputError
            If there is no such slot.
        """
        number = _integer(slot)
        if not 0 <= number < self.num_slots:
            raise InputError(f"{name}: {slot!r} is not one of the {self.num_slots} slots")
        return number

    def _with_states(self) -> StateCopies:
        if self._copies is None:
            raise StateError("the model has no recurrent layers, so no states")
        return self._copies

    def bind_fresh(self, edits: Tensor, state_slots: Tensor, state_index: Tensor) -> Callable[[int], None]:
        """Return what clears the slots of rows that start in a composition change, and says where rows find them.

        Parameters
        ----------
        edits : Tensor int32
            Records of the change (`numba_kv.kernels.layout`).
        state_slots : Tensor int32 [B]
            Slot of each row.
        state_index : Tensor int32 [B]
            Written for rows that change: the slot, -1 for a row that ends.

        Returns
        -------
        callable
            Takes the number of records; enqueues one kernel on the device's stream.

        Raises
        ------
        StateError
            If there are no recurrent layers.
        """
        return self._with_states().bind_fresh(edits, state_slots, state_index)

    def bind_permute(self, edits: Tensor, state_slots: Tensor, state_index: Tensor) -> Callable[[int], None]:
        """Return what moves states along cycles of slots in `edits`, and gives the rows of these slots their numbers.

        Each slot gets the states of the next one of its cycle. Parameters, result and errors as of `bind_fresh`.
        """
        return self._with_states().bind_permute(edits, state_slots, state_index)

    def close(self) -> None:
        """Forget the states; their owner gives the memory back."""
        self.guard.close()
        self._commits.close()
        if self._copies is not None:
            self._copies.close()
        for slab in self._slabs.values():
            slab.close()

    def __repr__(self) -> str:
        return f"MambaCacheManager({self.num_layers} layers, {self.num_slots} slots, {self.nbytes} bytes)"


def _integer(value: object) -> int:
    """Return an integer argument as it is, -1 for anything else."""
    try:
        return -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1
