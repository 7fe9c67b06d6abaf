"""LoRAManager: named adapters in device slots, chosen for each row of a batch.

Knows names, slots, who uses which, and how bytes get there. Does not know files (`lora_adapter`) or the place of a matrix
(`lora_layout`).

A slot is filled once, before anything refers to it, and never changed while something does. So new bytes under an old name
go to another slot; rows that use the old ones keep them until they are assigned again. ::

    load "fr"            slot 1: fr version 1      rows 0, 1 -> slot 1
    swap "fr"            slot 2: fr version 2      rows 0, 1 -> slot 1 still
    assign {0: "fr"}                               row 0 -> slot 2
    assign {1: None}     slot 1: free
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.config.lora_layout import LoRALayout
from numba_kv.config.lora_target import LoRATarget
from numba_kv.device import Device, Staging
from numba_kv.device.graph import is_capturing
from numba_kv.dtypes import DType, dtype
from numba_kv.errors import InputError, StateError
from numba_kv.geometry import INT32_MAX, ceil_div, check_count
from numba_kv.kernels.lora_slots import CHUNK_WORDS, switch_adapter
from numba_kv.weights.binding import check_progress
from numba_kv.weights.lora_adapter import HASH_NBYTES, HostAdapter, ReadOptions, read_adapter
from numba_kv.weights.lora_files import Source
from numba_kv.weights.lora_matrices import filler
from numba_kv.weights.lora_slots import LoRAAdapter, SlotTable
from numba_kv.weights.lora_targets import TargetTable
from numba_kv.weights.lora_tensors import LoRATensors
from numba_kv.weights.upload import Progress, Segment, Uploader, lent_uploader

if TYPE_CHECKING:
    from numba_kv.device import Memory, Tensor

__all__ = ["LORA_DTYPES", "NO_ADAPTER_HASH", "LoRAManager"]

#: What slots can be stored as.
LORA_DTYPES = ("float16", "bfloat16", "float32")
#: Content hash of a row without an adapter.
NO_ADAPTER_HASH = bytes(HASH_NBYTES)


class LoRAManager:
    """Adapters of one engine. `take` owns the memory; addresses never change.

    Parameters
    ----------
    device : Device
        Where adapters live.
    take : callable
        ``take(name, nbytes)`` returns device memory; see `SharedResources.take`.
    targets : iterable of LoRATarget
        What the engine declares, in its order.
    max_rank : int
        Largest rank of a module of an adapter; slots are padded to it with zeros.
    max_adapters : int
        Names that can be loaded at once.
    dtype : DType or str
        Element type of slots: float16, bfloat16 or float32.
    max_batch_size : int
        B, rows.
    fold_scaling : bool
        True: B is multiplied by the scaling when it is loaded. False: the engine multiplies by `scalings`.
    has_view : bool
        Whether there is a view for engines that take one adapter a batch (`bindings`); it costs a slot.
    uploader : Uploader, optional
        Staging to share; None: each load makes its own, and gives it back.

    Attributes
    ----------
    layout : LoRALayout
        Bytes and places.
    tensors : LoRATensors
        What kernels and engines read.

    Raises
    ------
    InputError
        If a limit or a target is wrong.
    CapacityError
        If the device does not have the memory.

    Stream: enqueues on the device's stream. Cost: `layout.nbytes`; compiles one kernel at first use.
    """

    def __init__(
        self,
        device: Device,
        take: Callable[[str, int], Memory],
        targets: Iterable[LoRATarget],
        *,
        max_rank: int,
        max_adapters: int,
        dtype: DType | str = "bfloat16",
        max_batch_size: int,
        fold_scaling: bool = True,
        has_view: bool = True,
        uploader: Uploader | None = None,
    ) -> None:
        self._table = TargetTable(targets)
        self.layout = LoRALayout(
            targets=self._table.targets,
            max_rank=check_count("max_rank", max_rank, high=INT32_MAX - 1),
            max_adapters=check_count("max_adapters", max_adapters, high=INT32_MAX - 1),
            dtype=_slot_dtype(dtype),
            max_batch_size=check_count("max_batch_size", max_batch_size, high=INT32_MAX - 1),
            has_view=has_view,
        )
        self._device = device
        self._fold = fold_scaling
        self._uploader = uploader
        self._slots = SlotTable(self.layout.num_slots, max_adapters, max_batch_size)
        self._lock = threading.RLock()  # the state of slots and rows
        self._loading = threading.RLock()  # one load at a time, without stopping rows from being assigned
        self._closed = False
        with device.active(), ExitStack() as undo:
            self.tensors = LoRATensors(device, self.layout, take)
            self._staging = Staging(device, max_batch_size)
            undo.callback(self._staging.close)
            ids = self.tensors.adapter_ids
            self._switch = switch_adapter.bind(
                device, {"slots": self.tensors.words, "adapter_ids": ids, "source": 0, "view": -1}
            )
            undo.pop_all()

    @property
    def adapter_ids(self) -> Tensor:
        """int32 [B]: slot of each row; 0 is the zero adapter."""
        return self.tensors.adapter_ids

    @property
    def bindings(self) -> Mapping[str, Tensor]:
        """Names of the engine's inputs -> what they are bound to; see `LoRATensors.bindings`."""
        return self.tensors.bindings

    @property
    def adapters(self) -> Mapping[str, LoRAAdapter]:
        """Loaded adapters by name, in the order of their loading."""
        with self._lock:
            return MappingProxyType(dict(self._slots.named))

    @property
    def active(self) -> LoRAAdapter | None:
        """The adapter in the view, that of the last `switch`; None without a view."""
        return self._slots.active

    @property
    def rows(self) -> tuple[LoRAAdapter | None, ...]:
        """The adapter of each row."""
        with self._lock:
            return tuple(self._slots.held.get(slot) for slot in self._slots.row_slots)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_driven(self) -> bool:
        """Whether sequences of a batch hold adapters: rows follow them then, and `assign` and `switch` are refused."""
        return self._slots.num_sequences > 0

    def content_hash(self, row: int) -> bytes:
        """Return 128 bits that tell what the adapter of a row computes: part of the key of whatever is reused.

        Raises
        ------
        InputError
            If there is no such row.
        """
        with self._lock:
            adapter = self._slots.held.get(self._slots.row_slots[self._row(row)])
            return NO_ADAPTER_HASH if adapter is None else adapter.content_hash

    def load(
        self,
        name: str,
        source: Source,
        *,
        layout: str = "auto",
        check_finite: bool = True,
        convert: bool = True,
        progress: Progress | None = None,
    ) -> LoRAAdapter:
        """Load an adapter; one of that name is replaced. The same bytes again change nothing.

        Parameters
        ----------
        name : str
            What it is called from now on.
        source : path or mapping of str to array
            A safetensors file, a folder of PEFT or of the reference's exporter, or tensors in the reference layout.
        layout : {"auto", "reference", "peft"}
            ``"auto"``: PEFT's where names begin with ``base_model.model.``.
        check_finite : bool
            Whether infinities and NaN are refused.
        convert : bool
            Whether element types other than the slots' are converted; else they are refused.
        progress : callable, optional
            ``progress(done_nbytes, total_nbytes)``, called on this thread.

        Returns
        -------
        LoRAAdapter
            What is loaded under the name now. Its version is one more than before if the bytes changed.

        Raises
        ------
        InputError
            If an argument is wrong.
        WeightError, LoRAError
            If the file is damaged or does not fit the engine.
        CapacityError
            If no slot is free: as many names as `max_adapters` are loaded, or rows still use replaced bytes.
        StateError
            After `close`, also if that came meanwhile; while the stream is being captured.

        A call that raises has changed nothing: slots, names, versions, rows. Rows keep the bytes they use until they are
        assigned again. Stream: enqueues on the device's stream and waits. Cost: reads the adapter twice (check and copy).
        """
        if not isinstance(name, str) or not name:
            raise InputError(f"name: {name!r} is not a name")
        check_progress(progress)
        options = ReadOptions(
            max_rank=self.layout.max_rank,
            dtype=self.layout.dtype,
            fold_scaling=self._fold,
            layout=layout,
            check_finite=check_finite,
            convert=convert,
        )
        with self._loading:
            self._check_ready()
            with read_adapter(source, self._table, options) as adapter:
                return self._place(name, adapter, progress)

    def swap(self, name: str, source: Source, **options: object) -> LoRAAdapter:
        """Replace the bytes of a loaded adapter; as `load`, but the name has to be there.

        Raises
        ------
        InputError
            If no adapter is loaded under the name; else as `load`.
        """
        with self._loading:
            self._check_open()
            self._slots.of(name)
            return self.load(name, source, **options)  # type: ignore[arg-type]

    def _place(self, name: str, adapter: HostAdapter, progress: Progress | None) -> LoRAAdapter:
        with self._lock:
            current = self._slots.named.get(name)
            if current is not None and current.content_hash == adapter.content_hash:
                return current
            slots = self._slots
            slot = slots.take(name)
        try:
            self._upload(slot, adapter, progress)
        except BaseException:
            with self._lock:
                slots.give_back(slot)
            raise
        with self._lock:
            self._check_open()  # `progress` may have closed it, and other slots are there since
            return slots.put(name, slot, adapter)

    def _upload(self, slot: int, adapter: HostAdapter, progress: Progress | None) -> None:
        """Write every byte of a slot: what an earlier adapter left behind a smaller rank becomes zeros."""
        layout, kind = self.layout, self.layout.dtype
        scalings = np.array([one.scaling for one in adapter.matrices], np.float32).reshape(-1, 1)
        segments = [Segment(begin=0, nbytes=scalings.nbytes, fill=filler(lambda low, high: scalings[low:high], 1, _FLOAT32))]
        places = zip(adapter.matrices, layout.ranks, layout.a_offsets, layout.b_offsets, strict=True)
        for one, rank, a_at, b_at in places:
            k, n = one.target.k, one.target.n
            segments.append(Segment(begin=a_at, nbytes=k * rank * kind.itemsize, fill=filler(one.a_rows(rank), rank, kind)))
            segments.append(Segment(begin=b_at, nbytes=rank * n * kind.itemsize, fill=filler(one.b_rows(), n, kind)))
        with lent_uploader(self._uploader, self._device) as uploader:
            uploader.upload(segments, self.tensors.slot_memory(slot), progress)

    def unload(self, name: str) -> None:
        """Forget an adapter and free its slot.

        Raises
        ------
        InputError
            If no adapter is loaded under the name.
        StateError
            If rows, the view or `acquire` use it; after `close`.

        Stream: host only.
        """
        with self._loading, self._lock:
            self._check_open()
            self._slots.drop(self._slots.of(name))

    def acquire(self, name: str) -> LoRAAdapter:
        """Keep an adapter's bytes until `release`, for a request that has no row yet.

        Raises
        ------
        InputError
            If no adapter is loaded under the name.

        Stream: host only.
        """
        with self._lock:
            self._check_open()
            adapter = self._slots.of(name)
            self._slots.acquire(adapter.slot)
            return adapter

    def hold(self, adapter: str | LoRAAdapter) -> LoRAAdapter:
        """Keep an adapter's bytes until `let_go`, for a batch: counted apart from `acquire`, so that nobody else gives it back.

        Raises
        ------
        InputError, StateError
            If no adapter is loaded under the name, or the bytes are gone.

        Stream: host only.
        """
        with self._lock:
            self._check_open()
            found = self._slots.held[self._slots.slot_of(adapter)]
            self._slots.hold(found.slot)
            return found

    def let_go(self, adapter: LoRAAdapter) -> None:
        """Give back what `hold` kept; after `close` nothing is left to give. Stream: host only."""
        with self._lock:
            if not self._closed:
                self._slots.let_go(adapter.slot)

    def release(self, adapter: LoRAAdapter) -> None:
        """Give back what `acquire` returned.

        Raises
        ------
        StateError
            If it was not acquired, or given back already.

        Stream: host only.
        """
        with self._lock:
            self._check_open()
            self._slots.release(adapter)

    def assign(self, rows: Mapping[int, str | LoRAAdapter | None]) -> None:
        """Choose the adapters of rows; other rows keep theirs.

        Parameters
        ----------
        rows : mapping of int to str, LoRAAdapter or None
            Row -> a name (its newest bytes), an adapter (those bytes), or None.

        Raises
        ------
        InputError
            If a row or a name does not exist.
        StateError
            If the bytes of an adapter are gone, or rows follow the sequences of a batch (`is_driven`); after `close`, or while
            the stream is being captured.

        A call that raises has changed nothing. Stream: enqueues one copy of 4 * B bytes; does not wait.
        """
        with self._lock:
            self._check_not_driven()
            self.assign_held(rows)

    def assign_held(self, rows: Mapping[int, str | LoRAAdapter | None]) -> None:
        """Do what `assign` does, for the batch whose sequences hold adapters (`hold`)."""
        with self._lock:
            self._check_ready()
            if not isinstance(rows, Mapping):
                raise InputError(f"rows: {type(rows).__name__} is not a mapping of rows to adapters")
            wanted = list(self._slots.row_slots)
            for row, adapter in rows.items():
                wanted[self._row(row)] = self._slots.slot_of(adapter)
            if wanted == self._slots.row_slots:
                return
            with self._device.active():
                words = self._staging.acquire()
                words[: len(wanted)] = wanted
                self._staging.send([(0, len(wanted), self.tensors.adapter_ids, 0)], self._device.stream)
            self._slots.set_rows(wanted)

    def switch(self, adapter: str | LoRAAdapter | None) -> None:
        """Make one adapter that of every row and of the view; None: no adapter.

        Parameters
        ----------
        adapter : str, LoRAAdapter or None
            As in `assign`.

        Raises
        ------
        InputError, StateError
            As `assign`; rows that follow a batch's sequences take no other adapter.

        A call that raises has changed nothing. What was enqueued before still sees the adapter before. Stream: enqueues one
        launch, whatever the number of layers; does not wait. Cost: with a view a slot read and written.
        """
        with self._lock:
            self._check_ready()
            self._check_not_driven()
            slot = self._slots.slot_of(adapter)
            items, view = 1, -1
            if self.layout.has_view:
                items, view = ceil_div(self.layout.slot_nbytes // 8, CHUNK_WORDS), self.layout.num_slots
            with self._device.active():
                self._switch(items, self._device.stream, source=slot, view=view)
            self._slots.set_rows([slot] * self.layout.max_batch_size, active=slot if self.layout.has_view else None)

    def close(self) -> None:
        """Forget every adapter and refuse further calls; a second call does nothing. The memory is its owner's to give back."""
        with self._loading, self._lock:
            if not self._closed:
                self._closed = True
                self._slots = SlotTable(self.layout.num_slots, self.layout.max_adapters, self.layout.max_batch_size)
                with self._device.active():
                    self._staging.close()

    def _row(self, row: int) -> int:
        try:
            number = -1 if isinstance(row, bool) else index(row)
        except TypeError:
            number = -1
        if not 0 <= number < self.layout.max_batch_size:
            raise InputError(f"row: {row!r} is not in 0..{self.layout.max_batch_size - 1}")
        return number

    def _check_ready(self) -> None:
        self._check_open()
        if is_capturing(self._device.stream):
            raise StateError("adapters cannot change inside a capture: a replay would not know; change them between replays")

    def _check_not_driven(self) -> None:
        if self._slots.num_sequences:
            raise StateError(
                f"adapters of rows follow {self._slots.num_sequences} sequences of a batch, which were admitted with theirs; "
                "retire those first, or admit with adapters="
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("LoRAManager is closed")

    def __len__(self) -> int:
        """Return the number of loaded adapters."""
        return len(self._slots.named)

    def __contains__(self, name: object) -> bool:
        return name in self._slots.named

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self)} of {self.layout.max_adapters} adapters"
        return f"LoRAManager({state}, {len(self._table.targets)} targets, rank {self.layout.max_rank}, {self._device.target})"


_FLOAT32 = dtype("float32")


def _slot_dtype(kind: DType | str) -> DType:
    found = dtype(kind)
    if found.name not in LORA_DTYPES:
        raise InputError(f"dtype: {found} is not one of {', '.join(LORA_DTYPES)}")
    return found
