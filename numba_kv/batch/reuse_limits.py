"""What context reuse cannot do, and what it has to be told, by the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.config.rope_layout import engine_layouts
from numba_kv.errors import ConfigError

if TYPE_CHECKING:
    from numba_kv.config import LLMEngineConfig
    from numba_kv.plan import MemoryPlan

__all__ = ["check_reuse", "has_variants"]


def check_reuse(plan: MemoryPlan, index: int, scrub: str, future_tokens: int) -> None:
    """Refuse what context reuse cannot do.

    Raises
    ------
    ConfigError
        Naming it.
    """
    config = plan.config
    if future_tokens and (not index or config.num_recurrent_layers):
        what = f"model {index} has recurrent layers" if index else "model 0 is the base"
        raise ConfigError(f"future_tokens: {future_tokens}, but {what}; only a draft of attention layers looks ahead")
    if len(plan.groups) > 1 and not config.kept_window_pages:
        raise ConfigError(
            "kept_window_pages: 0, but the model has windows, and what is reused of them is a copy; make the configuration "
            "with some (dataclasses.replace), at least a window's pages for each prefix that is to be kept"
        )
    if config.num_recurrent_layers and not config.kept_states:
        raise ConfigError(
            "kept_states: 0, but the model has recurrent layers, of whose states snapshots have to be kept; plan with some"
        )
    if scrub != "never":
        raise ConfigError(f"scrub: {scrub!r} together with reuse; pages that the cache gives up are not scrubbed, use 'never'")


def has_variants(config: LLMEngineConfig) -> bool:
    """Return whether the same positions are turned differently in sequences of different length."""
    try:
        return any(len(layout.limits) > 1 for layout in engine_layouts(config))
    except ConfigError:  # a rotation without a table is the caller's own
        return False
