"""K and V of a forward pass into pages, and dense again for whatever attention the model runs.

A layer is handed exactly what transformers' own cache would hand it: all tokens of a full layer, and of a sliding layer the
window - 1 tokens before the step and the step's own. Places that hold nothing (pads) are zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from numba_kv.adapters.torch_arrays import as_kv_tensor
from numba_kv.adapters.transformers_layer_kv import LayerKV
from numba_kv.geometry import round_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.adapters.transformers_model import ModelLayers
    from numba_kv.adapters.transformers_rows import RowStep
    from numba_kv.device import Tensor
    from numba_kv.shared_resources import SharedResources

__all__ = ["DenseKV"]

#: Of a buffer: rows and tokens -> K and V as torch and as the library have them.
_Shapes: TypeAlias = "dict[tuple[int, int], tuple[tuple[Any, Any], tuple[Tensor, Tensor]]]"

#: Dense arrays grow by this many tokens, so that launches stay bound for as many steps.
_GRAIN = 64
#: Shapes of one buffer whose tensors are kept.
_MAX_SHAPES = 32


class DenseKV(LayerKV):
    """Moves K and V of one model, for its own attention. Owns the dense buffers; borrows the pools.

    A buffer is shared by all layers of the same heads: what `update` returns is overwritten by the next layer, except in layers
    whose K and V are read again later in the forward. Where K and V differ in size, halves of both are stored and joined anew.

    Parameters
    ----------
    resources : SharedResources
        Of the model.
    layers : ModelLayers
        Of the model.
    is_contiguous : bool
        Copy what was gathered, so that heads of a row follow each other as in transformers' own cache: for attention that asks
        for views of it.
    """

    def __init__(self, resources: SharedResources, layers: ModelLayers, *, is_contiguous: bool = False) -> None:
        super().__init__(resources, layers.sizes)
        self._is_contiguous = is_contiguous
        self._layers = layers
        config, torch = self._caches.plan.config, self._torch
        self._short = config.max_step_tokens
        self._slots: dict[int, Any] = {}  # of each group: those of the whole rectangle of a step with pads
        self._shift = np.zeros(config.max_batch_size, np.int64)
        with torch.inference_mode(False):
            self._starts = torch.zeros(config.max_batch_size, dtype=torch.int32, device=self._place)
        self._buffers = self._make_buffers()
        self._starts_tensor = as_kv_tensor(self._device, self._starts, "starts")

    def begin(self, step: RowStep, offsets: NDArray[np.int64]) -> None:
        """Tell where rows begin, if that has changed."""
        self.end()
        if not np.array_equal(offsets, self._shift[: step.rows]):
            self._shift[: step.rows] = offsets
            with self._torch.no_grad():
                self._starts.copy_(self._torch.from_numpy(-self._shift))

    def end(self) -> None:
        """Forget the slots of a step."""
        self._slots.clear()

    def move(self, layer: int, k: Any, v: Any, step: RowStep) -> tuple[Any, Any]:
        """Store K and V of a step and return those that the layer's attention reads; see `LayerKV.move`.

        They are valid until the next layer's move. Cost: one launch where nothing precedes the step, else three; and
        copies, where they are to be contiguous.
        """
        window = self._layers.windows[layer]
        first = 0 if window is None else max(0, step.before - window + 1)
        if first == step.before:
            self._write(layer, k, v, step)
            return k.contiguous(), v.contiguous()  # as transformers' own, so that attention takes the same path
        if step.tokens > self._short and not self._caches.storage(layer).window.is_full:
            old_k, old_v = self._carried(layer, step, first)
            self._write(layer, k, v, step)
            return self._torch.cat([old_k, k], dim=2), self._torch.cat([old_v, v], dim=2)
        self._write(layer, k, v, step)
        count = step.length - first
        (keys, values), (k_out, v_out) = self._dense(layer, step.rows, count)
        self._io.gather(layer, k_out, v_out, step.view.seq_lens, starts=self._starts_tensor, low=first)
        k, v = self._parts(keys[:, :, :count], values[:, :, :count])
        return (k.contiguous(), v.contiguous()) if self._is_contiguous else (k, v)

    def close(self) -> None:
        """Give the launches and the buffers back; a second call does nothing."""
        super().close()
        self._buffers.clear()
        self._slots.clear()

    def _write(self, layer: int, k: Any, v: Any, step: RowStep) -> None:
        if self._sizes is not None:
            k, v = self._sizes.halves(k, v)
        keys, values = self._tokens_first(k, "key_states"), self._tokens_first(v, "value_states")
        if step.pads is None:
            self._io.write(layer, keys, values, step.view)
            return
        group = self._caches.storage(layer).group
        if group not in self._slots:
            self._slots[group] = self._padded_slots(group, step)
        self._io.write_slots(layer, keys, values, self._slots[group])

    def _parts(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return K and V of what was gathered."""
        return (keys, values) if self._sizes is None else self._sizes.parts(keys, values)

    def _padded_slots(self, group: int, step: RowStep) -> Tensor:
        """Return the slots of a rectangle [B, n], row by row; -1 for pads."""
        torch = self._torch
        packed = torch.from_dlpack(step.view.slot_mapping[group])[: step.view.num_tokens]
        pads = torch.from_numpy(step.pads).to(self._place)
        slots = torch.full((step.rows, step.tokens), -1, dtype=torch.int64, device=self._place)
        slots[torch.arange(step.tokens, device=self._place) >= pads[:, None]] = packed
        return as_kv_tensor(self._device, slots.view(-1), "slots")

    def _carried(self, layer: int, step: RowStep, first: int) -> tuple[Any, Any]:
        """Return the tokens [first, step.before) that a long step sees, which the step itself may write over."""
        slots = step.view.carry_slots[self._caches.storage(layer).group]
        count = step.before - first
        keys, values = self._empty(layer, step.rows, count if slots is None else slots.shape[1])
        if slots is None:  # no row has a token yet, only pads
            return self._parts(keys.zero_(), values.zero_())
        k, v = (as_kv_tensor(self._device, each.transpose(1, 2), "carry") for each in (keys, values))
        self._io.gather_slots(layer, k, v, slots[: step.rows])
        return self._parts(keys[:, :, -count:], values[:, :, -count:])

    def _empty(self, layer: int, rows: int, tokens: int) -> tuple[Any, Any]:
        """Return new arrays [B, H, tokens, D] in which the tokens of a head follow each other, as attention reads them."""
        storage = self._caches.storage(layer)
        shape = (2, storage.num_kv_heads, rows, tokens, storage.head_dim)
        k, v = self._torch.empty(shape, dtype=self._kind, device=self._place).transpose(1, 2)
        return k, v

    def _dense(self, layer: int, rows: int, tokens: int) -> tuple[tuple[Any, Any], tuple[Tensor, Tensor]]:
        """Return the layer's buffer as arrays [B, H, at least tokens, D] and as tensors [B, tokens, H, D]."""
        storage, key = self._caches.storage(layer), self._buffer_key(layer)
        buffer, shapes = self._buffers[key]
        token = storage.num_kv_heads * storage.head_dim * rows
        if token * tokens > buffer.shape[1]:  # pads count here: they are not stored, but attention is handed them
            buffer, shapes = self._buffers[key] = self._new_buffer(token * round_up(tokens, _GRAIN)), {}
        size = min(round_up(tokens, _GRAIN), buffer.shape[1] // token)
        found = shapes.get((rows, size))
        if found is None:
            shape = (storage.num_kv_heads, rows, size, storage.head_dim)
            flat = buffer[:, : token * size]
            keys, values = (half.view(shape).transpose(0, 1) for half in flat)
            k, v = (as_kv_tensor(self._device, array.transpose(1, 2), "dense") for array in (keys, values))
            if len(shapes) >= _MAX_SHAPES:
                shapes.clear()
            found = shapes[rows, size] = (keys, values), (k, v)
        return found

    def _make_buffers(self) -> dict[Any, tuple[Any, _Shapes]]:
        """Allocate the buffers: for the longest row of a full layer, for window and step of a sliding one."""
        config = self._caches.plan.config
        sizes: dict[Any, int] = {}
        for layer, (window, owns) in enumerate(zip(self._layers.windows, self._layers.owners, strict=True)):
            if owns:
                storage = self._caches.storage(layer)
                capacity = config.max_kv_cache_capacity
                tokens = capacity if window is None else min(capacity, window - 1 + self._short)
                size = config.max_batch_size * tokens * storage.num_kv_heads * storage.head_dim
                key = self._buffer_key(layer)
                sizes[key] = max(sizes.get(key, 0), size)
        return {key: (self._new_buffer(size), {}) for key, size in sizes.items()}

    def _new_buffer(self, size: int) -> Any:
        with self._torch.inference_mode(False):
            return self._torch.empty((2, size), dtype=self._kind, device=self._place)

    def _buffer_key(self, layer: int) -> Any:
        if layer in self._layers.donors:
            return ("donor", layer)
        storage = self._caches.storage(layer)
        return (storage.num_kv_heads, storage.head_dim)
