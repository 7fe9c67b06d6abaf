"""KVScales: the scales of float8 pools, with their inverses, at addresses that do not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.dtypes import DType, dtype
from numba_kv.errors import InputError, ShapeError, StateError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.cache.hybrid import HybridCacheManager
    from numba_kv.device import Tensor

__all__ = ["KVScales", "owner_of"]

_FLOAT8 = dtype("float8_e4m3")


def owner_of(caches: HybridCacheManager, layer: int) -> int:
    """Return the decoder layer whose pool a layer uses: itself, or the one that it borrows K and V from."""
    return caches.plan.config.attention_indices.index(caches.storage(layer).owner)


class KVScales:
    """Scales of the layers of one model: float32 [2, 2, H], scale and inverse of K and V of each head. Owns them.

    Layers are decoder layers with attention; one that borrows K and V has its donor's scales.
    """

    def __init__(self, caches: HybridCacheManager) -> None:
        self._device = caches.device
        self._caches = caches
        # by the owner's place among the attention layers
        self._of: dict[int, Tensor] = {}

    def set(self, layer: int, k_scale: object, v_scale: object) -> None:
        """Check and upload a layer's scales. Stream: waits.

        Raises
        ------
        InputError
            If the pool is not float8, or a scale cannot be one.
        """
        import numpy as np

        pool, storage = self._caches.kv(layer), self._caches.storage(layer)
        if pool.dtype is not _FLOAT8:
            raise InputError(f"layer: {layer} is stored as {pool.dtype}; only {_FLOAT8} is scaled")
        owner, heads = storage.owner, storage.num_kv_heads
        scales = np.stack([_checked("k_scale", k_scale, heads), _checked("v_scale", v_scale, heads)])
        values = np.stack([scales, np.float32(1.0) / scales]).reshape(2, 2 * heads)
        if owner not in self._of:
            self._of[owner] = self._device.tensor(values.shape, dtype("float32"))
        self._of[owner].fill_from(values)

    def factors(self, layer: int, moved: DType, write: bool) -> Tensor | None:
        """Return what elements of type `moved` are multiplied by on their way; None where nothing is.

        Raises
        ------
        StateError
            If the layer is float8 and has no scales yet.
        """
        owner = self._caches.storage(layer).owner
        if self._caches.kv(layer).dtype is not _FLOAT8 or moved is _FLOAT8:
            return None
        if owner not in self._of:
            name = owner_of(self._caches, layer)
            raise StateError(
                f"layer {layer} is stored as {_FLOAT8} and has no scales; set_scales({name}, 1.0, 1.0) is to say so"
            )
        return self._of[owner][int(write)]

    def close(self) -> None:
        """Give the scales back."""
        for tensor in self._of.values():
            tensor._memory.close(self._device.stream)
        self._of.clear()


def _checked(name: str, value: object, heads: int) -> NDArray[np.float32]:
    import numpy as np

    try:
        with np.errstate(over="ignore"):
            given = np.asarray(value)
            if given.dtype.kind not in "iuf" and given.dtype.name != "bfloat16":
                raise TypeError
            given = given.astype(np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name}: {value!r} is not a number, nor {heads} of them") from None
    if given.shape not in ((), (heads,)):
        raise ShapeError(f"{name}: shape {list(given.shape)} given, one number or [{heads}] wanted")
    least = np.finfo(np.float32).tiny
    if not ((given >= least) & (given <= 1 / least)).all():
        raise InputError(f"{name}: {value!r} given; numbers from {least} to {1 / least} wanted")
    return np.broadcast_to(given, (heads,))
