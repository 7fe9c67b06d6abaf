"""The compiled loop of a reader: windows of files into page-locked blocks, and from there to the device.

It runs beside the interpreter, without its lock: `load_windows` on the thread that calls it, and on threads of the system that
`start_threads` makes and Python never hears of, so that none begins or ends by waiting for that lock. Like the loop of
`driver_loop` it calls functions by their addresses.
Importing this file imports Numba and compiles. ::

    pieces    | file 3, from byte 512 on | gap | file 4, from 8 on | not a file's bytes |
    windows   |      0      |      1      |      2      |      3      |        4        |   4 and half of 3: for the caller
    blocks    |      0      |      1      |      2      |      0      |        1        |   window w goes through block w % 3

Readers fill windows in any order, several at a time. Windows are sent in their order, those that are filled already by one
copy: each costs the device as much as 160 KiB. The first ones are sent one by one, as soon as they are filled, and so are
the last ones; in between, when copies are what everything waits for, a copy takes as many as it may.

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

__all__ = ["join_threads", "load_windows", "start_threads"]

#: Words of a job. The next window that nobody has; bytes of a window and of all; where they go, and the stream.
NEXT, WINDOW_NBYTES, NBYTES, DESTINATION, STREAM = range(5)
#: Functions: ``pread``, those of `CopyFunctions` with their context, and what lets other threads run, or 0.
READ, COPY, RECORD, QUERY, MAKE_CURRENT, CONTEXT, YIELD = range(5, 12)
#: Address and number of the pieces; address and number of the blocks; at most so many of them by one copy.
PIECES, NUM_PIECES, STAGING, NUM_BLOCKS, MOST = range(12, 17)
#: Addresses of words of each block: the last window that filled it, plus 1; an event; the windows sent before that event.
FILLED, EVENTS, ENDS = range(17, 20)
#: Windows that are sent, and that have arrived; copies that were made, and of which that is known; 1 if a thread is at that.
SENT, ARRIVED, COPIES, KNOWN, IS_TAKEN = range(20, 25)
#: 1 if all are to end; 1 if the result of a thread of the system is a window that somebody else has to fill.
IS_STOPPED, IS_STUCK = range(25, 27)
JOB_WORDS = 27
#: Words of a reader: the window that it has, or -1. For threads of the system: address of the job, the thread, whether it was
#: made and not joined yet, and what `load_windows` returned.
WINDOW, JOB, THREAD, IS_MADE, RESULT = range(5)
READER_WORDS = 8  # of a cache line, which no other reader writes
#: Columns of a piece: where it begins and ends, descriptor of its file or -1, and where in the file it begins.
BEGIN, END, FILE, OFFSET = range(4)
#: What `load_windows` returns beside a window: there is none left; or less than that, by the driver's status, it refused; or
#: it may be called again.
NONE_LEFT, PAUSED = -1, -(1 << 40)
#: More windows than there are.
ENDLESS = 1 << 62

#: With so many copies under way, no smaller one than may be is made: the device does not wait for it.
_AHEAD = 2
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


def _atomic(name: str):
    """Return an intrinsic on a word of an array that other threads use too: ``add`` and ``xchg`` return what it was."""

    def typed(typingctx, words, place, value):
        def codegen(context, builder, signature, arguments):
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            word = builder.gep(array.data, [arguments[1]])
            return builder.atomic_rmw(name, word, arguments[2], "seq_cst")

        return types.int64(words, types.int64, types.int64), codegen

    return intrinsic(typed)


_add, _swap = _atomic("add"), _atomic("xchg")


@intrinsic
def _look(typingctx, words, place):
    """Return a word that other threads write."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "seq_cst", 8)

    return types.int64(words, types.int64), codegen


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


@part
def _learn(job: NDArray[np.int64], most: int) -> int:
    """Note which copies have run, as long as more than `most` are under way; return 0, or the status of a failure."""
    events, ends = _words(job[EVENTS], job[NUM_BLOCKS]), _words(job[ENDS], job[NUM_BLOCKS])
    while job[COPIES] - job[KNOWN] > most:
        place = job[KNOWN] % job[NUM_BLOCKS]
        status: int = _call(job[QUERY], events[place], 0, 0, 0) & _STATUS
        if status == _NOT_READY:
            break
        if status != 0:
            return status
        job[KNOWN] += 1
        _swap(job, ARRIVED, ends[place])
    return 0


@part
def _send(job: NDArray[np.int64]) -> int:
    """Send windows that are filled and next, by one copy, if it is time for that; return 0, or the status of a failure."""
    sent = job[SENT]
    block = sent % job[NUM_BLOCKS]
    most = min(job[MOST], job[NUM_BLOCKS] - block)  # the next block after the last is not behind it
    filled = _words(job[FILLED], job[NUM_BLOCKS])
    count: int = np.int64(0)
    while count < most and _look(filled, block + count) == sent + count + 1:
        count += 1
    if count == 0 or (count < most and job[COPIES] - job[KNOWN] >= _AHEAD):
        return 0
    begin = sent * job[WINDOW_NBYTES]
    nbytes = min(count * job[WINDOW_NBYTES], job[NBYTES] - begin)
    source = job[STAGING] + block * job[WINDOW_NBYTES]
    status: int = _call(job[COPY], job[DESTINATION] + begin, source, nbytes, job[STREAM]) & _STATUS
    if status == 0:
        place = job[COPIES] % job[NUM_BLOCKS]  # every copy under way has a block: no two have one event
        status = _call(job[RECORD], _words(job[EVENTS], job[NUM_BLOCKS])[place], job[STREAM], 0, 0) & _STATUS
    if status == 0:
        _words(job[ENDS], job[NUM_BLOCKS])[place] = sent + count
        job[COPIES] += 1
        _swap(job, SENT, sent + count)
    return status


@part
def _advance(job: NDArray[np.int64], most: int) -> int:
    """Do `_learn` and `_send`, unless another thread is at it. A failure ends all."""
    if _look(job, IS_TAKEN) != 0 or _swap(job, IS_TAKEN, 1) != 0:
        return 0
    status: int = np.int64(0)
    if _look(job, IS_STOPPED) == 0:
        status = _learn(job, most)
        if status == 0:
            status = _send(job)
        if status != 0:
            _swap(job, IS_STOPPED, 1)
    _swap(job, IS_TAKEN, 0)
    return status


@compiled("int64(int64, int64, int64, int64, int64)", waits=True)
def _load(job_address: int, reader_address: int, filled: int, most: int, stays: int) -> int:
    """Do `load_windows`. The first array that Numba sees in a process costs milliseconds: addresses come from Python."""
    job, reader = _words(job_address, np.int64(JOB_WORDS)), _words(reader_address, np.int64(READER_WORDS))
    blocks, nbytes = job[NUM_BLOCKS], job[NBYTES]
    count = (nbytes - 1) // job[WINDOW_NBYTES] + 1
    window: int = np.int64(filled)
    while True:
        if window >= 0:
            _swap(_words(job[FILLED], blocks), window % blocks, window + 1)
            reader[WINDOW] = -1
            status: int = _advance(job, np.int64(_AHEAD - 1))
            if status != 0:
                return NONE_LEFT - status
            most -= 1
            if most <= 0:
                return PAUSED
        window = reader[WINDOW]
        if window < 0 and _look(job, IS_STOPPED) == 0:
            window = _add(job, NEXT, 1)
        wanted = window - blocks + 1  # what has to have arrived
        if window >= count:
            if stays == 0:
                return NONE_LEFT
            wanted = count
        else:
            reader[WINDOW] = window
        while _look(job, ARRIVED) < wanted or window < 0:
            if _look(job, IS_STOPPED) != 0:
                return NONE_LEFT
            if stays != 0 and _look(job, IS_STUCK) != 0:
                return PAUSED
            status = _advance(job, np.int64(0))
            if status != 0:
                return NONE_LEFT - status
            if job[YIELD] != 0 and _look(job, ARRIVED) < wanted:
                _call(job[YIELD], 0, 0, 0, 0)
        if window >= count:
            return NONE_LEFT
        begin = window * job[WINDOW_NBYTES]
        end = min(begin + job[WINDOW_NBYTES], nbytes)
        pieces = _rows(job[PIECES], job[NUM_PIECES], np.int64(4))
        if not _fill(job[READ], pieces, job[STAGING] + window % blocks * job[WINDOW_NBYTES], begin, end):
            return window


def load_windows(job: NDArray[np.int64], reader: NDArray[np.int64], filled: int, most: int, stays: int) -> int:
    """Take the window that the caller has filled, then fill and send windows that nobody has, as long as files give them.

    Parameters
    ----------
    job : int64 [JOB_WORDS]
        Shared by all readers; see `NEXT` and those behind it. `NEXT`, the words from `SENT` on and those of `FILLED` are 0 at
        first, and what was recorded before on the events has run. Writing 1 to `IS_STOPPED` makes all readers end.
    reader : int64 [READER_WORDS]
        Of this reader; see `WINDOW`, which is -1 at first.
    filled : int
        The window that the caller has written to its block; -1: none.
    most : int
        Windows after which the caller wants to be back. It is back too if another reader is stuck.
    stays : int
        1: wait for the copies of all readers if no window is left. 0: leave that, and readers that are stuck, to others.

    Returns
    -------
    int
        A window that the caller is to write to its block; or see `NONE_LEFT`.

    Stream: enqueues copies, and an event for each. Waits for the copy out of a block before it is filled again.
    """
    return int(_load(job.ctypes.data, reader.ctypes.data, filled, most, stays))


@called_back("int64(int64)")
def _read_on_thread(address: int) -> int:
    """Be the reader whose words lie at `address`. One that the driver refuses ends all."""
    reader = _words(address, np.int64(READER_WORDS))
    job = _words(reader[JOB], np.int64(JOB_WORDS))
    status = _call(job[MAKE_CURRENT], job[CONTEXT], 0, 0, 0) & _STATUS
    result: int = NONE_LEFT - status
    if status != 0:
        _swap(job, IS_STOPPED, 1)
    else:
        result = _load(reader[JOB], address, np.int64(-1), np.int64(ENDLESS), np.int64(0))
    _swap(reader, RESULT, result)
    if result >= 0:
        _swap(job, IS_STUCK, 1)
    return 0


@compiled("int64(int64, int64, int64, int64, int64)", waits=True)
def _start(address: int, count: int, routine: int, create: int, attributes: int) -> int:
    """Make a thread for each reader but the first, as long as the system has threads; return how many there are with that."""
    readers = _rows(address, count, np.int64(READER_WORDS))
    made: int = np.int64(1)
    while made < count:
        at = address + made * 8 * READER_WORDS
        if _call(create, at + 8 * THREAD, attributes, routine, at) & _STATUS == 0:
            readers[made, IS_MADE] = 1
            made += 1
        elif attributes != 0:  # a stack that is too small for what each thread of this process gets
            attributes = np.int64(0)
        else:
            break  # those that there are do it
    return made


@compiled("int64(int64, int64, int64)", waits=True)
def _join(address: int, count: int, join: int) -> int:
    """Join the threads that were made; return how many those were."""
    readers = _rows(address, count, np.int64(READER_WORDS))
    joined: int = np.int64(0)
    for reader in range(count):
        if readers[reader, IS_MADE] != 0:
            _call(join, readers[reader, THREAD], 0, 0, 0)
            readers[reader, IS_MADE] = 0
            joined += 1
    return joined


def start_threads(readers: NDArray[np.int64], create: int, attributes: int = 0) -> None:
    """Have `load_windows` run for all readers but the first, which is the caller's. Each finds its result in its `RESULT`.

    Parameters
    ----------
    readers : int64 [readers, READER_WORDS]
        See `WINDOW`, `JOB` and those behind them; `RESULT` is `NONE_LEFT`. It has to live until `join_threads`.
    create : int
        Address of ``pthread_create``.
    attributes : int
        Address of the ``pthread_attr_t`` of the threads; 0: the system's.

    Stream: as `load_windows`.
    """
    _start(readers.ctypes.data, len(readers), _read_on_thread.address, create, attributes)


def join_threads(readers: NDArray[np.int64], join: int) -> None:
    """Wait until the threads that `start_threads` made have ended; `join` is the address of ``pthread_join``."""
    _join(readers.ctypes.data, len(readers), join)
