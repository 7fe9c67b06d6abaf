"""SharedResources: what lives as long as the process does, in one object that owns every byte of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from numba_kv.cache import HybridCacheManager, KVPageTable
from numba_kv.cache.model_tables import ModelTables
from numba_kv.cache.table_loans import TableLoans, TableUser
from numba_kv.config import DeploymentConfig, LLMEngineConfig
from numba_kv.config.rope_layout import engine_layouts
from numba_kv.device import Device, Memory, Stream, Tensor, create_device
from numba_kv.device.unique import Unique
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, ConfigError, InputError, StateError
from numba_kv.geometry import Window, round_up
from numba_kv.plan import MemoryPlan, plan_memory
from numba_kv.plan_deployment import DeploymentPlan, plan_deployment
from numba_kv.weights.engine_adapters import adapters_to_load, make_lora_manager
from numba_kv.weights.external import ExternalWeightManager
from numba_kv.weights.rope_cache import RopeCache
from numba_kv.weights.rope_table import RopeTable
from numba_kv.weights.upload import Uploader

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SharedResources", "allocate_zero_buffer"]


class SharedResources(Unique):
    """The caches, tables and scratch memory of an LLM runtime. Owns them; `close` gives everything back.

    Made by `create_for_llm` or `create_for_spec_decode`. Device addresses do not change between construction and `close`.

    Attributes
    ----------
    deployment : DeploymentConfig
        What it was made for: a base model, and a draft or none.
    config : LLMEngineConfig
        What the caches of the base are built for.
    plans : tuple of MemoryPlan
        Every region that was allocated, of each model; what both share is in that of the base.
    plan : MemoryPlan
        That of the base.
    device : Device
        Target, default stream and byte counts.
    cache_managers : list of HybridCacheManager
        One a model: the base, and the draft if it has a cache of its own.
    kv_page_tables : list of KVPageTable
        Full-attention table of each of these models; host-owned until a Batch takes it.
    rope_pool : RopeCache
        Rotary tables by configuration and length.
    rope_tables : tuple of RopeTable
        Those of the base: one, or the sliding and the full layers' where they rotate differently; none if the
        configuration states no rotation. `get_rope_tables` has those of the draft.
    lora_manager : LoRAManager or None
        Adapters; None if the configuration takes none (`max_lora_rank`, `lora_targets`).
    external_weight_manager : ExternalWeightManager
        Weights from files; nothing is loaded until `load` is called.
    zero_buffer : Tensor
        uint8 [nbytes], zeros.
    swa_kv_cache_mode : Tensor or None
        int8 [1] if window layers live in rings, [0] if they have full rows; None if there is no window layer. Only its
        shape has a meaning. That of the base; `get_swa_kv_cache_mode` has the draft's.
    """

    zero_buffer: Tensor
    swa_kv_cache_mode: Tensor | None

    def __init__(self, plan: DeploymentPlan, device: Device) -> None:
        self.deployment = plan.deployment
        self.plans = plan.models
        self.plan = plan.models[0]
        self.config = self.plan.config
        self.device = device
        self.cache_managers: list[HybridCacheManager] = []
        self.kv_page_tables: list[KVPageTable] = []
        self._tables: list[ModelTables] = []
        self._owned = ExitStack()
        self._named: dict[str, Memory] = {}
        self._streams = [device.stream]
        self._loans = TableLoans()
        self._uploader = Uploader(device)  # of everything that comes from files; it holds nothing until the first of it
        self._closed = self._is_released = False
        with device.active(), ExitStack() as undo:  # a constructor that raises leaves nothing allocated
            undo.callback(self._owned.close)
            try:
                self._build(plan)
            except MemoryError as error:
                reason = f"host memory: copies of the page tables do not fit ({error}); lower max_batch_size or the capacity"
                pools = sum(model.pool_nbytes for model in plan.models)
                raise CapacityError(reason, needed=plan.nbytes - pools, free=0) from error
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
        adapters = adapters_to_load(config, lora_weights_map)
        model = plan_memory(config, memory_bytes)
        plan = DeploymentPlan(DeploymentConfig(base=config), (model,), (engine_layouts(config),))
        return cls._create(plan, create_device(target, device, stream), adapters)

    @classmethod
    def create_for_spec_decode(
        cls,
        deployment: DeploymentConfig,
        max_runtime_batch_size: int | None = None,
        lora_weights_map: Mapping[str, str | Path] | None = None,
        stream: object | None = None,
        *,
        target: str | None = None,
        device: int = 0,
        memory_bytes: int | None = None,
    ) -> SharedResources:
        """Allocate everything that a base model and its draft need: caches and tables of both, and what they share.

        Model 0 is the base, model 1 the draft. A draft that reads the base's KV has no cache of its own: then there is only
        model 0. Windows are allowed in both; their rings hold a verification step of the base, and a round of the draft, so
        that either can be taken back (the reference refuses windows beside a draft). Adapters and weights from files are the
        base's.

        Parameters
        ----------
        deployment : DeploymentConfig
            Both models, and how tokens are drafted.
        max_runtime_batch_size : int, optional
            Rows of both; default: as many as both models have.
        lora_weights_map, stream, target, device
            As `create_for_llm`.
        memory_bytes : int, optional
            Budget for everything; see `plan_deployment`.

        Raises
        ------
        InputError, TargetError
            If an argument is wrong or the target cannot work here.
        ConfigError, LoRAError
            If there is no draft, the rows are more than both models have, or adapters are wrong as in `create_for_llm`.
        PlanError, CapacityError
            If the plan does not fit the budget, or the device does not have the memory; nothing stays allocated.

        Stream: enqueues allocation and zeroing, and waits once. Cost: the bytes of all `plans` of device memory.
        """
        if not isinstance(deployment, DeploymentConfig):
            raise InputError(f"deployment: {type(deployment).__name__} given, a DeploymentConfig is wanted")
        if deployment.draft is None:
            raise ConfigError("deployment: no draft, so there is nothing to verify; create_for_llm(deployment.base) does")
        adapters = adapters_to_load(deployment.base, lora_weights_map)
        plan = plan_deployment(deployment, max_runtime_batch_size, memory_bytes)
        return cls._create(plan, create_device(target, device, stream), adapters)

    @classmethod
    def _create(cls, plan: DeploymentPlan, device: Device, adapters: Mapping[str, str | Path]) -> SharedResources:
        resources = cls(plan, device)
        try:
            for name, path in adapters.items():
                if resources.lora_manager is not None:
                    resources.lora_manager.load(name, path)
        except BaseException:
            resources.close()
            raise
        return resources

    def _build(self, plan: DeploymentPlan) -> None:
        self._owned.callback(self._close_streams)
        for place, model in enumerate(plan.models):
            self._build_model(model, "" if place == 0 else "draft: ")
        self.rope_pool = RopeCache(self.device, self.take)
        self._owned.callback(self.rope_pool.close)
        build = self.rope_pool.table
        self._rope_tables = [tuple(build(r.config, r.length, num_rows=r.num_rows) for r in layouts) for layouts in plan.ropes]
        self.rope_tables = self._rope_tables[0]
        self.lora_manager = make_lora_manager(self.device, self.take, self.config, self._uploader)
        if self.lora_manager is not None:
            self._owned.callback(self.lora_manager.close)
        planned = self.config.external_weights_nbytes or None
        self.external_weight_manager = ExternalWeightManager(
            self.device, self.take, uploader=self._uploader, planned_nbytes=planned
        )
        self._owned.callback(self.external_weight_manager.close)
        self.zero_buffer = self._tensor("zero_buffer")
        bounded = [model.config.use_bounded_swa if model.config.has_window_layers else None for model in plan.models]
        mode = self._tensor("swa_kv_cache_mode") if bounded.count(None) < len(bounded) else None
        self._modes = [None if mode is None or rings is None else mode if rings else mode[:0] for rings in bounded]
        self.swa_kv_cache_mode = self._modes[0]
        self._owned.callback(self._uploader.close)
        if planned:
            self._uploader.prepare()  # weights will be loaded: not at the cost of the first of them
        self.device.stream.synchronize()

    def _build_model(self, plan: MemoryPlan, prefix: str) -> None:
        """Make the caches and the tables of one model; `prefix` is for the names of its tables."""
        manager = HybridCacheManager(self.device, plan, self.take)
        self._owned.callback(manager.close)
        self.cache_managers.append(manager)
        tables = ModelTables(manager, prefix, self._owned)
        self.kv_page_tables.append(tables.full)
        self._tables.append(tables)
        self._loans.add(tables.all)

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

    def taker(self, index: int) -> Callable[[str, int], Memory]:
        """Return `take_once` for the things of model `index`: equal names of two models are two pieces of memory."""
        return lambda name, nbytes: self.take_once(f"{index}.{name}", nbytes)

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
        for tables in self._tables:
            several = tuple(tables.windows.values())
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
        return self._tables[index].window(window) if 0 <= self._model_number(index) < len(self._tables) else None

    def get_caches(self, index: int = 0) -> HybridCacheManager:
        """Return the caches that model `index` reads: its own, or the base's if it is a draft that has none.

        Raises
        ------
        InputError
            If there is no such model.
        """
        self._check_open()
        models = 1 if self.deployment.draft is None else 2
        if not 0 <= self._model_number(index) < models:
            raise InputError(f"index: {index!r} is not one of the {models} models")
        return self.cache_managers[min(index, len(self.cache_managers) - 1)]

    def get_swa_kv_cache_mode(self, index: int = 0) -> Tensor | None:
        """Return the mode of the caches that model `index` reads, as `swa_kv_cache_mode`. Raises as `get_caches`."""
        return self._modes[self.cache_managers.index(self.get_caches(index))]

    def get_rope_tables(self, index: int = 0) -> tuple[RopeTable, ...]:
        """Return the rotary tables of model `index`, as `rope_tables`; 1 is the draft, with a cache of its own or without.

        Raises as `get_caches`.
        """
        self.get_caches(index)
        return self._rope_tables[index]

    @staticmethod
    def _model_number(index: object) -> int:
        if isinstance(index, bool) or not isinstance(index, int):
            raise InputError(f"index: {index!r} is not a model number")
        return index

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
        with self._loans.calls(), self.device.active():
            old, new = self.device.stream, self.device.as_stream(stream)
            if new.handle == old.handle and self.device.target == "cuda":
                return
            for table in self._loans.tables:
                table.join(new)
            new.wait(old.record())
            self.device.stream = new
            if new not in self._streams:
                self._streams.append(new)

    def _close_streams(self) -> None:
        """Close the streams that work was enqueued on; those that callers own stay open."""
        for stream in self._streams:
            stream.close()

    def get_plan(self, index: int = 0) -> MemoryPlan:
        """Return the plan of model `index`, one with a cache of its own.

        Raises
        ------
        InputError
            If there is no such model.
        """
        self._check_open()
        if not 0 <= self._model_number(index) < len(self.plans):
            reason = "; the draft reads the base's KV, by the base's tables" if self.deployment.shares_target_kv else ""
            raise InputError(f"index: {index!r} is not one of the {len(self.plans)} models with a cache{reason}")
        return self.plans[index]

    def attach(self, user: TableUser, index: int = 0) -> None:
        """Lend the tables of model `index` to `user`; each model's to one user at a time.

        Raises
        ------
        InputError
            As `get_plan`.
        StateError
            If closed, or lent already.
        """
        self.get_plan(index)
        self._loans.attach(user, index)

    def detach(self, user: TableUser) -> None:
        """Take the tables back from `user`: every entry is -1 and the host owns them again."""
        self._loans.detach(user)

    @property
    def users(self) -> tuple[TableUser, ...]:
        """Who has the tables of a model now."""
        return self._loans.users

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Give everything back in reverse order, once; a second call does nothing, or ends what an interrupt left.

        Raises
        ------
        StateError
            If a call of the batch, or the load of weights or an adapter, is running: then nothing is given back.

        Stream: waits for the work enqueued so far.
        """
        if self._is_released:
            return
        self._uploader.check_idle()
        with ExitStack() as rest:  # a batch that fails to close does not keep the memory
            rest.callback(self._release)
            for user in reversed(self.users):
                try:
                    user.close()
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
        state = "closed" if self._closed else f"{sum(plan.nbytes for plan in self.plans)} bytes"
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
