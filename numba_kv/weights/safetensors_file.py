"""One safetensors file, open for reading.

Knows how to open it, check it, map it, and read ranges of its bytes. Does not know devices.

Bulk reads go through the file descriptor, not through the mapping: a file that shrinks while it is read is then a
WeightError instead of a SIGBUS, and the pages do not count as the process's memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from numba_kv.errors import InputError, StateError, WeightError
from numba_kv.weights.safetensors_header import LENGTH_NBYTES, Header, TensorEntry, parse_header, parse_length

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SafetensorsFile", "path_text", "pread_address", "read_whole"]

# A pipe must not block the opening, a child process must not inherit it, Windows must not translate line ends.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text.

    Raises
    ------
    InputError
        If it is none.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise InputError(f"path: {path!r} is not a path") from None
    if not isinstance(text, str):
        raise InputError(f"path: {path!r} is not a path of text")
    return text


def _open(path: str | os.PathLike[str], *, what: str) -> tuple[int, int, str]:
    """Return a descriptor, the size and the path as text of a regular file."""
    text = path_text(path)
    try:
        descriptor = os.open(text, _FLAGS)
    except IsADirectoryError:
        raise WeightError(f"{text}: a folder; {what} is wanted") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if os.path.isdir(text):  # Windows calls a folder a file without permission
            raise WeightError(f"{text}: a folder; {what} is wanted") from None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise WeightError(f"{text}: cannot be opened ({reason})") from error
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise WeightError(f"{text}: a folder; {what} is wanted")
        if not stat.S_ISREG(found.st_mode):
            raise WeightError(f"{text}: not a regular file; {what} is wanted")
        undo.pop_all()
    return descriptor, found.st_size, text


def read_whole(path: str | os.PathLike[str], *, what: str, max_nbytes: int) -> bytes:
    """Return all bytes of a small file.

    Parameters
    ----------
    path : path
        Of the file.
    what : str
        What it should be, for messages.
    max_nbytes : int
        Most bytes that are read.

    Raises
    ------
    WeightError
        If it cannot be read, is not a regular file, or is larger than `max_nbytes`.
    """
    descriptor, nbytes, text = _open(path, what=what)
    with os.fdopen(descriptor, "rb") as file:
        if nbytes > max_nbytes:
            raise WeightError(f"{text}: {nbytes} bytes, at most {max_nbytes} are wanted for {what}")
        try:
            return file.read(max_nbytes)
        except OSError as error:
            raise WeightError(f"{text}: cannot be read ({error.strerror or error})") from error


class SafetensorsFile:
    """A safetensors file whose header is sound. Owns a descriptor; the mapping lives as long as arrays of it do.

    The descriptor is kept, so that what is read later is the file that was checked, even if another one takes its name.

    Parameters
    ----------
    path : path
        Of the file; symbolic links are followed.

    Attributes
    ----------
    path : str
        As it was given.
    nbytes : int
        Size of the file.
    tensors : mapping of str to TensorEntry
        In the order of their bytes.
    metadata : mapping of str to str
        The file's own notes.

    Raises
    ------
    WeightError
        If the file cannot be read or is damaged; nothing stays open.

    Cost: reads the header alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor: int | None = None
        self._mapping: mmap.mmap | None = None
        descriptor, self.nbytes, self.path = _open(path, what="a safetensors file")
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            header = self._read_header(descriptor)
            undo.pop_all()
        self._descriptor = descriptor
        self.tensors: Mapping[str, TensorEntry] = header.tensors
        self.metadata: Mapping[str, str] = header.metadata

    def _read_header(self, descriptor: int) -> Header:
        try:
            prefix = os.read(descriptor, LENGTH_NBYTES)
            length = parse_length(prefix, self.nbytes, self.path)
            text = bytearray()
            while len(text) < length:
                more = os.read(descriptor, length - len(text))
                if not more:
                    raise WeightError(f"{self.path}: the file ends inside the header: it is truncated")
                text += more
        except OSError as error:
            raise WeightError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        return parse_header(bytes(text), self.nbytes, self.path)

    def entry(self, name: str) -> TensorEntry:
        """Return what the header says of `name`.

        Raises
        ------
        WeightError
            If the file has no such tensor.
        """
        found = self.tensors.get(name)
        if found is None:
            raise WeightError(f"{self.path}: there is no tensor {name!r}")
        return found

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor as a read-only array of the mapped file, without reading it.

        The mapping lives as long as arrays of it do, also after `close`. The file must not be shortened or rewritten in
        place meanwhile; replacing it by another file is harmless.

        Raises
        ------
        WeightError
            If there is no such tensor, or the file has become shorter.
        StateError
            After `close`.
        """
        import numpy as np

        entry = self.entry(name)
        descriptor = self._check_open()
        if self._mapping is None:
            try:
                if os.fstat(descriptor).st_size < self.nbytes:
                    raise WeightError(f"{self.path}: the file has become shorter than the {self.nbytes} bytes that it had")
                self._mapping = mmap.mmap(descriptor, self.nbytes, access=mmap.ACCESS_READ)
            except OSError as error:
                raise WeightError(f"{self.path}: cannot be mapped ({error.strerror or error})") from error
        if not entry.nbytes:
            return np.empty(entry.shape, entry.dtype.numpy())
        mapped: NDArray[Any] = np.ndarray(entry.shape, entry.dtype.numpy(), self._mapping, entry.offset)
        return mapped

    def read_into(self, out: NDArray[np.uint8], offset: int) -> None:
        """Fill `out` with the file's bytes from `offset` on. May run on any thread.

        Raises
        ------
        WeightError
            If the file ends before, or cannot be read.
        StateError
            After `close`.
        """
        descriptor = self._check_open()
        view = out.data.cast("B")
        done = 0
        try:
            while done < len(view):
                count = _read_at(descriptor, view[done:], offset + done)
                if not count:
                    raise WeightError(
                        f"{self.path}: the file ends at byte {offset + done}, {self.nbytes} are wanted: "
                        "it was truncated while it was read"
                    )
                done += count
        except OSError as error:
            raise WeightError(f"{self.path}: cannot be read at byte {offset + done} ({error.strerror or error})") from error

    @property
    def descriptor(self) -> int:
        """The system's number of the open file, until `close`.

        Raises
        ------
        StateError
            After `close`.
        """
        return self._check_open()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._descriptor is None

    def close(self) -> None:
        """Close the descriptor; a second call does nothing. Arrays of the mapping stay valid."""
        descriptor, self._descriptor = self._descriptor, None
        self._mapping = None
        if descriptor is not None:
            os.close(descriptor)

    def _check_open(self) -> int:
        if self._descriptor is None:
            raise StateError(f"{self.path}: the file is closed")
        return self._descriptor

    def __enter__(self) -> SafetensorsFile:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def __repr__(self) -> str:
        return f"SafetensorsFile({self.path!r}, {len(self.tensors)} tensors{', closed' if self.is_closed else ''})"


if hasattr(os, "preadv"):

    def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [view], offset)

    _pread = ctypes.cast(ctypes.CDLL(None).pread, ctypes.c_void_p).value or 0

    def pread_address() -> int:
        """Return the address of the system's ``pread``, which reads bytes of a file at an offset; 0 where it has none."""
        return _pread

else:  # Windows: one position for all threads, so they take turns
    from threading import Lock

    _turn = Lock()

    def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
        with _turn:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(view))
        view[: len(data)] = data
        return len(data)

    def pread_address() -> int:
        """Return 0: there is no function that reads at an offset."""
        return 0
