"""K and V of different sizes in pages of two equal halves: latents of multi-head latent attention, and narrower values.

Latents are cached as they are: ``update(latent [B, 1, n, kv_lora_rank], rotated key [B, 1, n, qk_rope_head_dim])``; of what it
returns, each layer makes K and V of its heads. Knows which configurations mean that. Does not know pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from numba_kv.geometry import ceil_div

__all__ = ["KVSizes", "read_sizes"]

#: Families whose layers with a window have twice the KV heads of the configuration.
_DOUBLED_WITH_A_WINDOW = ("mimo_v2_flash",)
#: Keys of a configuration that `KVSizes` stands for.
_REPLACED = ("kv_lora_rank", "v_head_dim")


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Channels of a head of K and of V as a model caches them, where they differ.

    A token's row, the wider of the two before the other, is cut in the middle; an odd sum gets a channel of zeros::

        wide 512                        | narrow 64 |
        stored as K, 288 | stored as V, 288         |

    Attributes
    ----------
    keys, values : int
        Channels.
    is_latent : bool
        Whether they are a latent and a rotated key, one head of them.
    doubles_windows : bool
        Whether layers with a window have twice the heads.
    """

    keys: int
    values: int
    is_latent: bool
    doubles_windows: bool = False

    @property
    def are_equal(self) -> bool:
        """Whether K and V of a head are stored as they are, and only the heads are unusual."""
        return self.keys == self.values and not self.is_latent

    @property
    def head_dim(self) -> int:
        """Channels of each half as it is stored."""
        return ceil_div(self.keys + self.values, 2)

    def stated(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``config.json`` that states the halves as K and V. Rotary tables are the model's own, so it has none."""
        kept = {name: value for name, value in values.items() if name not in _REPLACED}
        heads = {"num_key_value_heads": 1} if self.is_latent else {}
        return {**kept, **heads, "head_dim": self.head_dim, "position_embedding_type": "nope"}

    def halves(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Return K and V [B, H, n, each its own] as both are stored, [B, H, n, head_dim]. Cost: copies about half of it."""
        wide, narrow = (k, v) if self.keys >= self.values else (v, k)
        first, rest = wide[..., : self.head_dim], wide[..., self.head_dim :]
        behind = [narrow.new_zeros((*narrow.shape[:-1], 1))] if (self.keys + self.values) % 2 else []
        return first, torch.cat([rest, narrow, *behind], dim=-1)

    def parts(self, first: Any, second: Any) -> tuple[Any, Any]:
        """Return K and V of what is stored. Both are dense, so that products of them are added in transformers' own order."""
        cut = max(self.keys, self.values) - self.head_dim
        wide = torch.cat([first, second[..., :cut]], dim=-1)
        narrow = second[..., cut : cut + min(self.keys, self.values)].contiguous()
        return (wide, narrow) if self.keys >= self.values else (narrow, wide)


def read_sizes(stated: Mapping[str, Any]) -> KVSizes | None:
    """Return the sizes of K and V that the content of a ``config.json`` states, or None if nothing is unusual about them."""
    latent, rotated = stated.get("kv_lora_rank"), stated.get("qk_rope_head_dim")
    if latent is not None and rotated is not None:
        return KVSizes(latent, rotated, is_latent=True)
    keys, values = stated.get("head_dim"), stated.get("v_head_dim")
    doubles = stated["model_type"] in _DOUBLED_WITH_A_WINDOW
    if keys is None or values is None or (keys == values and not doubles):
        return None
    return KVSizes(keys, values, is_latent=False, doubles_windows=doubles)
