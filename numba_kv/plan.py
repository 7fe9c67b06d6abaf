"""Config and budget -> memory plan: every byte that the caches of a model take, before any is allocated.

Knows window groups, slabs, reserved pages and tables. Does not know devices; a plan is plain numbers.

A *group* is the layers that share one window: one page-id space, one table. A *slab* is the pool of the group's layers
that also share heads and head size, ``[layers, 2, N, P, H, D]``: K in half 0, V in half 1, exactly N pages after K; in a
group of layout HND a page is [H, P, D]. ::

    page ids of a group   0 .. usable pages .. + kept pages .. N-2        N-1
                          rows and leases     copies kept      null page   trash page
                                              for reuse
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from operator import index as as_integer

from numba_kv.config.engine import LLMEngineConfig
from numba_kv.config.lora_layout import LoRALayout
from numba_kv.config.rope_layout import engine_layouts
from numba_kv.config.state_layout import slot_nbytes, state_plans
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, PlanError
from numba_kv.geometry import MAX_POOL_PAGES, RESERVED_PAGES, Window, ceil_div, ring_pages, round_up, table_pages

__all__ = [
    "ALIGNMENT",
    "GROUP_COLUMNS",
    "PARTS",
    "RECORD_WORDS",
    "GroupPlan",
    "MemoryPlan",
    "Region",
    "SlabPlan",
    "check_budget",
    "lora_layout",
    "plan_memory",
]

#: Bytes to which every region and every layer's pool is aligned.
ALIGNMENT = 256
#: int32 words of a record of a composition change, and int64 columns of what kernels know of a group.
RECORD_WORDS = 10
#: What `MemoryPlan.parts` names, in words.
PARTS = {
    "pools": "pools",
    "states": "recurrent states",
    "tables": "tables and step data",
    "rope": "rotary tables",
    "lora": "adapters",
    "external_weights": "external weights",
}
#: What the names of regions of recurrent layers start with.
STATE_PREFIXES = ("recurrent_state", "conv_state", "intermediate_", "replay_", "kept_states")
#: Element type of adapters on the device.
LORA_DTYPE = "bfloat16"
GROUP_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Region:
    """A named piece of device memory: `shape` elements of `dtype`, `nbytes` after alignment."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """The pool of the layers of one group that share heads and head size.

    Attributes
    ----------
    layers : tuple of int
        Attention-layer indices, in model order; those that borrow KV are not here.
    num_kv_heads, head_dim : int
        H and D.
    shape : tuple of int
        ``[layers, 2, N, P, H, D]``, or ``[layers, 2, N, H, P, D]`` if the group's layout is HND.
    layer_nbytes : int
        Distance between two layers' pools in bytes.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    shape: tuple[int, int, int, int, int, int]
    layer_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole slab."""
        return self.layer_nbytes * len(self.layers)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One window group: its table geometry and its pools.

    Attributes
    ----------
    index : int
        g; 0 is full attention.
    window : Window
        What a query of these layers sees.
    layers : tuple of int
        Attention-layer indices, borrowers included.
    page_tokens : int
        P.
    ring : int
        R, private pages of a row; 0 for full attention.
    usable_pages, kept_pages, num_pages : int
        Pages that rows can hold; pages of a window group behind them for copies that are kept for reuse; N, the reserved pages
        included.
    row_pages : int
        Pages of a row at full capacity.
    table_width : int
        L, `row_pages` rounded up to whole tiles.
    slabs : tuple of SlabPlan
        One per (H, D).
    page_nbytes : int
        Bytes of one page id over all layers, K and V.
    kv_layout : str
        "NHD" or "HND".
    """

    index: int
    window: Window
    layers: tuple[int, ...]
    page_tokens: int
    ring: int
    usable_pages: int
    num_pages: int
    row_pages: int
    table_width: int
    slabs: tuple[SlabPlan, ...]
    page_nbytes: int
    kept_pages: int = 0
    kv_layout: str = "NHD"

    @property
    def is_empty(self) -> bool:
        """Whether no layer is in the group (only group 0 can be empty)."""
        return not self.layers

    @property
    def carry_width(self) -> int:
        """Tokens before a long step that its first query can see: at most W - 1, and a row's capacity."""
        return 0 if self.window.is_full else min(self.window.tokens - 1, self.row_pages * self.page_tokens)

    @property
    def null_page(self) -> int:
        """Id of the page of zeros that stands for "nothing" in a block table."""
        return self.num_pages - 2

    @property
    def trash_page(self) -> int:
        """Id of the page that takes writes which cannot be dropped."""
        return self.num_pages - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all pools of the group."""
        return sum(s.nbytes for s in self.slabs)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every byte of device memory that `SharedResources` will take: weights, as announced, when they are loaded, the rest now.

    Attributes
    ----------
    config : LLMEngineConfig
        What was planned for.
    groups : tuple of GroupPlan
        Full attention first, then one per window in model order.
    regions : tuple of Region
        Everything that is allocated, pools and tables alike.
    """

    config: LLMEngineConfig
    groups: tuple[GroupPlan, ...]
    regions: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(r.nbytes for r in self.regions)

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the KV pools alone."""
        return sum(g.nbytes for g in self.groups)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the recurrent states, and of what verification keeps of them."""
        return sum(r.nbytes for r in self.regions if r.name.startswith(STATE_PREFIXES))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for, those that are there; see `PARTS`."""
        found: dict[str, int] = {}
        for region in self.regions:
            first = region.name.partition(".")[0]
            if region.name.startswith(STATE_PREFIXES):
                first = "states"
            part = "pools" if first == "kv" else first if first in PARTS else "tables"
            found[part] = found.get(part, 0) + region.nbytes
        return found

    @property
    def max_sequences(self) -> int:
        """Most sequences of full capacity that fit at once."""
        rows, full = self.config.max_batch_size, self.groups[0]
        return rows if full.is_empty else min(rows, full.usable_pages // full.row_pages)

    @property
    def max_tokens(self) -> int:
        """Most tokens of all sequences that fit at once."""
        rows, full = self.config.max_batch_size, self.groups[0]
        everything = rows * self.config.max_kv_cache_capacity
        return everything if full.is_empty else min(everything, full.usable_pages * full.page_tokens)

    @property
    def edit_words(self) -> int:
        """Most int32 words of one composition change: records, ring and full pages, and the layout of a step."""
        config, full = self.config, self.groups[0]
        rows = config.max_batch_size
        leased = ceil_div(config.max_batch_tokens, full.page_tokens) + rows * (config.lookahead_pages + 2)
        rings = rows * sum(g.ring for g in self.groups)
        return RECORD_WORDS * rows + rings + min(leased, full.usable_pages) + 2 * rows + 1

    def region(self, name: str) -> Region:
        """Return the region called `name`.

        Raises
        ------
        KeyError
            If there is none.
        """
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)


def lora_layout(config: LLMEngineConfig) -> LoRALayout | None:
    """Return where a model's adapters lie, or None if it takes none: rank 0, or no targets are declared."""
    if not config.max_lora_rank or not config.lora_targets:
        return None
    return LoRALayout(
        targets=config.lora_targets,
        max_rank=config.max_lora_rank,
        max_adapters=config.max_loras,
        dtype=dtype(LORA_DTYPE),
        max_batch_size=config.max_batch_size,
    )


def plan_memory(config: LLMEngineConfig, memory_bytes: int | None = None) -> MemoryPlan:
    """Plan the caches of `config`.

    Parameters
    ----------
    config : LLMEngineConfig
        The model and its limits.
    memory_bytes : int, optional
        Budget for everything. If `config.num_kv_pages` is None, the full-attention pool takes what the budget leaves,
        at most every row at full length.

    Raises
    ------
    PlanError
        If the budget does not hold the plan, or not even one sequence of full capacity; carries the shortfall.
    """
    if not isinstance(config, LLMEngineConfig):
        raise InputError(f"config: {type(config).__name__} given; load_engine_config makes an LLMEngineConfig")
    budget = None if memory_bytes is None else check_budget(memory_bytes)
    row_pages = ceil_div(config.max_kv_cache_capacity, config.page_tokens)
    every_row = config.max_batch_size * row_pages
    wanted = config.num_kv_pages
    if wanted is not None and wanted < row_pages:
        raise PlanError(
            f"num_kv_pages: {wanted} pages of {config.page_tokens} tokens do not hold one sequence of "
            f"max_kv_cache_capacity {config.max_kv_cache_capacity} tokens, which takes {row_pages}; "
            "raise num_kv_pages or lower the capacity"
        )
    if budget is None or wanted is not None:
        plan = _build(config, every_row if wanted is None else wanted)
        if budget is not None and plan.nbytes > budget:
            raise _too_small(plan, budget)
        return plan
    plan = _build(config, row_pages)
    if plan.nbytes > budget:
        raise _too_small(plan, budget)
    # Bytes never fall as pages are added, but not by the same step each time: every layer's pool is aligned.
    more = range(row_pages + 1, min(every_row, MAX_POOL_PAGES - RESERVED_PAGES) + 1)
    fitting = bisect_right(more, budget, key=lambda pages: _build(config, pages).nbytes)
    return _build(config, row_pages + fitting) if fitting else plan


def check_budget(memory_bytes: int) -> int:
    """Return a budget in bytes.

    Raises
    ------
    PlanError
        If it is not a positive integer.
    """
    try:
        number = 0 if isinstance(memory_bytes, bool) else as_integer(memory_bytes)
    except TypeError:
        number = 0
    if number < 1:
        raise PlanError(f"memory_bytes: {memory_bytes!r} is not a positive number of bytes")
    return number


def _too_small(plan: MemoryPlan, budget: int) -> PlanError:
    config, needed = plan.config, plan.nbytes
    windows = sum(g.nbytes for g in plan.groups[1:])
    others = ", ".join(f"{PARTS[part]} {nbytes}" for part, nbytes in plan.parts.items() if part != "pools")
    return PlanError(
        f"memory: {budget} bytes are given and {needed} needed, {needed - budget} short "
        f"(window rings of {config.max_batch_size} rows {windows}, full-attention pool {plan.groups[0].nbytes}, "
        f"{others}); lower max_batch_size ({config.max_batch_size}), "
        f"max_kv_cache_capacity ({config.max_kv_cache_capacity}) or max_step_tokens ({config.max_step_tokens}), "
        "or take a smaller kv_cache_dtype",
        needed_bytes=needed,
        budget_bytes=budget,
    )


def _build(config: LLMEngineConfig, full_pages: int) -> MemoryPlan:
    groups = tuple(
        _plan_group(config, g, window, tuple(i for i, w in enumerate(config.layer_windows) if w == window), full_pages)
        for g, window in enumerate(config.windows)
    )
    plan = MemoryPlan(config, groups, ())
    return replace(plan, regions=tuple(_regions(plan)))


def _plan_group(config: LLMEngineConfig, index: int, window: Window, layers: tuple[int, ...], full_pages: int) -> GroupPlan:
    page = config.page_tokens
    ring = ring_pages(window, page, config.max_step_tokens, config.max_kv_cache_capacity)
    kept = 0
    if not window.is_full:
        usable, kept = config.max_batch_size * ring, config.kept_window_pages
    else:
        usable = full_pages if layers else 0
    num_pages = usable + kept + RESERVED_PAGES
    if num_pages > MAX_POOL_PAGES:
        raise PlanError(
            f"pool of {window} attention: {num_pages} pages, but page ids of both halves must fit int32 "
            f"(at most {MAX_POOL_PAGES}); raise page_tokens or lower max_batch_size"
            f"{' or kept_window_pages' if kept else ''}"
        )
    owners = [i for i in layers if config.layers[i].owns_kv]
    shapes: dict[tuple[int, int], list[int]] = {}
    for i in owners:
        shapes.setdefault((config.layers[i].num_kv_heads, config.layers[i].head_dim), []).append(i)
    itemsize, layout = dtype(config.kv_cache_dtype).itemsize, config.kv_layouts[index]
    slabs = tuple(
        SlabPlan(
            layers=tuple(members),
            num_kv_heads=heads,
            head_dim=dim,
            shape=(len(members), 2, num_pages, *((page, heads) if layout == "NHD" else (heads, page)), dim),
            layer_nbytes=round_up(2 * num_pages * page * heads * dim * itemsize, ALIGNMENT),
        )
        for (heads, dim), members in shapes.items()
    )
    return GroupPlan(
        index=index,
        window=window,
        layers=layers,
        page_tokens=page,
        ring=ring,
        usable_pages=usable,
        num_pages=num_pages,
        row_pages=ceil_div(config.max_kv_cache_capacity, page),
        table_width=table_pages(config.max_kv_cache_capacity, page),
        slabs=slabs,
        page_nbytes=sum(len(s.layers) * 2 * page * s.num_kv_heads * s.head_dim * itemsize for s in slabs),
        kept_pages=kept,
        kv_layout=layout,
    )


def _regions(plan: MemoryPlan) -> list[Region]:
    config = plan.config
    rows, tokens, count = config.max_batch_size, config.max_batch_tokens, len(plan.groups)
    regions = []

    def add(name: str, shape: tuple[int, ...], kind: str = "int32", nbytes: int | None = None) -> None:
        size = dtype(kind).itemsize
        for extent in shape:
            size *= extent
        regions.append(Region(name, shape, kind, round_up(size if nbytes is None else nbytes, ALIGNMENT)))

    for group in plan.groups:
        for slab in group.slabs:
            name = f"kv.{group.index}.{slab.num_kv_heads}x{slab.head_dim}"
            add(name, slab.shape, config.kv_cache_dtype, slab.nbytes)
    for state in state_plans(config):
        add(state.name, state.shape, state.dtype, state.nbytes)
    if config.kept_states and slot_nbytes(config):
        add("kept_states", (config.kept_states, slot_nbytes(config)), "uint8")
    if config.recurrent_layer is not None and config.max_verify_tokens:
        add("commit_paths", (rows, 2 + config.max_verify_tokens))
        add("commit_status", (rows,))
    for group in plan.groups:
        add(f"page_tables.{group.index}", (rows, 2, group.table_width))
    for group in plan.groups:
        add(f"block_tables.{group.index}", (rows, group.table_width))
    for group in plan.groups:
        add(f"slot_mapping.{group.index}", (tokens,), "int64")
    for group in plan.groups:
        if not group.window.is_full:
            add(f"carry_slots.{group.index}", (rows, group.carry_width), "int64")
    for name in ("lengths", "high_water", "appended", "mapped_begin"):  # one copy a group: see kernels/advance.py
        add(name, (count, rows))
    for name in ("floors", "leased", "live", "status", "counts", "take_back", "seq_lens", "context_lens"):
        add(name, (rows,))
    for name in ("state_slots", "state_index"):
        add(name, (rows,))
    add("cu_seqlens_q", (rows + 1,))
    add("positions", (tokens,))
    add("edits", (plan.edit_words,))
    add("groups", (count, GROUP_COLUMNS), "int64")
    features = config.num_deepstack_features
    lora = lora_layout(config)
    if lora is not None:
        add("lora.slots", lora.slots_shape, "uint8", lora.slots_nbytes)
        add("lora.adapter_ids", (rows,), "int32", lora.ids_nbytes)
    for layout in engine_layouts(config):
        add(f"rope.{sum(r.name.startswith('rope.') for r in regions)}", layout.shape, "float32", layout.nbytes)
    if config.external_weights_nbytes:
        add("external_weights", (config.external_weights_nbytes,), "uint8")
    add("zero_buffer", (max(256, rows * config.hidden_size * 2 if features else 0),), "uint8")
    if config.has_window_layers:
        add("swa_kv_cache_mode", (1,), "int8")
    return regions
