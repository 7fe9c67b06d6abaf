"""The compiled loop of `driver_calls`. Importing this file imports Numba and compiles.

The loop calls functions by their addresses, so that its machine code holds none and can be kept on disk.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_kv.kernels.host_code import compiled

__all__ = ["run_calls"]

_WORD = ir.IntType(64)
_PARAMETERS = 11


@intrinsic
def _call(typingctx, row):
    """Call the function whose address, and whose parameters, lie at `row`. One that takes fewer ignores the rest."""

    def codegen(context, builder, signature, arguments):
        first = builder.inttoptr(arguments[0], _WORD.as_pointer())
        words = [builder.load(builder.gep(first, [ir.Constant(_WORD, i)])) for i in range(1 + _PARAMETERS)]
        function = builder.inttoptr(words[0], ir.FunctionType(ir.IntType(32), [_WORD] * _PARAMETERS).as_pointer())
        return builder.zext(builder.call(function, words[1:]), _WORD)

    return types.int64(types.int64), codegen


@compiled("int64(int64, int64)", waits=True)  # for room in a queue, which a callback of the host may have to make
def run_calls(table, count):
    """Make `count` calls of `table`. Returns 0, or place and status of the first that failed: ``place << 32 | status``."""
    for place in range(count):
        status = _call(table + np.int64(8 * (1 + _PARAMETERS)) * place)
        if status != 0:
            return np.int64(place) << 32 | status
    return np.int64(0)

