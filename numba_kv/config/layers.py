"""One decoder layer as far as its cache is concerned."""

from __future__ import annotations

from dataclasses import dataclass

from numba_kv.errors import ConfigError
from numba_kv.geometry import FULL, INT32_MAX, Window

__all__ = ["AttentionLayer", "check_donors"]


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Attention layer: what one token stores in it.

    Attributes
    ----------
    num_kv_heads : int
        H, heads of K and V.
    head_dim : int
        D, channels of a head of K and of V.
    window : Window
        Keys a query sees.
    kv_donor : int or None
        Index (among the attention layers) of the layer whose K and V this one reads instead of storing its own.
    """

    num_kv_heads: int
    head_dim: int
    window: Window = FULL
    kv_donor: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32_MAX:
                raise ConfigError(f"{name}: {value!r} is not an integer from 1 to {INT32_MAX}")
        if not isinstance(self.window, Window):
            raise ConfigError(f"window: {self.window!r} is not a Window")

    @property
    def owns_kv(self) -> bool:
        """Whether the layer stores K and V of its own."""
        return self.kv_donor is None


def check_donors(layers: tuple[AttentionLayer, ...]) -> None:
    """Refuse donors out of range, chains of donors, and donors of another geometry or window.

    Raises
    ------
    ConfigError
        Naming the layer and its donor.
    """
    for index, layer in enumerate(layers):
        donor = layer.kv_donor
        if donor is None:
            continue
        if isinstance(donor, bool) or not isinstance(donor, int) or not 0 <= donor < len(layers) or donor == index:
            raise ConfigError(f"kv_donor of layer {index}: {donor!r} is not another of the {len(layers)} attention layers")
        other = layers[donor]
        if not other.owns_kv:
            raise ConfigError(
                f"kv_donor of layer {index}: layer {donor} borrows its KV from layer {other.kv_donor}; name the owner"
            )
        mine = (layer.num_kv_heads, layer.head_dim, layer.window)
        its = (other.num_kv_heads, other.head_dim, other.window)
        if mine != its:
            raise ConfigError(
                f"kv_donor of layer {index}: layer {donor} has {its[0]} heads x {its[1]}, {its[2]}, "
                f"the borrower {mine[0]} x {mine[1]}, {mine[2]}; they must be equal"
            )
