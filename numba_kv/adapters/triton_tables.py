"""A step's table work as Triton kernels, to be measured beside ours: block-table gather and slot mapping.

This is what a serving engine that decides on the host leaves to the GPU; lengths, rotation and page tables are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba_kv.adapters.torch_timing import is_installed
from numba_kv.errors import InteropError

__all__ = ["table_step"]


def table_step(rows: int, groups: int, width: int, page_tokens: int) -> Callable[[], None]:
    """Build the table work of one decode step over `rows` rows in `groups` groups.

    Returns
    -------
    callable
        Enqueues it on torch's current stream.

    Raises
    ------
    InteropError
        If torch or Triton are not installed.
    """
    if not is_installed():
        raise InteropError("triton: torch with a GPU and triton are needed (pip install torch)")
    import torch

    gather, slots = _kernels()
    tables = [torch.randint(0, 1 << 20, (rows, width), dtype=torch.int32, device="cuda") for _ in range(groups)]
    outs = [torch.empty_like(table) for table in tables]
    order = torch.randperm(rows, device="cuda", dtype=torch.int32)
    counts = torch.full((rows,), min(width, 256), dtype=torch.int32, device="cuda")
    positions = torch.randint(0, width * page_tokens, (rows,), dtype=torch.int64, device="cuda")
    mapping = torch.empty(groups, rows, dtype=torch.int64, device="cuda")

    def run() -> None:
        for g in range(groups):
            gather[(rows,)](tables[g], outs[g], order, counts, width, BLOCK=1024)
            slots[(-(-rows // 256),)](outs[g], positions, mapping[g], rows, width, page_tokens, BLOCK=256)

    return run


def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def gather(table, out, order, counts, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        source = tl.load(order + row).to(tl.int64)
        count = tl.load(counts + source)
        for first in range(0, count, BLOCK):
            column = first + tl.arange(0, BLOCK)
            ids = tl.load(table + source * width + column, mask=column < count)
            tl.store(out + row * width + column, ids, mask=column < count)

    @triton.jit
    def slots(table, positions, mapping, rows, width, page, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        position = tl.load(positions + row, mask=row < rows, other=0)
        ids = tl.load(table + row.to(tl.int64) * width + position // page, mask=row < rows, other=0).to(tl.int64)
        tl.store(mapping + row, ids * page + position % page, mask=row < rows)

    return gather, slots
