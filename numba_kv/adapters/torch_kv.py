"""K and V into pages and out of them in torch and in Triton, to be measured beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.adapters.torch_timing import median_us

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device import Tensor

__all__ = ["PageCopy", "TorchKV", "copy_us"]


def copy_us(nbytes: int) -> float:
    """Return the median time of torch's copy of `nbytes` of device memory, in microseconds."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return median_us(lambda: target.copy_(source))


class TorchKV:
    """The same arrays as torch sees them, without a copy.

    Parameters
    ----------
    pool : Tensor bfloat16 [2, N, P, H, D]
        A layer's pages, dense.
    k, v : Tensor bfloat16 [T, H, D]
        Dense.
    slots : Tensor int64 [T]
        All of them in the pool.
    """

    def __init__(self, pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        import torch

        pages = torch.from_dlpack(pool)
        self.width = pages.shape[3] * pages.shape[4]
        self.halves = [pages[half].reshape(-1, self.width) for half in (0, 1)]
        self.k, self.v = (torch.from_dlpack(t).reshape(-1, self.width) for t in (k, v))
        self.k_out, self.v_out = torch.empty_like(self.k), torch.empty_like(self.v)
        self.slots = torch.from_dlpack(slots)
        self.kernels = _kernels()

    def times(self, what: str) -> dict[str, float]:
        """Return microseconds of ``write`` or ``gather``: torch's indexing and a Triton kernel."""
        pool_k, pool_v = self.halves
        if what == "write":

            def torch_work() -> None:
                pool_k.index_copy_(0, self.slots, self.k)
                pool_v.index_copy_(0, self.slots, self.v)

            def triton_work() -> None:
                self.write(len(self.k), self.slots)
        else:
            import torch

            def torch_work() -> None:
                torch.index_select(pool_k, 0, self.slots, out=self.k_out)
                torch.index_select(pool_v, 0, self.slots, out=self.v_out)

            def triton_work() -> None:
                self.kernels[1][(len(self.k),)](
                    self.k_out, self.v_out, pool_k, pool_v, self.slots, WIDTH=self.width, num_warps=4
                )

        return {"torch": median_us(torch_work), "triton": median_us(triton_work)}

    def write(self, tokens: int, slots: Any) -> None:
        """Enqueue the Triton write of the first `tokens` tokens."""
        pool_k, pool_v = self.halves
        self.kernels[0][(tokens,)](self.k, self.v, pool_k, pool_v, slots, WIDTH=self.width, num_warps=4)

    def rotate_then_write(self, q: Tensor | None, table: Tensor, positions: Tensor, slots: Tensor) -> Callable[[], None]:
        """Return what enqueues two Triton kernels: rotate q, if given, and k (halves, in place), then write k and v.

        Parameters
        ----------
        q : Tensor bfloat16 [T, Hq, D], optional
            Dense.
        table : Tensor float32 [1, S, D]
            Cosines of all pairs, then sines.
        positions : Tensor int32 [T]
            Position of each token.
        slots : Tensor int64 [n]
            Of the first n tokens, which are worked on.
        """
        import torch

        rows, at, to = torch.from_dlpack(table), torch.from_dlpack(positions), torch.from_dlpack(slots)
        rotated = self.k if q is None else torch.from_dlpack(q)
        tokens, dim = len(to), rows.shape[-1]
        heads, query_heads = self.width // dim, 0 if q is None else rotated.shape[1]

        def work() -> None:
            self.kernels[2][(tokens,)](
                rotated, self.k, rows, at, QUERY_HEADS=query_heads, HEADS=heads, HALF=dim // 2, num_warps=4
            )
            self.write(tokens, to)

        return work

    def write_few(self, slots: Tensor) -> Callable[[], None]:
        """Return what enqueues the Triton write of the first tokens, to `slots` int64 [n]."""
        import torch

        few = torch.from_dlpack(slots)
        return lambda: self.write(len(few), few)


class PageCopy:
    """Pages to pages of the same pools.

    Parameters
    ----------
    pools : sequence of Tensor bfloat16 [2, N, P, H, D]
        Each layer's pages, dense; layers are equally far apart.
    pairs : integers [n, 2]
        Source and target of each copy; no page is a target twice, nor both.
    """

    def __init__(self, pools: Sequence[Tensor], pairs: NDArray[np.integer[Any]]) -> None:
        import torch

        self.layers = [torch.from_dlpack(pool) for pool in pools]
        sides = torch.as_tensor(pairs, dtype=torch.int64, device="cuda")
        self.sources, self.targets = sides[:, 0].contiguous(), sides[:, 1].contiguous()
        first, last = self.layers[0], self.layers[-1]
        self.page = first[0, 0].numel()
        apart = (last.data_ptr() - first.data_ptr()) // first.element_size() // max(1, len(pools) - 1)
        self.strides = apart, first.stride(0)
        self.kernel = _kernels()[3]

    def with_torch(self) -> None:
        """Enqueue the copies as torch's indexing: two operations a layer."""
        for pages in self.layers:
            pages.index_copy_(1, self.targets, pages.index_select(1, self.sources))

    def with_triton(self) -> None:
        """Enqueue the copies as one Triton kernel."""
        part = 2048
        grid = (-(-self.page // part), len(self.sources), 2 * len(self.layers))
        self.kernel[grid](self.layers[0], self.sources, self.targets, *self.strides, PAGE=self.page, PART=part, num_warps=4)

    def times(self) -> dict[str, float]:
        """Return microseconds of each."""
        return {"torch": median_us(self.with_torch), "triton": median_us(self.with_triton)}


def _kernels() -> tuple[Any, ...]:
    import triton
    import triton.language as tl

    @triton.jit
    def write(k, v, pool_k, pool_v, slots, WIDTH: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        if slot >= 0:
            at = tl.arange(0, WIDTH)
            k_row = tl.load(k + token * WIDTH + at)
            v_row = tl.load(v + token * WIDTH + at)
            tl.store(pool_k + slot * WIDTH + at, k_row)
            tl.store(pool_v + slot * WIDTH + at, v_row)

    @triton.jit
    def gather(k, v, pool_k, pool_v, slots, WIDTH: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        at = tl.arange(0, WIDTH)
        keep = (at < WIDTH) & (slot >= 0)
        k_row = tl.load(pool_k + slot * WIDTH + at, mask=keep, other=0.0)
        v_row = tl.load(pool_v + slot * WIDTH + at, mask=keep, other=0.0)
        tl.store(k + token * WIDTH + at, k_row)
        tl.store(v + token * WIDTH + at, v_row)

    @triton.jit
    def rotate(q, k, table, positions, QUERY_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, HALF)
        row = table + tl.load(positions + token).to(tl.int64) * 2 * HALF
        cos = tl.load(row + lane)[None, :]
        sin = tl.load(row + HALF + lane)[None, :]
        if QUERY_HEADS > 0:
            at = tl.arange(0, QUERY_HEADS)[:, None] * 2 * HALF + lane[None, :]
            q_row = q + token * QUERY_HEADS * 2 * HALF
            first = tl.load(q_row + at).to(tl.float32)
            second = tl.load(q_row + at + HALF).to(tl.float32)
            tl.store(q_row + at, (first * cos - second * sin).to(tl.bfloat16))
            tl.store(q_row + at + HALF, (second * cos + first * sin).to(tl.bfloat16))
        at = tl.arange(0, HEADS)[:, None] * 2 * HALF + lane[None, :]
        k_row = k + token * HEADS * 2 * HALF
        first = tl.load(k_row + at).to(tl.float32)
        second = tl.load(k_row + at + HALF).to(tl.float32)
        tl.store(k_row + at, (first * cos - second * sin).to(tl.bfloat16))
        tl.store(k_row + at + HALF, (second * cos + first * sin).to(tl.bfloat16))

    @triton.jit
    def copy(pool, sources, targets, layer_stride, half_stride, PAGE: tl.constexpr, PART: tl.constexpr):
        pair, plane = tl.program_id(1), tl.program_id(2).to(tl.int64)
        at = tl.program_id(0) * PART + tl.arange(0, PART)
        half = pool + (plane // 2) * layer_stride + (plane % 2) * half_stride
        page = tl.load(half + tl.load(sources + pair) * PAGE + at, mask=at < PAGE, other=0.0)
        tl.store(half + tl.load(targets + pair) * PAGE + at, page, mask=at < PAGE)

    return write, gather, rotate, copy
