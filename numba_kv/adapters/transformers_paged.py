"""K and V of a forward pass into pages, and attention that reads them there: nothing is gathered, nothing is masked.

What a query sees is a matter of its layer and of the row's length alone. Pads are not stored, so nobody sees them; their own
attention is zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_kv.adapters.torch_arrays import as_kv_tensor
from numba_kv.adapters.transformers_layer_kv import LayerKV
from numba_kv.cache.attention import PagedAttention
from numba_kv.errors import ShapeError, StateError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.adapters.transformers_rows import RowStep
    from numba_kv.device import Tensor
    from numba_kv.shared_resources import SharedResources

__all__ = ["PagedKV", "StoredKV"]


@dataclass(frozen=True, slots=True)
class StoredKV:
    """Says of K and V that a layer hands to its attention where they are stored.

    Attributes
    ----------
    kv : PagedKV
        Which stored them.
    layer : int
        The layer that did.
    step : RowStep
        The step that they belong to.
    """

    kv: PagedKV
    layer: int
    step: RowStep


class PagedKV(LayerKV):
    """Moves K and V of one model and attends over them. Owns launches and sinks; borrows the pools.

    Parameters
    ----------
    resources : SharedResources
        Of the model.
    donors : frozenset of int
        Layers whose K and V later layers of the same forward read again.
    """

    reads_pages = True

    def __init__(self, resources: SharedResources, donors: frozenset[int]) -> None:
        super().__init__(resources)
        self._attention = PagedAttention(self._caches, self._io)
        self._donors = donors
        self._step: RowStep | None = None
        self._places: Any = None  # of the tokens in the rectangle of a step with pads
        # of each layer in a long step: its K and V and those carried from before it, which pages do not all hold
        self._outside: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._sinks: dict[int, Any] = {}
        self._read: set[int] = set()

    def begin(self, step: RowStep, offsets: NDArray[np.int64]) -> None:
        """Find where the tokens of a step with pads are."""
        self.end()
        self._step = step
        if step.pads is not None:
            pads = self._torch.from_numpy(step.pads)[:, None]
            is_token = self._torch.arange(step.tokens) >= pads
            self._places = is_token.flatten().nonzero().flatten().to(self._place)

    def end(self) -> None:
        """Let go of what a step has left: its forward has ended."""
        self._step = self._places = None
        self._outside.clear()
        self._read.clear()

    def unread(self, layers: frozenset[int]) -> list[int]:
        """Return those of `layers` whose K and V no attention has read in the current step."""
        return sorted(layers - self._read)

    def move(self, layer: int, k: Any, v: Any, step: RowStep) -> tuple[Any, Any]:
        """Store K and V of a step and return them, marked as stored; see `LayerKV.move`.

        Cost: one launch; one more in long steps of layers with a window.
        """
        keys, values = self._packed(k, "key_states"), self._packed(v, "value_states")
        if self._attention.needs_step_kv(layer, step.view):
            self._outside[layer] = (keys, values, *self._carried(layer, step))
        self._io.write(layer, keys, values, step.view, stream=self.stream)
        k.numba_kv = v.numba_kv = StoredKV(self, layer, step)
        return k, v

    def current(self, layer: int) -> StoredKV:
        """Return where the current step has put K and V of a layer, or of its donor.

        Raises
        ------
        StateError
            If no step is running.
        """
        if self._step is None:
            raise StateError("attention: no forward is running that this cache knows of")
        return StoredKV(self, layer, self._step)

    def check_window(self, layer: int, tokens: int | None) -> None:
        """Refuse a layer whose attention has another window (None: none) than its pages.

        Raises
        ------
        UnsupportedModelError
            If what its queries would see differs.
        """
        window = self._caches.storage(layer).window
        seen = 0 if tokens is None or tokens >= self._caches.plan.config.max_kv_cache_capacity else tokens
        if seen != window.tokens:
            wanted = f"a window of {seen} tokens" if seen else "no window"
            raise UnsupportedModelError(
                f"model: attention of layer {layer} has {wanted}, but by its configuration it is {window}; use "
                "PagedCache with attention='gather'"
            )

    def attend(self, stored: StoredKV, query: Any, scale: float | None, soft_cap: float | None, sinks: Any) -> Any:
        """Return the attention of a layer's queries.

        Parameters
        ----------
        stored : StoredKV
            What the layer was handed with its K and V; those of another layer, if it borrows them.
        query : torch.Tensor [B, Hq, m, D]
            Of the step's last m columns.
        scale, soft_cap : float, optional
            As in `PagedAttention.attend`.
        sinks : torch.Tensor [Hq], optional
            As in `PagedAttention.attend`; of any element type.

        Returns
        -------
        torch.Tensor [B, m, Hq, D]
            New.

        Raises
        ------
        StateError
            If K and V belong to another step.
        ShapeError, InteropError
            If queries or sinks cannot be used.

        Stream: enqueues.
        """
        step, layer = stored.step, stored.layer
        if step is not self._step:
            raise StateError("attention: K and V of an earlier forward were given; its pages may hold others now")
        rows, heads, count, dim = query.shape
        if rows != step.rows or count > step.tokens:
            raise ShapeError(f"query: {[rows, count]} rows and tokens given, {[step.rows, step.tokens]} are in this forward")
        queries = query.detach().transpose(1, 2)
        if count < step.tokens:  # some models let the layers behind the last K and V see the last columns alone
            queries = self._torch.nn.functional.pad(queries, (0, 0, 0, 0, step.tokens - count, 0))
        queries = queries.reshape(-1, heads, dim)
        if self._places is not None:
            queries = queries[self._places]
        found = self._torch.empty(queries.shape, dtype=query.dtype, device=self._place)
        q, out = as_kv_tensor(self._device, queries, "query"), as_kv_tensor(self._device, found, "out")
        options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "stream": self.stream}
        if sinks is not None:
            options["sinks"] = self._sinks_of(layer, sinks)
        outside = self._outside.get(layer)
        if outside is None:
            self._attention.attend(layer, q, out, step.view, **options)
        else:
            self._attention.attend_long(layer, q, *outside, out, step.view, **options)
            if layer not in self._donors:
                del self._outside[layer]
        self._read.add(layer)
        if self._places is not None:
            whole = found.new_zeros((rows * step.tokens, heads, dim))
            whole[self._places] = found
            found = whole
        return found.view(rows, step.tokens, heads, dim)[:, step.tokens - count :]

    def close(self) -> None:
        """Give launches and sinks back; a second call does nothing."""
        self.end()
        self._attention.close()
        self._sinks.clear()
        super().close()

    def _packed(self, array: Any, name: str) -> Tensor:
        """Return the tokens of [B, H, n, D] in the order of the step: [B, n, H, D], or [T, H, D] without the pads."""
        if self._places is None:
            return self._tokens_first(array, name)
        tokens = array.detach().transpose(1, 2).flatten(0, 1)[self._places]
        return as_kv_tensor(self._device, tokens, name)

    def _carried(self, layer: int, step: RowStep) -> tuple[Tensor, Tensor]:
        """Return the tokens before a long step that its first queries see, which the step itself may write over."""
        storage, plan = self._caches.storage(layer), self._caches.plan
        width = plan.groups[storage.group].carry_width
        shape = (2, plan.config.max_batch_size, width, storage.num_kv_heads, storage.head_dim)
        k, v = (
            as_kv_tensor(self._device, array, "carry")
            for array in self._torch.empty(shape, dtype=self._kind, device=self._place)
        )
        self._attention.gather_carry(layer, k, v, step.view, stream=self.stream)
        return k, v

    def _sinks_of(self, layer: int, sinks: Any) -> Tensor:
        """Return sinks as dense float32, at the same address in every step."""
        if sinks.dtype is not self._torch.float32 or not sinks.is_contiguous():
            held = self._sinks.get(layer)
            if held is None or held.shape != sinks.shape:
                with self._torch.inference_mode(False):
                    held = self._torch.empty(sinks.shape, dtype=self._torch.float32, device=self._place)
                self._sinks[layer] = held
            sinks = held.copy_(sinks.detach())
        return as_kv_tensor(self._device, sinks.detach(), "sinks")
