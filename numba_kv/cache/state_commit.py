"""StateCommits: after a verification step, the states of accepted tokens become the resident ones.

A verification step runs V tokens of each row, or the V nodes of a tree, and leaves the resident states alone. It writes, row
after row of the batch, either the state behind each token (snapshots) or what computes it (a stash); with room for drafts, a
convolution state takes the inputs of all V tokens itself. A commit is one launch that checks the rows, and one for each array.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_launch import known_on_gpu
from numba_kv.cache.kv_operands import check_aligned, unowned
from numba_kv.cache.state_copies import PART_NBYTES
from numba_kv.cache.state_slab import HALF, WORD
from numba_kv.config.recurrent import Mamba2Layer
from numba_kv.device import Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError, StateError
from numba_kv.geometry import ceil_div
from numba_kv.kernels.bits import KINDS
from numba_kv.kernels.block_memory import NEAR_TILE
from numba_kv.kernels.replay_delta_net import replay_delta_net
from numba_kv.kernels.replay_mamba import replay_mamba
from numba_kv.kernels.replay_values import TILE_COLUMNS, TILE_ROWS
from numba_kv.kernels.state_commit import (
    CommitStatus,
    resolve_commits,
    scatter_states_halves,
    scatter_states_words,
    shift_conv_states_16,
    shift_conv_states_32,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numba_kv.cache.state_slab import StateSlab
    from numba_kv.device import Device, Memory
    from numba_kv.device.guard import CallGuard
    from numba_kv.kernels.jit import Launch
    from numba_kv.plan import MemoryPlan

__all__ = ["StateCommits"]

_INT32 = dtype("int32")
#: Bound checks that are kept: callers alternate between few arrays.
_MAX_LAUNCHES = 16
#: The most tiles of a block that replays Mamba, and those of a thread: it has one after the other.
_MAMBA_TILES, _THREAD_TILES = 256, 2
#: The most columns of a delta net that one block replays, a tile a thread.
_NET_COLUMNS = 64
#: The most threads of a block that replays.
_REPLAY_THREADS = 512
#: Channels of a convolution that one block shifts.
_PART_CHANNELS = 512


class StateCommits:
    """Commits of one model's recurrent layers. Borrows the arrays; owns the rows' paths.

    Attributes
    ----------
    packed : tuple of int
        Rows and tokens of the verification step whose snapshots or inputs the arrays hold.
    """

    def __init__(
        self,
        device: Device,
        plan: MemoryPlan,
        slabs: dict[str, StateSlab],
        guard: CallGuard,
        take: Callable[[str, int], Memory],
    ) -> None:
        config = plan.config
        self._device = device
        self._config = config
        self._slabs = slabs
        self._guard = guard
        self.packed = (config.max_batch_size, config.max_verify_tokens)
        self._checks: OrderedDict[tuple[Any, ...], Launch] = OrderedDict()
        self._launches: list[tuple[Launch, int]] | None = None
        self._is_active = config.recurrent_layer is not None and config.max_verify_tokens > 0
        if self._is_active:
            arrays = []
            for name in ("commit_paths", "commit_status"):
                region = plan.region(name)
                arrays.append(Tensor(take(name, region.nbytes), device, _INT32, region.shape))
            self._paths, self._status = arrays

    def reshape_intermediate_states(self, rows: int, tokens: int) -> None:
        """Say how the next verification step packs its snapshots or inputs: ``[rows, tokens, ...]``.

        Raises
        ------
        InputError
            If there are more rows than `max_batch_size`, or more tokens than `max_verify_tokens`.
        StateError
            If the plan has no verification.

        Stream: host only; captured commits keep the numbers that they were captured with.
        """
        with self._guard:
            self._check_active()
            limits = (("rows", rows, self._config.max_batch_size), ("tokens", tokens, self._config.max_verify_tokens))
            found = []
            for name, value, most in limits:
                try:
                    number = 0 if isinstance(value, bool) else index(value)
                except TypeError:
                    number = 0
                if not 1 <= number <= most:
                    raise InputError(f"{name}: {value!r} is not an integer from 1 to {most}")
                found.append(number)
            self.packed = (found[0], found[1])

    def commit(self, accept_len: Any, state_index: Any, node_ids: Any, stream: object | None) -> None:
        """Enqueue a commit; see `MambaCacheManager.scatter_accepted_linear_states` and its neighbour for trees."""
        with self._guard:
            self._check_active()
            where = self._device.stream if stream is None else self._device.as_capturing_stream(stream)
            rows, tokens = self.packed
            check = self._check_of(accept_len, state_index, node_ids)
            launches = self._bound()
            check(rows, where, tokens=tokens)
            for launch, each in launches:
                launch(rows * each, where, tokens=tokens)

    def prepare(self, accept_len: Any, state_index: Any, node_ids: Any) -> None:
        """Compile what commits need, and bind it to these arrays; see `MambaCacheManager.prepare_commits`."""
        with self._guard:
            self._check_active()
            if accept_len is None:  # the check is compiled for any arrays
                self._check_of(self._status, self._status, None)
            else:
                self._check_of(accept_len, state_index, node_ids)
            self._bound()

    def _bound(self) -> list[tuple[Launch, int]]:
        if self._launches is None:
            self._launches = self._bind_launches()
        return self._launches

    @property
    def num_launches(self) -> int:
        """Kernels of a commit."""
        return 1 + len(self._bound())

    def refusals(self) -> dict[int, CommitStatus]:
        """Return the rows of which the device refused a commit since the last call, and why; the words are cleared.

        Stream: waits.
        """
        with self._guard:
            self._check_active()
            words = self._status.to_host()
            if words.any():
                self._device.fill(self._status, 0, self._device.stream)
            return {row: CommitStatus(int(word)) for row, word in enumerate(words) if word}

    def close(self) -> None:
        """Forget the launches."""
        self._checks.clear()
        self._launches = None

    def _check_active(self) -> None:
        if not self._is_active:
            reason = "it has no recurrent layers" if self._config.recurrent_layer is None else "max_verify_tokens is 0"
            raise StateError(f"the plan has no verification of recurrent states: {reason}")

    # -- launches ------------------------------------------------------------------------------------------------

    def _check_of(self, accept_len: Any, state_index: Any, node_ids: Any) -> Launch:
        """Return the launch that checks rows by these arrays."""
        rows, tokens = self.packed
        lengths = self._vector("accept_len", accept_len, rows)
        slots = self._vector("state_index", state_index, rows)
        if node_ids is None:
            nodes = Tensor(self._paths._memory, self._device, _INT32, (rows, 0))
        else:
            nodes = as_tensor(self._device, node_ids, "node_ids")
            nodes.check_open()
            wide = nodes.shape[1] if nodes.ndim == 2 else 0
            if nodes.dtype is not _INT32 or not 1 <= wide <= tokens or nodes.shape[0] != rows or not nodes.is_contiguous:
                wanted = f"dense int32 [{rows}, 1 to {tokens}], rows and at most the tokens of the step,"
                raise ShapeError(f"node_ids: {nodes!r} given, {wanted} wanted")
            check_aligned(nodes, "node_ids")
        key = (lengths.address, slots.address, nodes.address, nodes.shape)
        launch = self._checks.get(key)
        if launch is not None:
            self._checks.move_to_end(key)
            return launch
        launch = resolve_commits.bind(
            self._device,
            {
                "paths": self._paths,
                "status": self._status,
                "accept_len": unowned(lengths),
                "state_index": unowned(slots),
                "node_ids": unowned(nodes),
                "tokens": tokens,
                "num_slots": self._config.max_batch_size,
                "is_ordered": int(not self._config.has_conv_snapshots),
            },
        )
        self._checks[key] = launch
        if len(self._checks) > _MAX_LAUNCHES:
            self._checks.popitem(last=False)
        return launch

    def _vector(self, name: str, value: Any, rows: int) -> Tensor:
        tensor = as_tensor(self._device, value, name)
        tensor.check_open()
        if tensor.dtype is not _INT32 or tensor.ndim != 1 or tensor.size < rows or not tensor.is_contiguous:
            raise ShapeError(f"{name}: {tensor!r} given, dense int32 of at least {rows} elements wanted")
        check_aligned(tensor, name)
        return tensor[:rows]

    def _bind_launches(self) -> list[tuple[Launch, int]]:
        """Return what moves states once the rows are checked, and the items of each for a row."""
        found = [self._bind_recurrent()] if "recurrent_state" in self._slabs else []
        if self._config.has_conv_snapshots:
            found.append(self._scatter("conv_state", "intermediate_conv_state"))
        elif self._slabs["conv_state"].plan.shape[2:][1]:
            found.append(self._shift())
        return found

    def _bind_recurrent(self) -> tuple[Launch, int]:
        if self._config.recurrent_spec_verify_mode == "snapshot":
            return self._scatter("recurrent_state", "intermediate_recurrent_state")
        if isinstance(self._config.recurrent_layer, Mamba2Layer):
            return self._replay_mamba(self._config.recurrent_layer)
        return self._replay_delta_net()

    def _scatter(self, pool_name: str, snapshot_name: str) -> tuple[Launch, int]:
        pool, snapshots = self._slabs[pool_name], self._slabs[snapshot_name]
        size, layers = pool.slot_nbytes, pool.plan.shape[0]
        unit = HALF if size % WORD else WORD
        parts = ceil_div(size, PART_NBYTES)
        values: dict[str, Tensor | int] = {
            "pool": pool.flat(unit),
            "snapshots": snapshots.flat(unit),
            "paths": self._paths,
            "layers": layers,
            "parts": parts,
            "part_size": PART_NBYTES // unit,
            "size": size // unit,
            "pool_layer": pool.plan.layer_nbytes // unit,
            "snapshot_layer": snapshots.plan.layer_nbytes // unit,
            "tokens": 0,
        }
        kernel = scatter_states_words if unit == WORD else scatter_states_halves
        return kernel.bind(self._device, values), layers * parts

    def _shift(self) -> tuple[Launch, int]:
        pool = self._slabs["conv_state"]
        layers, _, channels, columns = pool.plan.shape
        itemsize = dtype(pool.plan.dtype).itemsize
        parts = ceil_div(channels, _PART_CHANNELS)
        values: dict[str, Tensor | int] = {
            "pool": pool.flat(itemsize),
            "paths": self._paths,
            "layers": layers,
            "parts": parts,
            "part_size": _PART_CHANNELS,
            "channels": channels,
            "columns": columns,
            "pool_layer": pool.plan.layer_nbytes // itemsize,
            "tokens": 0,
        }
        kernel = shift_conv_states_16 if itemsize == HALF else shift_conv_states_32
        return kernel.bind(self._device, values), layers * parts

    def _replay_mamba(self, layer: Mamba2Layer) -> tuple[Launch, int]:
        heads, dim, size = layer.state_shape
        stashes = {name: self._slabs[f"replay_{name}_state"] for name in ("da", "u", "b", "dt")}
        wide = ceil_div(size, TILE_COLUMNS)
        part_rows = _part_of(dim, _MAMBA_TILES // wide * TILE_ROWS, TILE_ROWS)
        state, kind, layers = self._state_values("recurrent_state")
        values: dict[str, Tensor | int] = {
            **state,
            "da": stashes["da"].whole(),
            "dt": stashes["dt"].whole(),
            "u": stashes["u"].flat(1),
            "b": stashes["b"].flat(1),
            "spare": self._spare(stashes["da"]),
            "tokens": 0,
            "head_layer": stashes["da"].plan.layer_nbytes // 4,
            "u_layer": stashes["u"].plan.layer_nbytes // 4,
            "b_layer": stashes["b"].plan.layer_nbytes // 4,
        }
        sizes = {"layers": layers, "heads": heads, "dim": dim, "groups": layer.num_groups, "size": size, "part_rows": part_rows}
        values |= sizes
        replay = replay_mamba.fixed(kind=kind, **known_on_gpu(self._device, values, sizes))
        threads = _threads_of(ceil_div(ceil_div(part_rows, TILE_ROWS) * wide, _THREAD_TILES))
        return replay.bind(self._device, values, threads=threads), layers * heads * (dim // part_rows)

    def _replay_delta_net(self) -> tuple[Launch, int]:
        stashes = {name: self._slabs[f"replay_{name}_state"] for name in ("k", "g", "beta", "v")}
        given = stashes["v"].plan
        heads, dim, size = self._slabs["recurrent_state"].plan.shape[2:]
        runs = ceil_div(dim, TILE_ROWS)
        part_columns = _part_of(size, min(_NET_COLUMNS, _REPLAY_THREADS // runs * TILE_COLUMNS), TILE_COLUMNS)
        state, kind, layers = self._state_values("recurrent_state")
        values: dict[str, Tensor | int] = {
            **state,
            "keys": stashes["k"].flat(1),
            "decays": stashes["g"].whole(),
            "gates": stashes["beta"].whole(),
            "values": stashes["v"].flat(1),
            "spare": self._spare(stashes["g"]),
            "tokens": 0,
            "key_layer": stashes["k"].plan.layer_nbytes // 4,
            "head_layer": stashes["g"].plan.layer_nbytes // 4,
            "value_layer": given.layer_nbytes // dtype(given.dtype).itemsize,
        }
        sizes = {
            "layers": layers,
            "heads": heads,
            "key_heads": stashes["k"].plan.shape[3],
            "dim": dim,
            "size": size,
            "part_columns": part_columns,
        }
        values |= sizes
        known = known_on_gpu(self._device, values, sizes)
        replay = replay_delta_net.fixed(kind=kind, value_kind=KINDS[given.dtype], **known)
        threads = _threads_of(runs * ceil_div(part_columns, TILE_COLUMNS))
        return replay.bind(self._device, values, threads=threads), layers * heads * (size // part_columns)

    def _spare(self, stash: StateSlab) -> Tensor:
        """Return what stands for the memory near a block's lanes: on a GPU, which has its own, any array of float32."""
        if self._device.target == "cuda":
            return stash.whole()
        return as_tensor(self._device, np.empty(NEAR_TILE, np.float32), "spare")

    def _state_values(self, name: str) -> tuple[dict[str, Tensor | int], int, int]:
        """Return what a replay knows of the states, their kind, and the layers."""
        slab = self._slabs[name]
        layers = slab.plan.shape[0]
        values: dict[str, Tensor | int] = {
            "state": slab.flat(1),
            "paths": self._paths,
            "state_layer": slab.plan.layer_nbytes // dtype(slab.plan.dtype).itemsize,
        }
        return values, KINDS[slab.plan.dtype], layers


def _part_of(size: int, most: int, unit: int) -> int:
    """Return the largest part of whole units, `most` at most, of which `size` is a multiple; all of it if there is none."""
    return max((part for part in range(unit, min(size, most) + 1, unit) if size % part == 0), default=size)


def _threads_of(busy: int) -> int:
    """Return the threads of a block of which so many have tiles: whole warps."""
    return min(_REPLAY_THREADS, ceil_div(busy, 32) * 32)
