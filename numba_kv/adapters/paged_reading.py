"""What adapters of attention libraries share: what a library's kernels can read, and a batch's pools as its arrays.

Knows pools, windows and steps. Does not know how a library calls its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_kv.adapters.torch_arrays import to_torch
from numba_kv.batch import Batch, StepView
from numba_kv.device import Tensor
from numba_kv.errors import ConfigError, InputError
from numba_kv.geometry import INT32_MAX

if TYPE_CHECKING:
    from numba_kv.cache import LayerStorage

__all__ = ["Consumer", "PagedReader", "SeenKeys", "as_torch"]


@dataclass(frozen=True, slots=True)
class Consumer:
    """What the paged kernels of one library can read.

    Attributes
    ----------
    name : str
        For messages.
    dtypes : tuple of str
        Element types of pools.
    page_multiple : int
        The tokens of a page must be a multiple of it.
    head_dims : tuple of int
        Head sizes; empty: multiples of 8 up to 256.
    has_chunks : bool
        Whether chunked attention is a kernel's own business.
    """

    name: str
    dtypes: tuple[str, ...]
    page_multiple: int = 1
    head_dims: tuple[int, ...] = ()
    has_chunks: bool = False

    def check(self, layer: int, pool: Tensor, storage: LayerStorage) -> None:
        """Raise ConfigError, with the way out, if the kernels cannot read a layer's pool, of either layout."""
        page, dim = storage.page_tokens, storage.head_dim
        if page % self.page_multiple:
            raise ConfigError(
                f"page_tokens: {self.name} reads pages of a multiple of {self.page_multiple} tokens, these have {page}; "
                f"load the configuration with page_tokens={self.page_multiple}"
            )
        if pool.dtype.name not in self.dtypes:
            raise ConfigError(
                f"kv_cache_dtype: {self.name} reads {', '.join(self.dtypes)}; layer {layer} is stored as {pool.dtype}"
            )
        if dim not in self.head_dims if self.head_dims else dim % 8 or dim > 256:
            known = " or ".join(map(str, self.head_dims)) or "a multiple of 8 up to 256"
            raise ConfigError(f"head_dim: {self.name} reads heads of {known} channels; layer {layer} has {dim}")
        if pool.strides[1] > INT32_MAX:
            raise ConfigError(
                f"page_tokens: a page of layer {layer} has {pool.strides[1]} elements; {self.name} counts them in 32 bits"
            )


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Which keys a kernel is to let a layer's queries see, beside the causal mask.

    Attributes
    ----------
    left : int
        Keys to the left of the query's own; -1: all.
    chunk : int
        Tokens of a chunk that the kernel masks itself; 0: none.
    is_compact : bool
        Whether the table has to begin with the first mapped page: only then nothing more is to be masked.
    """

    left: int
    chunk: int = 0
    is_compact: bool = False


class PagedReader:
    """A batch's pools as a library's arrays, and the checks of its steps. Borrows the batch.

    Parameters
    ----------
    batch : Batch
        Whose steps are read.
    consumer : Consumer
        The library.
    arrays : callable, optional
        What makes the library's array of a Tensor, or of a NumPy array; default: torch's, without a copy.

    Raises
    ------
    InputError
        If `batch` is no Batch.
    StateError
        If it is closed.
    """

    def __init__(self, batch: Batch, consumer: Consumer, arrays: Callable[[Any], Any] | None) -> None:
        if not isinstance(batch, Batch):
            raise InputError(f"batch: {type(batch).__name__} given, a Batch wanted")
        batch.guard.check_open()
        self.batch = batch
        self.consumer = consumer
        self.arrays = as_torch if arrays is None else arrays
        self.caches = next(c for c in batch.resources.cache_managers if c.step_buffers is batch._buffers)
        self._storages: dict[int, LayerStorage] = {}  # of layers that were found readable
        self._pools: dict[int, tuple[Any, Any]] = {}
        self._made: dict[int, Any] = {}

    def storage(self, layer: int) -> LayerStorage:
        """Return how a layer is stored, if the library can read it. Raises as `Consumer.check`."""
        found = self._storages.get(layer) if type(layer) is int else None
        if found is None:
            found = self.caches.storage(layer)
            self.consumer.check(layer, self.caches.kv(layer), found)
            self._storages[layer] = found
        return found

    def pools(self, layer: int) -> tuple[Any, Any]:
        """Return K and V of a layer, [N, P, H, D] each, as the library's arrays; made once.

        Pages of layout HND are shown by their strides, without a copy: the last is 1, and kernels are told the others.
        """
        self.storage(layer)
        if layer not in self._pools:
            pool = self.caches.by_token(layer)
            self._pools[layer] = self.arrays(pool[0]), self.arrays(pool[1])
        return self._pools[layer]

    def made(self, tensor: Tensor) -> Any:
        """Return a tensor of the batch as the library's array; made once, as its address does not change."""
        found = self._made.get(tensor.address)
        if found is None:
            found = self._made[tensor.address] = self.arrays(tensor)
        return found

    def check_view(self, view: StepView) -> None:
        """Check a step.

        Raises
        ------
        StateError
            If the batch is closed.
        InputError
            If it is not a step of this batch, or the device decided how many tokens rows append.
        """
        self.batch.guard.check_open()
        if getattr(view, "seq_lens", None) is not self.batch._buffers.seq_lens:
            raise InputError(f"view: {view!r} is not a step of this batch; Batch.step returns one")
        if view.counts_from_device:
            raise InputError(
                f"view: rows may have appended fewer tokens than they have queries (counts=), and {self.consumer.name} takes "
                "the last query for the last token of its row; PagedAttention attends such a step"
            )

    def seen(self, layer: int, view: StepView) -> SeenKeys:
        """Return what a layer's queries see in a step.

        Raises
        ------
        InputError
            If keys of the step are not in pages (a long step), or the library has no mask for the layer's window.
        """
        storage = self.storage(layer)
        window, page = storage.window, storage.page_tokens
        group = self.caches.plan.groups[storage.group]
        if window.is_full:
            return SeenKeys(-1)
        if view.is_long and group.ring < group.row_pages:
            most = self.caches.plan.config.max_step_tokens
            raise InputError(
                f"view: a row appended more than max_step_tokens ({most}), and the ring of layer {layer} ({window}) does not "
                f"hold all that its queries see: attend over the step's own K and V behind the tokens of view.carry_slots"
                f"[{storage.group}] (PagedAttention.attend_long does), or append at most {most} tokens a step"
            )
        if window.kind == "sliding":
            return SeenKeys(window.tokens - 1)
        if self.consumer.has_chunks:
            return SeenKeys(-1, chunk=window.tokens)
        if window.tokens % page:
            raise InputError(
                f"layer: {self.consumer.name} has no mask for the {window} attention of layer {layer}, and chunks do not begin "
                f"with a page of {page} tokens; take a page_tokens that divides {window.tokens}, or PagedAttention"
            )
        if view.max_query_tokens > 1:
            raise InputError(
                f"view: {self.consumer.name} has no mask for the {window} attention of layer {layer}; a table that begins with "
                "the chunk replaces it in steps of one token a row, and these have more; PagedAttention attends such a step"
            )
        return SeenKeys(-1, is_compact=True)


def as_torch(value: Any) -> Any:
    """Return a Tensor or a NumPy array as torch's, with the same memory."""
    if isinstance(value, Tensor):
        return to_torch(value)
    import torch

    return torch.from_numpy(value)
