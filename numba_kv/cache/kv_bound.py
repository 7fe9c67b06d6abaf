"""BoundCall: a call of `KVIO` whose arguments were looked at once."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING

from numba_kv.device.unique import Unique
from numba_kv.errors import InputError, StateError

if TYPE_CHECKING:
    from numba_kv.cache.kv_calls import Call
    from numba_kv.device import Device, Stream
    from numba_kv.device.guard import CallGuard

__all__ = ["BoundCall"]


class BoundCall(Unique):
    """A call on a layer over arrays that stay where they are. Keeps them alive.

    `KVIO.bind_write` and its like make one for each layer; a model's loop over layers calls them, in every step or once into a
    graph. What the arrays hold is read when the work runs, and scales are those of that moment. ::

        writes = [io.bind_write(layer, k, v, view) for layer in layers]
        view = batch.step(1)
        for write in writes:
            ...                          # K and V of the layer
            write(view.num_tokens)

    Attributes
    ----------
    max_tokens : int
        Tokens for which its arrays have room.

    Stream: enqueues. Cost: one launch; with other tokens than the time before, a few microseconds more.
    """

    __slots__ = ("_again", "_device", "_guard", "_keep", "_launch", "_lock", "_memories", "_tokens", "max_tokens")

    def __init__(self, device: Device, guard: CallGuard, call: Call) -> None:
        self._device = device
        self._guard = guard
        self._lock = guard.lock
        self._keep = call.tensors
        self._memories = list({id(t._memory): t._memory for t in (call.pool, *call.tensors) if t is not None}.values())
        self._launch = call.bind()
        self._launch.check(call.tokens)
        self.max_tokens = min(self._launch.tokens, call.slots.size)
        self._tokens = -1
        self._again: Callable[[Stream], None]
        self._aim(call.tokens)

    def __call__(self, tokens: int | None = None, stream: object | None = None) -> None:
        """Enqueue the work.

        Parameters
        ----------
        tokens : int, optional
            How many of the first tokens; default as many as the time before, the first time those of the binding.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        InputError
            If there is no room for so many tokens.
        StateError
            After the `KVIO` or the resources were closed, while a call of it runs in another thread, or if the stream is
            neither of the two.
        """
        lock = self._lock
        if not lock.acquire(False):
            self._guard.take()  # says why not
        try:
            if self._guard.is_closed:
                self._guard.check_open()
            for memory in self._memories:
                if memory.is_closed:
                    raise StateError("pools or arrays are gone; SharedResources or an array of the call was closed")
            if tokens is not None and tokens != self._tokens:
                self._aim(tokens)
            if stream is None:
                self._again(self._device.stream)
            else:
                with self._device.active():
                    self._again(self._device.as_capturing_stream(stream))
        finally:
            lock.release()

    def _aim(self, tokens: int) -> None:
        """Prepare the launch for a number of tokens."""
        try:
            number = -1 if isinstance(tokens, bool) else index(tokens)
        except TypeError:
            number = -1
        if not 0 <= number <= self.max_tokens:
            raise InputError(f"tokens: {tokens!r} given, an integer in 0..{self.max_tokens} wanted: the arrays have no room")
        self._again = self._launch.repeated(number)
        self._tokens = number

    def __repr__(self) -> str:
        return f"BoundCall({self._launch.kernel.name}, {self._tokens} of {self.max_tokens} tokens)"
