"""The compiled loop of `pump`. Importing this file imports Numba and compiles; only `pump` does so, when it first runs.

The loop calls C functions by their addresses, so that its machine code holds none and can be kept on disk.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

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


def _pump_windows(pieces, windows, state, counter, done, functions, blocks, events, reader, destination, stream):
    """Take windows until there are none: wait for a block, fill it, enqueue its copy and an event.

    Returns 0 when nothing is left, 1 + window if its bytes could not be read, -status if the driver refused.
    """
    read, zero, copy, record, wait = functions[0], functions[1], functions[2], functions[3], functions[4]
    turn = 0
    while state[1] == 0:
        window = _take(counter)
        if window >= windows.shape[0]:
            break
        slot = turn % blocks.shape[0]
        block, event = blocks[slot], events[slot]
        status = np.int32(_call(wait, event, 0, 0, 0))
        if status != 0:
            return -np.int64(status)
        first, count, offset, nbytes = windows[window, 0], windows[window, 1], windows[window, 2], windows[window, 3]
        for piece in range(first, first + count):
            descriptor, at, begin, wanted = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3]
            if descriptor < 0:
                _call(zero, block + begin, 0, wanted, 0)
                continue
            got = 0
            while got < wanted:
                more = _call(read, descriptor, block + begin + got, wanted - got, at + got)
                if more <= 0:
                    return 1 + window
                got += more
        status = np.int32(_call(copy, destination + offset, block, nbytes, stream))
        if status == 0:
            status = np.int32(_call(record, event, stream, 0, 0))
        if status != 0:
            return -np.int64(status)
        done[reader] += nbytes
        turn += 1
    return 0


def _compiled():
    """Return the loop with its machine code kept on disk, or for this process alone where there is no place for it."""
    tables, words, word = "int64[:, ::1]", "int64[::1]", "int64"
    taken = ", ".join([tables, tables, words, word, words, words, words, words, word, word, word])
    for cache in (True, False):
        try:
            return numba.njit(f"int64({taken})", nogil=True, cache=cache, _nrt=False)(_pump_windows)
        except (OSError, RuntimeError):
            if not cache:
                raise


pump_windows = _compiled()
