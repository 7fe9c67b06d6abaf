"""What a model and its limits are: the input of every plan.

Knows layers, limits and their ranges. Does not know files: the dialects fill it in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from numba_kv.config.layers import AttentionLayer, check_donors
from numba_kv.config.lora_target import LoRATarget
from numba_kv.config.read import show
from numba_kv.config.recurrent import VERIFY_MODES, RecurrentLayer, check_layer_types
from numba_kv.config.rope import RopeConfig
from numba_kv.dtypes import KV_CACHE_DTYPES, DType, dtype
from numba_kv.errors import ConfigError
from numba_kv.geometry import FULL, INT32_MAX, KV_LAYOUTS, Window, check_page_tokens

__all__ = ["MAX_KV_CACHE_CAPACITY", "LLMEngineConfig", "check_int", "check_kv_cache_dtype", "check_kv_layout"]

#: Largest capacity in tokens that still fits int32 after rounding to whole tiles.
MAX_KV_CACHE_CAPACITY = INT32_MAX // 256 * 256


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Refuse a `value` that is not an integer from `low` to `high`; `name` is the argument's.

    Raises
    ------
    ConfigError
        Naming the argument, the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {show(value)} is not an integer")
    if not low <= value <= high:
        raise ConfigError(f"{name}: {show(value)} is not in {low}..{high}")


def _places(chosen: Iterable[bool]) -> tuple[int, ...]:
    """Return how many entries before each chosen one are chosen; -1 for the others."""
    found, count = [], 0
    for is_chosen in chosen:
        found.append(count if is_chosen else -1)
        count += is_chosen
    return tuple(found)


def check_kv_cache_dtype(name: object) -> str:
    """Return the project's name of the element type `name`, if pools can be stored in it.

    Raises
    ------
    ConfigError
        Otherwise.
    """
    try:
        found = dtype(name).name if isinstance(name, (str, DType)) else ""
    except ConfigError:
        found = ""
    if found not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype: {show(name)} is not one of {', '.join(KV_CACHE_DTYPES)}")
    return found


def check_kv_layout(layout: object) -> str | tuple[str, ...]:
    """Return a layout of pages, or a tuple of one for each window group.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    if isinstance(layout, (tuple, list)) and all(isinstance(each, str) and each in KV_LAYOUTS for each in layout):
        return tuple(layout)
    if not isinstance(layout, str) or layout not in KV_LAYOUTS:
        raise ConfigError(f"kv_layout: {show(layout)} is not one of {', '.join(KV_LAYOUTS)}, or a tuple of one for each group")
    return layout


@dataclass(frozen=True, kw_only=True)
class LLMEngineConfig:
    """A decoder-only model's caches and the limits they are built for.

    Attributes
    ----------
    model_type : str
        Family name of the configuration, for messages.
    layers : tuple of AttentionLayer
        The attention layers in model order.
    layer_types : tuple of str
        What each decoder layer keeps: "attention", "recurrent", "both" or "none"; empty: every layer is one of `layers`.
    recurrent_layer : RecurrentLayer or None
        What every recurrent layer is; None if there is none.
    max_batch_size : int
        B, rows.
    max_kv_cache_capacity : int
        Most tokens of one row.
    page_tokens : int
        P, a power of two from 1 to 256.
    kv_cache_dtype : str
        Element type of the pools: float16, bfloat16, float8_e4m3 or float32.
    kv_layout : str or tuple of str
        How a page lies: "NHD" [P, H, D] or "HND" [H, P, D]; or one for each window group: full attention first (even if no
        layer has it), then one for each other window in model order.
    max_step_tokens : int
        C: the most tokens that one step appends to a row with every key readable from pages, and how far a row may
        always be rewound. Longer steps are legal; see `StepView.carry_slots`.
    max_batch_tokens : int
        Most tokens of all rows in one step.
    num_kv_pages : int or None
        Usable pages of the full-attention pool (reserved pages come on top); None: every row at full length.
    lookahead_pages : int
        Pages that a full-attention row is mapped ahead of its length.
    hidden_size, vocab_size : int
        0 where the configuration does not say.
    max_lora_rank, max_loras : int
        Largest rank of an adapter, 0: no LoRA; adapters on the device at once.
    lora_targets : tuple of LoRATarget
        The projections that take adapters; `targets_from_config` lists those of a usual decoder.
    external_weights_nbytes : int
        Device bytes that the plan keeps for weights from files; `numba_kv.weights.arena_nbytes` counts those of a checkpoint.
    num_deepstack_features : int
        Deep-stack inputs of the engine; decides the size of the zero buffer.
    ropes : tuple of RopeConfig
        One, or two for models whose sliding and full layers rotate differently (sliding first); empty if not stated.
    use_bounded_swa : bool
        Whether window layers live in rings; False gives them full rows (the reference's full mode).
    max_input_len : int
        Longest prompt the engine was built for; 0 where the configuration does not say.
    reduced_vocab_size : int
        Size of the output vocabulary where it is smaller than `vocab_size`; 0: it is not.
    eos_token_ids : tuple of int
        Tokens that end a sequence, as far as the configuration states them.
    max_verify_tokens : int
        Most tokens, or nodes of a tree, of a row that a verification step runs before some are accepted; 0: none, so
        recurrent layers have nothing to commit from.
    recurrent_spec_verify_mode : str
        What a verification step keeps of recurrent states: "snapshot" (the state behind each token) or "replay" (inputs).
    conv_state_room : int
        Columns of a convolution state beyond the conv_kernel - 1 that the next token reads. 1 as Transformers and the
        reference have it; at least `max_verify_tokens`: drafts are written there and rejected ones shifted out again, so that
        no snapshots are needed.
    kept_window_pages, kept_states : int
        What the plan has beside the rows for reuse of context: pages of each window group for copies, and slots for snapshots
        of recurrent states. 0: none, and a batch of a model with such layers cannot reuse any.
    """

    model_type: str = ""
    layers: tuple[AttentionLayer, ...]
    layer_types: tuple[str, ...] = ()
    recurrent_layer: RecurrentLayer | None = None
    max_batch_size: int
    max_kv_cache_capacity: int
    page_tokens: int = 16
    kv_cache_dtype: str = "bfloat16"
    kv_layout: str | tuple[str, ...] = "NHD"
    max_step_tokens: int = 1
    max_batch_tokens: int = 8192
    num_kv_pages: int | None = None
    lookahead_pages: int = 4
    hidden_size: int = 0
    vocab_size: int = 0
    max_lora_rank: int = 0
    max_loras: int = 4
    lora_targets: tuple[LoRATarget, ...] = ()
    external_weights_nbytes: int = 0
    num_deepstack_features: int = 0
    ropes: tuple[RopeConfig, ...] = field(default=())
    use_bounded_swa: bool = True
    max_input_len: int = 0
    reduced_vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_verify_tokens: int = 0
    recurrent_spec_verify_mode: str = "snapshot"
    conv_state_room: int = 1
    kept_window_pages: int = 0
    kept_states: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not all(isinstance(layer, AttentionLayer) for layer in self.layers):
            raise ConfigError("layers: a tuple of AttentionLayer is wanted")
        check_int("max_batch_size", self.max_batch_size, 1, INT32_MAX)
        check_int("max_kv_cache_capacity", self.max_kv_cache_capacity, 1, MAX_KV_CACHE_CAPACITY)
        check_page_tokens(self.page_tokens)
        check_int("max_step_tokens", self.max_step_tokens, 1, self.max_kv_cache_capacity)
        check_int("max_batch_tokens", self.max_batch_tokens, 1, INT32_MAX)
        check_int("lookahead_pages", self.lookahead_pages, 0, INT32_MAX)
        if self.num_kv_pages is not None:
            check_int("num_kv_pages", self.num_kv_pages, 1, INT32_MAX // 2)
        for name in (
            "hidden_size",
            "vocab_size",
            "max_lora_rank",
            "num_deepstack_features",
            "max_input_len",
            "reduced_vocab_size",
            "kept_window_pages",
            "kept_states",
        ):
            check_int(name, getattr(self, name), 0, INT32_MAX)
        check_int("external_weights_nbytes", self.external_weights_nbytes, 0, 1 << 50)
        check_int("max_loras", self.max_loras, 1, INT32_MAX)
        if not isinstance(self.lora_targets, tuple) or not all(isinstance(t, LoRATarget) for t in self.lora_targets):
            raise ConfigError("lora_targets: a tuple of LoRATarget is wanted")
        if not isinstance(self.use_bounded_swa, bool):
            raise ConfigError(f"use_bounded_swa: {self.use_bounded_swa!r} is not a bool")
        if not isinstance(self.model_type, str):
            raise ConfigError(f"model_type: {self.model_type!r} is not a string")
        if not isinstance(self.ropes, tuple) or not all(isinstance(rope, RopeConfig) for rope in self.ropes):
            raise ConfigError("ropes: a tuple of RopeConfig is wanted")
        object.__setattr__(self, "kv_cache_dtype", check_kv_cache_dtype(self.kv_cache_dtype))
        object.__setattr__(self, "kv_layout", check_kv_layout(self.kv_layout))
        if self.max_batch_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_batch_tokens: {self.max_batch_tokens} is below max_batch_size {self.max_batch_size}; "
                "a decode step of every row must fit"
            )
        check_donors(self.layers)
        if len(self.kv_layouts) != len(self.windows):
            wanted = ", ".join(map(str, self.windows))
            raise ConfigError(f"kv_layout: {len(self.kv_layouts)} layouts given, one for each group wanted: {wanted}")
        check_layer_types(self.layer_types, len(self.layers), self.recurrent_layer)
        self._check_verification()

    def _check_verification(self) -> None:
        check_int("max_verify_tokens", self.max_verify_tokens, 0, INT32_MAX)
        check_int("conv_state_room", self.conv_state_room, 0, INT32_MAX)
        mode, layer = self.recurrent_spec_verify_mode, self.recurrent_layer
        if mode not in VERIFY_MODES:
            raise ConfigError(f"recurrent_spec_verify_mode: {show(mode)} is not one of {', '.join(VERIFY_MODES)}")
        if layer is None:
            return
        if not layer.conv_shape(self.conv_state_room)[1]:
            raise ConfigError(f"conv_state_room: 0 leaves no column with conv_kernel {layer.conv_kernel}; 1 is the least")
        if self.max_verify_tokens and mode == "replay" and not layer.can_replay:
            raise ConfigError(f"recurrent_spec_verify_mode: a {type(layer).__name__} cannot do 'replay'; use 'snapshot'")

    @cached_property
    def layer_windows(self) -> tuple[Window, ...]:
        """Window by which each attention layer is stored: full attention for all if windows are not bounded."""
        return tuple(layer.window if self.use_bounded_swa else FULL for layer in self.layers)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """Window of each group: full attention first, then one for each other window in model order."""
        return tuple(dict.fromkeys((FULL, *self.layer_windows)))

    @property
    def kv_layouts(self) -> tuple[str, ...]:
        """Layout of each group's pages."""
        return (self.kv_layout,) * len(self.windows) if isinstance(self.kv_layout, str) else self.kv_layout

    @cached_property
    def attention_indices(self) -> tuple[int, ...]:
        """Place of each decoder layer in `layers`, -1 for one without attention."""
        if not self.layer_types:
            return tuple(range(len(self.layers)))
        return _places(name in ("attention", "both") for name in self.layer_types)

    @cached_property
    def recurrent_indices(self) -> tuple[int, ...]:
        """Place of each decoder layer among the recurrent ones, -1 for one without a state."""
        if not self.layer_types:
            return (-1,) * len(self.layers)
        return _places(name in ("recurrent", "both") for name in self.layer_types)

    @property
    def num_recurrent_layers(self) -> int:
        """Layers with a recurrent state."""
        return sum(place >= 0 for place in self.recurrent_indices)

    @property
    def has_conv_snapshots(self) -> bool:
        """Whether a verification step keeps the convolution state behind each token: there is no room for its drafts."""
        return self.recurrent_layer is not None and self.conv_state_room < self.max_verify_tokens

    @property
    def has_window_layers(self) -> bool:
        """Whether any layer is sliding or chunked."""
        return any(not layer.window.is_full for layer in self.layers)
