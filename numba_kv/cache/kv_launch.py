"""RowLaunch: a bound kernel over tokens, with as many tokens a block as suits how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.device.cuda_device import CudaDevice
from numba_kv.errors import ShapeError
from numba_kv.geometry import ceil_div

if TYPE_CHECKING:
    from numba_kv.device import Device, Stream, Tensor
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["RowLaunch", "Shape", "known_on_gpu", "known_scalars", "threads_for"]

_WARP = 32
_MAX_THREADS = 256


def threads_for(units: int) -> int:
    """Return the threads of a block that has `units` pieces of work."""
    return min(_MAX_THREADS, max(_WARP, ceil_div(units, _WARP) * _WARP))


def known_on_gpu(device: Device, values: dict[str, Tensor | int], names: Iterable[str]) -> dict[str, int]:
    """Take from `values`, and return, the scalars of these names that a kernel for `device` is compiled with: all on a GPU.

    Elsewhere none, as fewer kernels are compiled then.
    """
    if not isinstance(device, CudaDevice):
        return {}
    return {name: value for name in names if isinstance(value := values.pop(name), int)}


def known_scalars(
    device: Device, values: dict[str, Tensor | int], tensors: dict[str, Tensor | None], open_names: tuple[str, ...]
) -> dict[str, int]:
    """Take from `values`, and return, the scalars that a kernel for `device` is compiled with: on a GPU most of them.

    A model has few shapes and strides, and they are most of what a small call would wait for. Open are `open_names`, and the
    strides of ``tensors`` [T, H, D] whose heads do not lie together: they differ with the number of tokens.
    """
    apart = {name for name, t in tensors.items() if t is not None and t.shape[1] > 1 and t.strides[1] != t.shape[2]}
    left = {*open_names, *(f"{name}_{axis}" for name in apart for axis in ("token", "head"))}
    return known_on_gpu(device, values, [n for n, value in values.items() if isinstance(value, int) and n not in left])


@dataclass(frozen=True, slots=True)
class Shape:
    """How tokens become blocks, from `least` tokens on: `span` tokens a block of `threads` threads, or `parts` blocks an item.

    `kernel`: instead of the launch's own.
    """

    least: int
    span: int
    threads: int
    parts: int = 1
    kernel: Kernel | None = None


class RowLaunch:
    """A kernel bound to its arrays.

    Parameters
    ----------
    kernel : Kernel
        Of the block form; shapes may have others that take the same values.
    device : Device
        Where it runs.
    values : dict
        Its arguments. If `tokens` and `span` are among them, they are set by every run.
    items : int
        Items of a token, if a block has one token.
    tokens : int
        Tokens for which there is room.
    named : str
        What messages call the arrays that have room for no more.
    shapes : tuple of Shape
        The first has `least` 0. Bound when they are first used, but at once if kernels differ: nothing is compiled later on.
    """

    __slots__ = ("_bound", "_device", "_has_span", "_tokens", "_values", "items", "kernel", "named", "shapes", "tokens")

    def __init__(
        self,
        kernel: Kernel,
        device: Device,
        values: dict[str, Tensor | int],
        items: int,
        tokens: int,
        *shapes: Shape,
        named: str = "k, v",
    ) -> None:
        self.kernel = kernel
        self.items = items
        self.tokens = tokens
        self.named = named
        self.shapes = shapes
        self._device = device
        self._values = values
        self._has_span = "span" in values
        self._bound: list[Launch | None] = [None] * len(shapes)
        self._tokens = [-1] * len(shapes)
        kernels = {shape.kernel for shape in shapes}
        for place, shape in enumerate(shapes):
            if not place or (len(kernels) > 1 and shape.least <= tokens):
                self._bind(place)

    def _bind(self, place: int) -> Launch:
        shape = self.shapes[place]
        values = {**self._values, "span": shape.span} if self._has_span else self._values
        launch = (shape.kernel or self.kernel).bind(self._device, values, threads=shape.threads)
        self._bound[place] = launch
        return launch

    def check(self, tokens: int) -> None:
        """Raise ShapeError if there is no room for so many tokens."""
        if self.tokens < tokens:
            raise ShapeError(f"{self.named}: {self.tokens} tokens given, {tokens} wanted")

    def run(self, tokens: int, stream: Stream, **scalars: int) -> None:
        """Enqueue the kernel over the first `tokens` tokens."""
        launch, items = self._aimed(tokens)
        launch(items, stream, **scalars)

    def repeated(self, tokens: int) -> Callable[[Stream], None]:
        """Return a function that enqueues the kernel over the first `tokens` tokens each time; see `Launch.repeated`."""
        launch, items = self._aimed(tokens)
        return launch.repeated(items)

    def _aimed(self, tokens: int) -> tuple[Launch, int]:
        """Return the launch for so many tokens, and its items."""
        place = 0
        for number, shape in enumerate(self.shapes):
            if tokens >= shape.least:
                place = number
        launch = self._bound[place] or self._bind(place)
        if not self._has_span:
            return launch, tokens * self.items * self.shapes[place].parts
        if tokens != self._tokens[place]:
            launch.set(tokens=tokens)
            self._tokens[place] = tokens
        return launch, -(-tokens // self.shapes[place].span) * self.items
