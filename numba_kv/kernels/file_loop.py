"""The compiled loop of a reader: windows of files into page-locked blocks, and from there to the device.

It runs beside the interpreter, without its lock: `load_windows` on the thread that calls it, `load_on_threads` on threads of
the system that Python never hears of, so that none begins or ends by waiting for that lock. Like the loop of `driver_loop` it
calls functions by their addresses.
Importing this file imports Numba and compiles. ::

    pieces    | file 3, from byte 512 on | gap | file 4, from 8 on | not a file's bytes |
    windows   |      0      |      1      |      2      |      3      |        4        |   4 and half of 3: for the caller

What is not simply a file's bytes, and what a file does not give, is the caller's: it fills that block, or finds out why it
cannot, and comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from numba_kv.kernels.host_code import called_back, compiled, part

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["load_on_threads", "load_windows"]

#: Words of a job: the next window that nobody has, bytes of a window and of all, address of the destination, functions.
NEXT, WINDOW_NBYTES, NBYTES, DESTINATION, READ, COPY, RECORD, QUERY = range(8)
#: And for `load_on_threads`: a function that makes a context current, the context, address and number of the pieces.
MAKE_CURRENT, CONTEXT, PIECES, NUM_PIECES = range(8, 12)
JOB_WORDS = 12
#: Words of a reader: number of the block whose turn it is, bytes that it has sent, its stream.
TURN, SENT, STREAM = range(3)
#: And for `load_on_threads`: address of the job, address and number of its blocks, the thread, what `load_windows` returned.
JOB, BLOCKS, NUM_BLOCKS, THREAD, RESULT = range(3, 8)
READER_WORDS = 8  # of a cache line, which no other reader writes
#: Columns of a block: its address and its event.
ADDRESS, EVENT = range(2)
#: Columns of a piece: where it begins and ends, descriptor of its file or -1, and where in the file it begins.
BEGIN, END, FILE, OFFSET = range(4)
#: What `load_windows` returns beside a window: there is none left; or less than that, by the driver's status, it refused.
NONE_LEFT = -1

_STATUS = 0xFFFFFFFF  # a status has 32 bits; what stands above them in a word is anything
_NOT_READY = 600
_WORD = ir.IntType(64)


@intrinsic
def _call(typingctx, function, a, b, c, d):
    """Call a function of C by its address. One that takes fewer parameters ignores the rest."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(_WORD, [_WORD] * 4).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])

    return types.int64(*[types.int64] * 5), codegen


@intrinsic
def _take(typingctx, words):
    """Add 1 to the first of `words`, which other threads do too; return what it was."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(_WORD, 1), "seq_cst")

    return types.int64(words), codegen


@intrinsic
def _clear(typingctx, address, nbytes):
    """Set bytes to 0."""

    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        cgutils.memset(builder, pointer, arguments[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _view(num_axes: int):
    """Return what an intrinsic needs that makes an array of an address and extents."""
    kind = types.Array(types.int64, num_axes, "C")

    def codegen(context, builder, signature, arguments):
        array = context.make_array(kind)(context, builder)
        address, *extents = arguments
        steps = [ir.Constant(_WORD, 8)]
        for extent in extents[:0:-1]:
            steps.insert(0, builder.mul(steps[0], extent))
        data = builder.inttoptr(address, _WORD.as_pointer())
        populate_array(array, data, extents, steps, ir.Constant(_WORD, 8), None)
        return array._getvalue()

    return kind(*[types.int64] * (1 + num_axes)), codegen


@intrinsic
def _words(typingctx, address, count):
    """Return the words at an address: int64 [count]."""
    return _view(1)


@intrinsic
def _rows(typingctx, address, count, width):
    """Return the table at an address: int64 [count, width]."""
    return _view(2)


@part
def _await(query: int, event: int) -> int:
    """Ask until the work before an event has run; return 0, or the status of a failure. The driver's own wait wakes up late."""
    status: int = np.int64(_NOT_READY)
    while status == _NOT_READY:
        status = _call(query, event, 0, 0, 0) & _STATUS
    return status


@part
def _read(function: int, file: int, address: int, nbytes: int, offset: int) -> bool:
    """Read bytes of a file, in as many calls as it takes; return whether it gave them all."""
    while nbytes > 0:
        count = _call(function, file, address, nbytes, offset)
        if count <= 0:
            return False
        address, nbytes, offset = address + count, nbytes - count, offset + count
    return True


@part
def _fill(read: int, pieces: NDArray[np.int64], address: int, begin: int, end: int) -> bool:
    """Write bytes [begin, end) of the destination to `address`, if they are bytes of files and gaps; return whether."""
    low, high = 0, len(pieces)  # the first piece that ends behind `begin` is in [low, high]
    while low < high:
        middle = (low + high) // 2
        if pieces[middle, END] > begin:
            high = middle
        else:
            low = middle + 1
    at = begin
    while low < len(pieces) and pieces[low, BEGIN] < end:
        first, last = max(begin, pieces[low, BEGIN]), min(end, pieces[low, END])
        if pieces[low, FILE] < 0:
            return False
        _clear(address + at - begin, first - at)
        offset = pieces[low, OFFSET] + first - pieces[low, BEGIN]
        if not _read(read, pieces[low, FILE], address + first - begin, last - first, offset):
            return False
        at = last
        low += 1
    _clear(address + at - begin, end - at)
    return True


@compiled("int64(int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64)", waits=True)
def load_windows(
    job: NDArray[np.int64],
    reader: NDArray[np.int64],
    blocks: NDArray[np.int64],
    pieces: NDArray[np.int64],
    filled: int,
) -> int:
    """Send the window that the caller has filled, then fill and send windows that nobody has, as long as files give them.

    Parameters
    ----------
    job : int64 [JOB_WORDS]
        Shared by all readers; see `NEXT` and those behind it. Without a window left they end; writing the number of windows to
        `NEXT` makes them.
    reader : int64 [READER_WORDS]
        Of this reader; see `TURN` and those behind it. Zeros and the stream at first.
    blocks : int64 [blocks, 2]
        Of this reader; see `ADDRESS` and `EVENT`. What was recorded before on these events has run.
    pieces : int64 [pieces, 4]
        By rising begin, none empty; see `BEGIN` and those behind it.
    filled : int
        The window that the block whose turn it is holds; -1: none.

    Returns
    -------
    int
        A window that the caller is to write to the block whose turn it is; or see `NONE_LEFT`.

    Stream: enqueues a copy and an event for each window. Waits for the event of a block before it is filled again, and for all
    copies of this reader if none is left.
    """
    nbytes = job[NBYTES]
    window: int = np.int64(filled)
    while True:
        turn = reader[TURN]
        status: int = np.int64(0)
        if window >= 0:
            begin = window * job[WINDOW_NBYTES]
            end = min(begin + job[WINDOW_NBYTES], nbytes)
            event, stream = blocks[turn, EVENT], reader[STREAM]
            status = _call(job[COPY], job[DESTINATION] + begin, blocks[turn, ADDRESS], end - begin, stream) & _STATUS
            if status == 0:
                status = _call(job[RECORD], event, stream, 0, 0) & _STATUS
            if status != 0:
                return NONE_LEFT - status
            reader[SENT] += end - begin
            reader[TURN] = turn = (turn + 1) % len(blocks)
        window = _take(job)
        begin = window * job[WINDOW_NBYTES]
        last = begin >= nbytes
        if last:
            if reader[SENT] == 0:
                return NONE_LEFT
            turn = (turn + len(blocks) - 1) % len(blocks)
        status = _await(job[QUERY], blocks[turn, EVENT])
        if last or status != 0:
            return NONE_LEFT - status
        end = min(begin + job[WINDOW_NBYTES], nbytes)
        if not _fill(job[READ], pieces, blocks[turn, ADDRESS], begin, end):
            return window


@called_back("int64(int64)")
def _read_on_thread(address: int) -> int:
    """Be the reader whose words lie at `address`. One that the driver refuses ends all."""
    reader = _words(address, np.int64(READER_WORDS))
    job = _words(reader[JOB], np.int64(JOB_WORDS))
    result: int = NONE_LEFT - (_call(job[MAKE_CURRENT], job[CONTEXT], 0, 0, 0) & _STATUS)
    if result == NONE_LEFT:
        blocks = _rows(reader[BLOCKS], reader[NUM_BLOCKS], np.int64(2))
        pieces = _rows(job[PIECES], job[NUM_PIECES], np.int64(4))
        result = load_windows(job, reader, blocks, pieces, np.int64(-1))
    if result < NONE_LEFT:
        job[NEXT] = (job[NBYTES] + job[WINDOW_NBYTES] - 1) // job[WINDOW_NBYTES]  # as many as there are windows
    reader[RESULT] = result
    return 0


@compiled("int64(int64, int64, int64, int64, int64, int64)", waits=True)
def _run_threads(readers: int, count: int, routine: int, create: int, join: int, attributes: int) -> int:
    """Be the first of some readers whose words begin at `readers`, and have threads for the others; return how many worked."""
    table = _rows(readers, count, np.int64(READER_WORDS))
    row = 8 * READER_WORDS
    made: int = np.int64(1)
    while made < count:
        at = readers + made * row
        if _call(create, at + 8 * THREAD, attributes, routine, at) & _STATUS == 0:
            made += 1
        elif attributes != 0:  # a stack that is too small for what each thread of this process gets
            attributes = np.int64(0)
        else:
            break  # the system has no more threads: those that there are do it
    _call(routine, readers, 0, 0, 0)
    for reader in range(1, made):
        _call(join, table[reader, THREAD], 0, 0, 0)
    return made


def load_on_threads(readers: NDArray[np.int64], create: int, join: int, attributes: int = 0) -> None:
    """Have `load_windows` run for several readers at once; return when all have. Each finds its result in its `RESULT`.

    Parameters
    ----------
    readers : int64 [readers, READER_WORDS]
        See `TURN`, `JOB` and those behind them; `RESULT` is `NONE_LEFT`.
    create, join : int
        Addresses of ``pthread_create`` and ``pthread_join``.
    attributes : int
        Address of the ``pthread_attr_t`` of the threads; 0: the system's.

    Stream: as `load_windows`.
    """
    _run_threads(readers.ctypes.data, len(readers), _read_on_thread.address, create, join, attributes)
