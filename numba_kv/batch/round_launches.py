"""RoundLaunches: the kernels of a speculative round that `StepLaunches` does not have, and the arrays between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_moves import TokenMoves
from numba_kv.cache.kv_operands import unowned
from numba_kv.device import Staging, Tensor
from numba_kv.dtypes import dtype
from numba_kv.kernels.round_commit import commit_rounds, resolve_rounds
from numba_kv.kernels.round_steps import place_nodes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.cache.hybrid import HybridCacheManager
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Memory, Stream
    from numba_kv.kernels.jit import Launch

__all__ = ["RoundLaunches"]

_INT32 = dtype("int32")
#: Bound launches kept for arrays of callers.
_MAX_BOUND = 8
#: Threads of a block of `commit_rounds`: one a window group would do.
_THREADS = 32
_BASE = ("lengths", "high_water", "appended", "floors", "groups")
_ROWS = (*_BASE, "mapped_begin", "seq_lens", "context_lens")
_TABLES = ("page_tables", "block_tables")


class RoundLaunches:
    """Binds what ends a round, and places the nodes of its trees. Owns the rows' paths and a staging block.

    Parameters
    ----------
    base : HybridCacheManager
        Caches of the base.
    draft : StepBuffers or None
        Step arrays of the draft, if it has a cache of its own.
    verify_tokens : int
        Most tokens of a row in a verification step.
    keeps : bool
        Whether the draft keeps its K and V of accepted proposals.
    take : callable
        ``take(name, nbytes) -> Memory``: allocation.
    """

    def __init__(
        self,
        base: HybridCacheManager,
        draft: StepBuffers | None,
        verify_tokens: int,
        keeps: bool,
        take: Callable[[str, int], Memory],
    ) -> None:
        buffers = base.step_buffers
        self._base = base
        self._device = buffers.device
        self._rows = buffers.counts.size
        self._moves = TokenMoves(buffers, base.kv_cache)
        self._has_states = base.mamba_cache.has_commits
        width = self._rows * verify_tokens

        def words(name: str, count: int) -> Tensor:
            return Tensor(take(f"round.{name}", 4 * count), self._device, _INT32, (count,))

        self._kept, self._slots, self._path = words("kept", self._rows), words("slots", self._rows), words("path", width)
        self._told = words("told", self._rows + width)  # what the host says was accepted, and its paths
        self._staging = Staging(self._device, self._told.size)
        self._none = Tensor(self._path._memory, self._device, _INT32, (self._rows, 0))
        other = buffers if draft is None else draft
        self._values: dict[str, Tensor | int] = {name: getattr(buffers, name) for name in _ROWS}
        self._values |= {f"draft_{name}": getattr(other, name) for name in _ROWS}
        self._values |= {name: buffers.arena[name] for name in _TABLES}
        self._values |= {f"draft_{name}": other.arena[name] for name in _TABLES}
        self._values |= {"live": buffers.live, "status": buffers.status, "state_index": buffers.state_index}
        self._values |= {"keeps": int(keeps), "has_draft": int(draft is not None), "kept": self._kept, "slots": self._slots}
        self._bound: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._bind_commit(self._told[: self._rows], None, None)  # compiled and loaded now: a first call may be captured
        tree = Tensor(self._path._memory, self._device, _INT32, (self._rows, verify_tokens))
        self._bind_placing(tree)
        self._moves.bound(tree)
        if self._has_states:
            base.mamba_cache.prepare_commits()

    def prepare_tree(self, parents: Tensor) -> None:
        """Bind what places the nodes of a tree. Enqueues nothing."""
        self._placing(parents)

    def prepare(self, accepted: Tensor, nodes: Tensor | None, parents: Tensor | None) -> None:
        """Bind all that a round with these arrays needs, so that nothing is left to be bound in a capture. Enqueues nothing."""
        if parents is not None:
            self.prepare_tree(parents)
        _, path, _ = self._committing(accepted, nodes, parents)
        if nodes is not None:
            self._moves.bound(path)
        if self._has_states:
            self._base.mamba_cache.prepare_commits(self._kept, self._slots, None if nodes is None else path)

    def commit(self, accepted: Tensor, nodes: Tensor | None, parents: Tensor | None, stream: Stream) -> int:
        """Enqueue a commit of checked arrays: int32 [B], [B, A] and [B, V]. Returns the number of kernels.

        Stream: enqueues one kernel; with nodes or states one before it, one for each slab that moves, and those of the states.
        """
        resolve, path, commit = self._committing(accepted, nodes, parents)
        launches = 1
        if nodes is not None or self._has_states:
            resolve(self._rows, stream)
            launches += 1
        if nodes is not None:
            moves = self._moves.bound(path)
            for move, items in moves:
                move(items, stream)
            launches += len(moves)
        if self._has_states:
            states = self._base.mamba_cache
            if nodes is None:
                states.scatter_accepted_linear_states(self._kept, self._slots, stream=stream)
            else:
                states.scatter_accepted_tree_states(path, self._kept, self._slots, stream=stream)
            launches += states.commit_launches
        commit(self._rows, stream)
        return launches

    def place_nodes(self, parents: Tensor, stream: Stream) -> None:
        """Enqueue the positions of the nodes of the step that was just made."""
        self._placing(parents)(parents.size, stream)

    def tell(self, accepted: NDArray[np.int32], nodes: NDArray[np.int32] | None) -> tuple[Tensor, Tensor | None]:
        """Send what the host says was accepted; return it on the device. Stream: enqueues one copy."""
        words = self._staging.acquire()
        count, rows = len(accepted), self._rows
        words[:rows] = accepted
        if nodes is not None:
            words[count : count + nodes.size] = nodes.ravel()
            count += nodes.size
        self._staging.send_to(self._told.address, count, self._device.stream)
        if nodes is None:
            return self._told[:rows], None
        return self._told[:rows], Tensor(self._told._memory, self._device, _INT32, nodes.shape, offset_nbytes=4 * rows)

    def close(self) -> None:
        """Give the staging block back. Stream: waits for copies in flight."""
        self._bound.clear()
        self._staging.close()

    def _placing(self, parents: Tensor) -> Launch:
        launch: Launch = self._cached(("nodes", *_key(parents)), lambda: self._bind_placing(parents))
        return launch

    def _bind_placing(self, parents: Tensor) -> Launch:
        buffers = self._base.step_buffers
        values = {name: getattr(buffers, name) for name in ("positions", "cu_seqlens_q", "context_lens", "appended")}
        return place_nodes.bind(self._device, {**values, "parents": unowned(parents)})

    def _committing(self, accepted: Tensor, nodes: Tensor | None, parents: Tensor | None) -> tuple[Launch, Tensor, Launch]:
        key = ("commit", accepted.address, *_key(nodes), *_key(parents))
        found: tuple[Launch, Tensor, Launch] = self._cached(key, lambda: self._bind_commit(accepted, nodes, parents))
        return found

    def _bind_commit(self, accepted: Tensor, nodes: Tensor | None, parents: Tensor | None) -> tuple[Launch, Tensor, Launch]:
        columns = 0 if nodes is None else nodes.shape[1]
        path = Tensor(self._path._memory, self._device, _INT32, (self._rows, columns))
        values = {
            **self._values,
            "path": path,
            "accepted": unowned(accepted),
            "nodes": self._none if nodes is None else unowned(nodes),
            "parents": self._none if parents is None else unowned(parents),
        }
        resolve = resolve_rounds.bind(self._device, {name: values[name] for name in resolve_rounds.arguments})
        commit = commit_rounds.bind(self._device, {name: values[name] for name in commit_rounds.arguments}, threads=_THREADS)
        return resolve, path, commit

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = make()
            if len(self._bound) > _MAX_BOUND:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        return found


def _key(tensor: Tensor | None) -> tuple[Any, ...]:
    return (None,) if tensor is None else (tensor.address, tensor.shape)
