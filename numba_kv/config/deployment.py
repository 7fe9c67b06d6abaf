"""A deployment: a base model, and the draft that proposes its tokens.

Knows what must agree between the two, and what each is planned for. Does not know files or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numba_kv.config.engine import LLMEngineConfig, check_int
from numba_kv.config.rope import RopeConfig
from numba_kv.config.rope_axes import has_axes
from numba_kv.config.spec_decode import SpecDecodeConfig
from numba_kv.dtypes import dtype
from numba_kv.errors import ConfigError
from numba_kv.geometry import ceil_div

__all__ = ["DeploymentConfig", "SpecDecodeConfig"]

_LEAST_ZEROS = 256


@dataclass(frozen=True, kw_only=True)
class DeploymentConfig:
    """A base model and its draft, known to fit each other.

    Windows are allowed in both; the reference has none beside a draft.

    Attributes
    ----------
    base : LLMEngineConfig
        The model that decides.
    draft : LLMEngineConfig or None
        The model that proposes. Its rows hold what the base's rows hold, and the proposals of a round behind it.
    spec : SpecDecodeConfig or None
        How it proposes; given if and only if there is a draft.

    Raises
    ------
    ConfigError
        If the two do not fit each other or the round; names both numbers.
    """

    base: LLMEngineConfig
    draft: LLMEngineConfig | None = None
    spec: SpecDecodeConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, LLMEngineConfig):
            raise ConfigError(f"base: {type(self.base).__name__} is not an LLMEngineConfig")
        draft, spec = self.draft, self.spec
        if draft is not None and not isinstance(draft, LLMEngineConfig):
            raise ConfigError(f"draft: {type(draft).__name__} is not an LLMEngineConfig")
        if spec is not None and not isinstance(spec, SpecDecodeConfig):
            raise ConfigError(f"spec: {type(spec).__name__} is not a SpecDecodeConfig")
        if draft is None and spec is not None:
            raise ConfigError("draft: missing, but spec says how to draft; give both or neither")
        if draft is not None and spec is None:
            raise ConfigError("spec: missing, but there is a draft; give both or neither")
        if draft is None or spec is None:
            return
        _check_draft(self.base, draft, spec)
        _check_outputs(self.base, draft, spec)
        _check_ropes(self.base, draft, spec)
        if spec.shares_target_kv:
            _check_shared_kv(self.base, draft, spec)
        else:
            _check_capacity(self.base, draft, spec)
        if spec.has_reference_limits and self.base.num_recurrent_layers:
            _check_hybrid_limits(self.base, spec)

    @property
    def shares_target_kv(self) -> bool:
        """Whether the draft reads the base's KV and has no cache of its own."""
        return self.spec is not None and self.spec.shares_target_kv

    @property
    def max_runtime_batch_size(self) -> int:
        """Most rows that both models serve."""
        return self.base.max_batch_size if self.draft is None else min(self.base.max_batch_size, self.draft.max_batch_size)

    @property
    def max_accepted_tokens(self) -> int:
        """Most tokens of a row that one round keeps."""
        return 1 if self.spec is None else self.spec.max_accepted_tokens

    @property
    def base_output_hidden_size(self) -> int:
        """Channels of what the base hands to the draft: what the draft says, else the base's hidden size."""
        return self.base.hidden_size if self.spec is None else self.spec.base_hidden_size or self.base.hidden_size

    def check_batch_size(self, max_runtime_batch_size: int | None = None) -> int:
        """Return how many rows both models are to serve; None: as many as they can.

        Raises
        ------
        ConfigError
            If it is no number of rows that both have.
        """
        most = self.max_runtime_batch_size
        if max_runtime_batch_size is None:
            return most
        check_int("max_runtime_batch_size", max_runtime_batch_size, 1, most)
        return max_runtime_batch_size

    def engine_configs(self, max_runtime_batch_size: int | None = None) -> tuple[LLMEngineConfig, ...]:
        """Return what the caches of each model are built for: base, and draft if it has a cache of its own.

        Both get the same rows. A step of the base holds a whole verification and can be taken back whole; one of the draft
        holds what a round may have kept, and a round's proposals can be taken back. `max_step_tokens` and `max_batch_tokens`
        are raised to that where they are below. Adapters and weights from files belong to the base.

        Parameters
        ----------
        max_runtime_batch_size : int, optional
            Rows; see `check_batch_size`.

        Raises
        ------
        ConfigError
            As `check_batch_size`.
        """
        rows, base, draft, spec = self.check_batch_size(max_runtime_batch_size), self.base, self.draft, self.spec
        if draft is None or spec is None:
            return (replace(base, max_batch_size=rows),)
        states = spec.verify_state_tokens if base.num_recurrent_layers else 0
        planned = replace(_widened(base, rows, spec.verify_tokens), max_verify_tokens=max(base.max_verify_tokens, states))
        if spec.shares_target_kv:
            return (planned,)
        drafted = replace(
            _widened(draft, rows, max(spec.draft_tokens + 1, spec.max_accepted_tokens)),
            max_lora_rank=0,
            lora_targets=(),
            external_weights_nbytes=0,
            num_deepstack_features=0,
        )
        return planned, drafted

    def draft_ropes(self) -> tuple[RopeConfig, ...]:
        """Return the rotations of the draft. A multimodal one is the base's own, so that both read the same positions."""
        if self.draft is None:
            return ()
        return self.base.ropes if any(map(has_axes, self.draft.ropes)) else self.draft.ropes

    def zero_buffer_nbytes(self, max_runtime_batch_size: int | None = None) -> int:
        """Return the size of the zero buffer: deep-stack inputs of a verification step, and a word a proposal.

        Raises
        ------
        ConfigError
            As `check_batch_size`.
        """
        rows, spec = self.check_batch_size(max_runtime_batch_size), self.spec
        verified = 1 if spec is None else spec.verify_tokens
        half = dtype("float16").itemsize
        features = rows * verified * self.base.hidden_size * half if self.base.num_deepstack_features else 0
        proposals = 0 if spec is None else rows * max(spec.max_proposal_tokens, 1) * dtype("int32").itemsize
        return max(_LEAST_ZEROS, features, proposals)


def _widened(config: LLMEngineConfig, rows: int, tokens: int) -> LLMEngineConfig:
    """Return `config` for `rows` rows that append `tokens` tokens each in a step that can be taken back."""
    return replace(
        config,
        max_batch_size=rows,
        max_step_tokens=max(config.max_step_tokens, tokens),
        max_batch_tokens=max(config.max_batch_tokens, rows * tokens),
    )


def _check_draft(base: LLMEngineConfig, draft: LLMEngineConfig, spec: SpecDecodeConfig) -> None:
    if draft.num_recurrent_layers:
        raise ConfigError(
            f"draft: {draft.num_recurrent_layers} recurrent layers; a draft has attention alone: no state can be rewound"
        )
    if not draft.layers:
        raise ConfigError("draft: no attention layers; a draft needs at least one")
    if spec.verify_tokens > base.max_kv_cache_capacity:
        raise ConfigError(
            f"verify_tokens: {spec.verify_tokens} is above max_kv_cache_capacity {base.max_kv_cache_capacity} of the base"
        )
    count = len(base.attention_indices)
    for place, layer in enumerate(spec.target_layers):
        if layer >= count:
            raise ConfigError(f"target_layers[{place}]: {layer} is not one of the {count} layers of the base")


def _check_outputs(base: LLMEngineConfig, draft: LLMEngineConfig, spec: SpecDecodeConfig) -> None:
    """Check vocabularies and hidden sizes, as far as they are stated."""
    tokens, drafted = base.vocab_size, draft.reduced_vocab_size or draft.vocab_size
    if spec.mode == "gemma4_mtp" and tokens != draft.vocab_size:
        raise ConfigError(f"vocab_size: {draft.vocab_size} of the draft is not {tokens} of the base; {spec.mode!r} has one")
    if tokens and drafted > tokens:
        raise ConfigError(f"vocab_size: the draft proposes {drafted} tokens, the base knows {tokens}")
    if spec.is_tree and drafted and spec.top_k > drafted:
        raise ConfigError(f"top_k: {spec.top_k} is above the {drafted} tokens that the draft proposes")
    if spec.is_tree and spec.mode in ("mtp", "gemma4_mtp"):
        for name, config in (("base", base), ("draft", draft)):
            if config.reduced_vocab_size:
                raise ConfigError(
                    f"reduced_vocab_size: {config.reduced_vocab_size} of the {name}; a tree of {spec.mode!r} has the whole one"
                )
    allowed = _hidden_sizes(base.hidden_size, len(spec.target_layers), spec)
    if base.hidden_size and spec.base_hidden_size and spec.base_hidden_size not in allowed:
        raise ConfigError(
            f"base_hidden_size: {spec.base_hidden_size} is not {' or '.join(map(str, allowed))}, which the base has "
            f"(hidden_size {base.hidden_size}, {len(spec.target_layers)} target_layers)"
        )


def _hidden_sizes(hidden: int, layers: int, spec: SpecDecodeConfig) -> tuple[int, ...]:
    """Return what the base can hand over: its last hidden state, those of the target layers side by side, or, fused, one."""
    if spec.mode == "eagle3":
        return (hidden * layers,)
    return tuple(dict.fromkeys((hidden, hidden * layers))) if spec.proposes_blocks else (hidden,)


def _check_ropes(base: LLMEngineConfig, draft: LLMEngineConfig, spec: SpecDecodeConfig) -> None:
    if spec.has_reference_limits and spec.proposes_blocks and len(draft.ropes) > 1:
        raise ConfigError(
            f"ropes: the draft has {len(draft.ropes)}, one with kernels of TensorRT Edge-LLM in mode {spec.mode!r}; "
            "has_reference_limits=False lifts it"
        )
    if not any(map(has_axes, draft.ropes)):
        return
    if [_rotation(rope) for rope in draft.ropes] != [_rotation(rope) for rope in base.ropes]:
        raise ConfigError("ropes: the draft's multimodal rotation is not the base's; both read the same positions")


def _rotation(rope: RopeConfig) -> tuple[object, ...]:
    return rope.rope_type, rope.theta, rope.rotary_dim, dict(rope.parameters)


def _check_capacity(base: LLMEngineConfig, draft: LLMEngineConfig, spec: SpecDecodeConfig) -> None:
    """Check that the draft's rows hold every row of the base and the proposals behind it."""
    needed = base.max_kv_cache_capacity + spec.draft_tokens
    if draft.max_kv_cache_capacity < needed:
        raise ConfigError(
            f"max_kv_cache_capacity: {draft.max_kv_cache_capacity} of the draft is below {needed}: "
            f"{base.max_kv_cache_capacity} of the base and {spec.draft_tokens} proposals behind them; "
            "raise the draft's or lower the base's"
        )
    pages, drafted = base.num_kv_pages, draft.num_kv_pages
    if drafted is None:
        return
    rows = min(base.max_batch_size, draft.max_batch_size)
    held = rows * ceil_div(base.max_kv_cache_capacity, base.page_tokens) if pages is None else pages
    tokens = min(held * base.page_tokens, rows * base.max_kv_cache_capacity)
    if drafted * draft.page_tokens < tokens:
        raise ConfigError(
            f"num_kv_pages: {drafted} pages of {draft.page_tokens} tokens of the draft do not hold the {tokens} tokens of the "
            f"base's {held} pages of {base.page_tokens}; raise it, or leave it out"
        )


def _check_shared_kv(base: LLMEngineConfig, draft: LLMEngineConfig, spec: SpecDecodeConfig) -> None:
    """Check that every layer of the draft can read the KV of its layer of the base."""
    for name in ("kv_cache_dtype", "page_tokens", "num_kv_pages", "use_bounded_swa"):
        mine, its = getattr(draft, name), getattr(base, name)
        if mine != its:
            raise ConfigError(f"{name}: {mine} of the draft is not {its} of the base, whose KV it reads")
    pages = [ceil_div(config.max_kv_cache_capacity, base.page_tokens) for config in (draft, base)]
    if pages[0] != pages[1]:
        raise ConfigError(
            f"max_kv_cache_capacity: {pages[0]} pages a row of the draft are not {pages[1]} of the base, whose KV it reads"
        )
    if len(spec.target_kv_layers) != len(draft.layers):
        raise ConfigError(
            f"target_kv_layers: {len(spec.target_kv_layers)} entries for {len(draft.layers)} attention layers of the draft"
        )
    for place, (layer, target) in enumerate(zip(draft.layers, spec.target_kv_layers, strict=True)):
        where = f"target_kv_layers[{place}]: {target}"
        if target >= len(base.layers):
            raise ConfigError(f"{where} is not one of the {len(base.layers)} attention layers of the base")
        other = base.layers[target]
        mine, its = (layer.num_kv_heads, layer.head_dim, layer.window), (other.num_kv_heads, other.head_dim, other.window)
        if mine != its:
            raise ConfigError(
                f"{where} has {its[0]} heads x {its[1]}, {its[2]}, the draft's layer {mine[0]} x {mine[1]}, {mine[2]}; "
                "they must be equal"
            )
        layout, its_layout = (c.kv_layouts[c.windows.index(c.layer_windows[i])] for c, i in ((draft, place), (base, target)))
        if layout != its_layout:
            raise ConfigError(f"{where} is kept as {its_layout}, the draft's layer as {layout}; kv_layout must be equal")


def _check_hybrid_limits(base: LLMEngineConfig, spec: SpecDecodeConfig) -> None:
    """Check what the reference's kernels of recurrent layers can verify."""
    limits = [("verify_tokens", spec.verify_tokens, 64)] if spec.is_tree or spec.mode == "mtp" else []
    if spec.mode in ("dflash", "jetspec"):
        limits.append(("block_size", spec.block_size, 16))
    if spec.mode == "mtp":
        limits.append(("steps", spec.steps, 16))
    for name, value, most in limits:
        if value > most:
            raise ConfigError(
                f"{name}: {value} is above {most}, the most that kernels of TensorRT Edge-LLM can do for a base with recurrent "
                "layers; has_reference_limits=False lifts it"
            )
    replays = base.recurrent_spec_verify_mode == "replay"
    if spec.mode == "dspark" and spec.is_tree and replays and spec.verify_tokens != spec.max_verify_tokens:
        raise ConfigError(
            f"verify_tokens: {spec.verify_tokens} is not max_verify_tokens {spec.max_verify_tokens}, as kernels of TensorRT "
            "Edge-LLM want it for a base that replays; has_reference_limits=False lifts it"
        )
