"""SharedResources: what lives as long as the process does, in one object that owns every byte of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from numba_kv.cache import HybridCacheManager, KVPageTable
from numba_kv.config import LLMEngineConfig
from numba_kv.device import Device, Memory, Stream, Tensor, create_device
from numba_kv.device.unique import Unique
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, ConfigError, InputError, StateError
from numba_kv.geometry import Window, round_up
from numba_kv.plan import MemoryPlan, lora_layout, plan_memory
from numba_kv.weights.external import ExternalWeightManager
from numba_kv.weights.lora_manager import LoRAManager
from numba_kv.weights.rope_cache import RopeCache

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SharedResources", "allocate_zero_buffer"]


class TableUser(Protocol):
    """Who can take the tables over: a Batch."""

    @property
    def guard(self) -> AbstractContextManager[None]:
        """What keeps its calls apart."""

    def close(self) -> None:
        """Give the tables back."""


class SharedResources(Unique):
    """The caches, tables and scratch memory of an LLM runtime. Owns them; `close` gives everything back.

    Made by `create_for_llm`. Device addresses do not change between construction and `close`.

    Attributes
    ----------
    config : LLMEngineConfig
        What it was made for.
    plan : MemoryPlan
        Every region that was allocated.
    device : Device
        Target, default stream and byte counts.
    cache_managers : list of HybridCacheManager
        One a model.
    kv_page_tables : list of KVPageTable
        Full-attention table of each model; host-owned until a Batch takes it.
    rope_pool : RopeCache
        Rotary tables by configuration and length.
    rope_tables : tuple of RopeTable
        Those of the model: one, or the sliding and the full layers' where they rotate differently; none if the
        configuration states no rotation.
    lora_manager : LoRAManager or None
        Adapters; None if the configuration takes none (`max_lora_rank`, `lora_targets`).
    external_weight_manager : ExternalWeightManager
        Weights from files; nothing is loaded until `load` is called.
    zero_buffer : Tensor
        uint8 [nbytes], zeros.
    swa_kv_cache_mode : Tensor or None
        int8 [1] if window layers live in rings, [0] if they have full rows; None if there is no window layer. Only its
        shape has a meaning.
    """

    zero_buffer: Tensor
    swa_kv_cache_mode: Tensor | None

    def __init__(self, config: LLMEngineConfig, plan: MemoryPlan, device: Device) -> None:
        self.config = config
        self.plan = plan
        self.device = device
        self.cache_managers: list[HybridCacheManager] = []
        self.kv_page_tables: list[KVPageTable] = []
        self._swa_tables: list[dict[Window, KVPageTable]] = []
        self._owned = ExitStack()
        self._named: dict[str, Memory] = {}
        self._streams = [device.stream]
        self._user: TableUser | None = None
        self._loan = object()  # what ends the loans to users; kept from the start, so that an interrupt cannot lose it
        self._closed = self._is_released = False
        with device.active(), ExitStack() as undo:  # a constructor that raises leaves nothing allocated
            undo.callback(self._owned.close)
            try:
                self._build(plan)
            except MemoryError as error:
                reason = f"host memory: copies of the page tables do not fit ({error}); lower max_batch_size or the capacity"
                raise CapacityError(reason, needed=plan.nbytes - plan.pool_nbytes, free=0) from error
            undo.pop_all()

    @classmethod
    def create_for_llm(
        cls,
        config: LLMEngineConfig,
        lora_weights_map: Mapping[str, str | Path] | None = None,
        *,
        stream: object | None = None,
        target: str | None = None,
        device: int = 0,
        memory_bytes: int | None = None,
    ) -> SharedResources:
        """Allocate everything that a plain decoder-only model needs.

        Parameters
        ----------
        config : LLMEngineConfig
            The model and its limits.
        lora_weights_map : mapping of str to path, optional
            Adapters to load: name -> safetensors file or PEFT folder; empty paths are skipped.
        stream : stream, optional
            Where all work is enqueued: anything with ``__cuda_stream__``, a torch or CuPy stream, a non-zero handle;
            None makes one.
        target : {"cuda", "cpu", "sim"}, optional
            Default: `numba_kv.target()`.
        device : int
            Device number on `cuda`.
        memory_bytes : int, optional
            Budget; see `plan_memory`.

        Raises
        ------
        InputError, TargetError
            If an argument is wrong or the target cannot work here.
        ConfigError, LoRAError
            If adapters are given and the configuration takes none, or one of them is wrong.
        PlanError, CapacityError
            If the plan does not fit the budget, or the device does not have the memory; nothing stays allocated.

        Stream: enqueues allocation and zeroing, and waits once. Cost: `plan.nbytes` of device memory.
        """
        if not isinstance(config, LLMEngineConfig):
            raise InputError(f"config: {type(config).__name__} given; load_engine_config makes an LLMEngineConfig")
        adapters = {name: path for name, path in (lora_weights_map or {}).items() if path}
        if adapters and lora_layout(config) is None:
            raise ConfigError(
                f"lora_weights_map: {', '.join(adapters)} given, but max_lora_rank is {config.max_lora_rank} and "
                f"{len(config.lora_targets)} lora_targets are declared; set both (targets_from_config lists usual targets)"
            )
        plan = plan_memory(config, memory_bytes)
        resources = cls(config, plan, create_device(target, device, stream))
        try:
            for name, path in adapters.items():
                if resources.lora_manager is not None:
                    resources.lora_manager.load(name, path)
        except BaseException:
            resources.close()
            raise
        return resources

    def _build(self, plan: MemoryPlan) -> None:
        self._owned.callback(self._close_streams)
        manager = HybridCacheManager(self.device, plan, self.take)
        self._owned.callback(manager.close)
        self.cache_managers.append(manager)
        tables = {group.window: self._make_table(manager, group.index) for group in plan.groups}
        full = plan.groups[0]
        self.kv_page_tables.append(tables.pop(full.window))
        self._swa_tables.append(tables)
        if self.config.max_batch_size * full.row_pages <= full.usable_pages:
            self.kv_page_tables[0].set_identity()
        for table in (self.kv_page_tables[0], *tables.values()):
            table.upload()
        self.rope_pool = RopeCache(self.device, self.take)
        self._owned.callback(self.rope_pool.close)
        self.rope_tables = self.rope_pool.for_engine(self.config)
        self.lora_manager = self._make_lora_manager(plan)
        planned = self.config.external_weights_nbytes or None
        self.external_weight_manager = ExternalWeightManager(self.device, self.take, planned_nbytes=planned)
        self._owned.callback(self.external_weight_manager.close)
        self.zero_buffer = self._tensor("zero_buffer")
        self.swa_kv_cache_mode = None
        if self.config.has_window_layers:
            mode = self._tensor("swa_kv_cache_mode")
            self.swa_kv_cache_mode = mode if self.config.use_bounded_swa else mode[:0]
        self.device.stream.synchronize()

    def _make_lora_manager(self, plan: MemoryPlan) -> LoRAManager | None:
        layout = lora_layout(plan.config)
        if layout is None:
            return None
        manager = LoRAManager(
            self.device,
            self.take,
            layout.targets,
            max_rank=layout.max_rank,
            max_adapters=layout.max_adapters,
            dtype=layout.dtype,
            max_batch_size=layout.max_batch_size,
        )
        self._owned.callback(manager.close)
        return manager

    def _make_table(self, manager: HybridCacheManager, index: int) -> KVPageTable:
        group = self.plan.groups[index]
        table = KVPageTable(
            self.device,
            self.config.max_batch_size,
            group.row_pages,
            group.num_pages,
            "dense" if group.window.is_full else "sparse",
            reserved_pages=group.num_pages - group.usable_pages,
            tensor=manager.step_buffers.page_tables[index],
            name=f"page table of {group.window} attention",
        )
        self._owned.callback(lambda: table.close(even_if_lent=True))  # also after a batch that failed to give it back
        return table

    def take(self, name: str, nbytes: int) -> Memory:
        """Return `nbytes` of zeroed device memory that `close` gives back. Stream: enqueues."""
        self._check_open()
        memory = self.device.allocate(nbytes)
        self._owned.callback(lambda: memory.close(self.device.stream))
        return memory

    def take_once(self, name: str, nbytes: int) -> Memory:
        """Return the memory called `name`; the first call allocates it. So what comes and goes does not add up."""
        if name not in self._named:
            self._named[name] = self.take(name, nbytes)
        return self._named[name]

    def _tensor(self, name: str) -> Tensor:
        region = self.plan.region(name)
        return Tensor(self.take(name, region.nbytes), self.device, dtype(region.dtype), region.shape)

    @property
    def stream(self) -> Stream:
        """The stream on which everything is enqueued."""
        return self.device.stream

    @property
    def swa_kv_page_tables(self) -> list[KVPageTable | tuple[KVPageTable, ...] | None]:
        """Window table of each model: None without window layers, a tuple (in model order) with several windows."""
        found: list[KVPageTable | tuple[KVPageTable, ...] | None] = []
        for tables in self._swa_tables:
            several = tuple(tables.values())
            found.append(several if len(several) > 1 else several[0] if several else None)
        return found

    def get_swa_kv_page_table(self, index: int, window: Window | int | None = None) -> KVPageTable | None:
        """Return the window table of model `index`, or None if there is none or `index` is out of range.

        Parameters
        ----------
        index : int
            0 is the base model.
        window : Window or int, optional
            Which window (or its tokens); needed if the model has several.

        Raises
        ------
        InputError
            If the model has several windows and `window` does not name one of them.
        """
        self._check_open()
        if isinstance(index, bool) or not isinstance(index, int):
            raise InputError(f"index: {index!r} is not a model number")
        if not 0 <= index < len(self._swa_tables):
            return None
        tables = self._swa_tables[index]
        if isinstance(window, bool) or not isinstance(window, (int, Window, type(None))):
            raise InputError(f"window: {window!r} is neither a Window nor a number of tokens")
        if window is None:
            if len(tables) > 1:
                raise InputError(f"window: the model has {', '.join(map(str, tables))}; name one of them")
            return next(iter(tables.values()), None)
        named = [table for key, table in tables.items() if window == key or window == key.tokens]
        if len(named) != 1:
            raise InputError(f"window: {window} names {len(named)} of {', '.join(map(str, tables)) or 'no windows'}")
        return named[0]

    def hand_over(self, stream: object) -> None:
        """Move everything to another stream: it waits for the work enqueued so far, and takes all further work.

        Parameters
        ----------
        stream : stream
            As in `create_for_llm`; not None.

        Raises
        ------
        InputError
            If it is not a stream of the target.

        Stream: enqueues an event and a wait; the host does not wait.
        """
        self._check_open()
        if stream is None:
            raise InputError("stream: None given; name the stream to move to")
        with self._call(), self.device.active():
            old, new = self.device.stream, self.device.as_stream(stream)
            if new.handle == old.handle and self.device.target == "cuda":
                return
            for table in self._tables():
                table.join(new)
            new.wait(old.record())
            self.device.stream = new
            if new not in self._streams:
                self._streams.append(new)

    def _call(self) -> AbstractContextManager[None]:
        """Return what keeps calls of several threads apart: the guard of whoever has the tables."""
        return self._user.guard if self._user is not None else nullcontext()

    def _close_streams(self) -> None:
        """Close the streams that work was enqueued on; those that callers own stay open."""
        for stream in self._streams:
            stream.close()

    def attach(self, user: TableUser) -> None:
        """Lend the tables to `user`, one at a time.

        Raises
        ------
        StateError
            If closed, or lent already.
        """
        self._check_open()
        if self._user is not None:
            raise StateError(f"the tables are in use by {self._user!r}; close it first")
        self._user = user  # before the first table is lent, so that `detach` undoes whatever an error or an interrupt left
        try:
            for table in self._tables():
                table.lend(type(user).__name__, self._loan)
        except BaseException:
            self.detach(user)
            raise

    def detach(self, user: TableUser) -> None:
        """Take the tables back from `user`: every entry is -1 and the host owns them again."""
        if self._user is not user:
            return
        with ExitStack() as each:  # goes on past a table that fails
            for table in self._tables():
                if table.is_lent_for(self._loan):
                    each.callback(table.give_back, self._loan)
        self._user = None

    def _tables(self) -> list[KVPageTable]:
        return [*self.kv_page_tables, *(table for tables in self._swa_tables for table in tables.values())]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Give everything back in reverse order, once; a second call does nothing, or ends what an interrupt left.

        Raises
        ------
        StateError
            If a call of the batch runs in another thread: then nothing is given back.

        Stream: waits for the work enqueued so far.
        """
        if self._is_released:
            return
        with ExitStack() as rest:  # a batch that fails to close does not keep the memory
            rest.callback(self._release)
            if self._user is not None:
                try:
                    self._user.close()
                except StateError:
                    rest.pop_all()
                    raise

    def _release(self) -> None:
        if not self._closed:
            self._owned.callback(lambda: self.device.stream.synchronize())
            self._closed = True
        with self.device.active():
            self._owned.close()  # goes on where an interrupt left it
        self._is_released = True

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("SharedResources is closed")

    def __enter__(self) -> SharedResources:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.plan.nbytes} bytes"
        return f"SharedResources({self.config.model_type or 'model'}, {self.device.target}, {state})"


def allocate_zero_buffer(resources: SharedResources, nbytes: int, stream: object | None = None) -> Tensor:
    """Make `resources.zero_buffer` at least `nbytes` large and return it: uint8 zeros.

    A larger buffer is a new one; the old address stays valid until `resources` is closed.

    Raises
    ------
    InputError
        If `nbytes` is not a positive integer.
    StateError
        If `resources` is closed.

    Stream: enqueues on the resources' stream; `stream`, if given, is made to wait for it.
    """
    if not isinstance(resources, SharedResources):
        raise InputError(f"resources: {type(resources).__name__} is not a SharedResources")
    resources._check_open()
    try:
        number = 0 if isinstance(nbytes, bool) else index(nbytes)
    except TypeError:
        number = 0
    if number < 1:
        raise InputError(f"nbytes: {nbytes!r} is not a positive number of bytes")
    if resources.zero_buffer.nbytes < number:
        size = round_up(number, 256)
        resources.zero_buffer = Tensor(resources.take("zero_buffer", size), resources.device, dtype("uint8"), (size,))
    if stream is not None:
        resources.device.as_stream(stream).wait(resources.stream.record())
    return resources.zero_buffer
