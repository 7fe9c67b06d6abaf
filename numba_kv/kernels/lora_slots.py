"""Adapter slots: `switch_adapter` makes one adapter that of the whole batch, in one launch whatever it has of layers."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.spec import array, scalar

__all__ = ["CHUNK_WORDS", "switch_adapter"]

#: 64-bit words that one block copies.
CHUNK_WORDS = 4096


@kernel(
    block_form=True,
    slots=array("int64", 2),
    adapter_ids=array("int32"),
    source=scalar(),
    view=scalar(),
)
def switch_adapter(item, lane, lanes, slots, adapter_ids, source, view):
    """Copy slot `source` over slot `view` (negative: do not), and write `source` to every entry of `adapter_ids`.

    Item: `CHUNK_WORDS` words of a slot; the first one writes the ids too. Lanes share the words. ::

        slots   | 0: zeros | 1 | ... | source | ... | view |
                                          `------------^

    Cost: a slot read and written, which no row of the batch depends on.
    """
    if view >= 0:
        word = np.int64(item) * CHUNK_WORDS + lane
        last = np.int64(item) * CHUNK_WORDS + CHUNK_WORDS
        if last > slots.shape[1]:
            last = np.int64(slots.shape[1])
        while word < last:
            slots[view, word] = slots[source, word]
            word += lanes
    if item == 0:
        row = np.int64(lane)
        while row < adapter_ids.shape[0]:
            adapter_ids[row] = source
            row += lanes
