"""The compiled loop of `pump`. Importing this file imports Numba and compiles; only `pump` does so, when it first runs.

The loop calls C functions by their addresses, so that its machine code holds none and can be kept on disk.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_kv.kernels.host_code import compiled_on_disk

__all__ = ["pump_windows"]

_WORD = ir.IntType(64)


@intrinsic
def _call(typingctx, address, a, b, c, d):
    """Call the C function at `address` with four words. One that takes fewer, or narrower ones, ignores the rest."""

    def codegen(context, builder, signature, arguments):
        target, *words = arguments
        function = builder.inttoptr(target, ir.FunctionType(_WORD, [_WORD] * 4).as_pointer())
        return builder.call(function, words)

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _take(typingctx, address):
    """Add 1 to the word at `address` and return what it was before, atomically."""

    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_WORD, 1), "monotonic")

    return types.int64(types.int64), codegen


def _pump_windows(segments, skipped, sizes, state, counter, done, functions, blocks, events, reader, destination, stream):
    """Take windows until there are none: wait for a block, fill it, enqueue its copy and an event.

    Returns 0 when nothing is left, 1 + window if its bytes could not be read, -status if the driver refused.
    """
    read, zero, copy, record, wait = functions[0], functions[1], functions[2], functions[3], functions[4]
    size, total = sizes[0], sizes[1]
    turn = 0
    while state[1] == 0:
        window = _take(counter)
        if window >= skipped.shape[0]:
            break
        if skipped[window] != 0:
            continue
        slot = turn % blocks.shape[0]
        block, event = blocks[slot], events[slot]
        status = np.int32(_call(wait, event, 0, 0, 0))
        if status != 0:
            return -np.int64(status)
        begin, end = window * size, min(window * size + size, total)
        at = begin
        segment, above = 0, segments.shape[0]  # the first segment that ends behind `begin`
        while segment < above:
            middle = (segment + above) // 2
            if segments[middle, 1] > begin:
                above = middle
            else:
                segment = middle + 1
        while segment < segments.shape[0] and segments[segment, 0] < end:
            low, high = max(begin, segments[segment, 0]), min(end, segments[segment, 1])
            _call(zero, block + at - begin, 0, low - at, 0)
            descriptor, ahead = segments[segment, 2], segments[segment, 3] - segments[segment, 0]
            at = low
            while at < high:
                more = _call(read, descriptor, block + at - begin, high - at, at + ahead)
                if more <= 0:
                    return 1 + window
                at += more
            segment += 1
        _call(zero, block + at - begin, 0, end - at, 0)
        status = np.int32(_call(copy, destination + begin, block, end - begin, stream))
        if status == 0:
            status = np.int32(_call(record, event, stream, 0, 0))
        if status != 0:
            return -np.int64(status)
        done[reader] += end - begin
        turn += 1
    return 0


_TABLE, _WORDS, _ONE = "int64[:, ::1]", "int64[::1]", "int64"
_TAKEN = ", ".join([_TABLE, _WORDS, _WORDS, _WORDS, _ONE, _WORDS, _WORDS, _WORDS, _WORDS, _ONE, _ONE, _ONE])

pump_windows = compiled_on_disk(f"int64({_TAKEN})", _pump_windows)
